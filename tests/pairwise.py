"""Fewer combinations of settings with the same pairs: faults mostly need one setting, or two that meet."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


def cover(cases: Sequence[Iterable[Hashable]], pairs: bool = True) -> list[int]:
    """Numbers of cases, each a collection of values, that hold every value, and every pair, that any case holds.

    Greedy: each next case has the most values or pairs that are still missing; of several such cases it is the first
    of those whose values were used the least.
    """
    cases = [list(values) for values in cases]
    sets = [{*values, *(itertools.combinations(values, 2) if pairs else ())} for values in cases]
    missing, kept, used = set().union(*sets), [], Counter()
    while missing:
        new = [len(part & missing) for part in sets]
        best = min(range(len(sets)), key=lambda i: (-new[i], sum(used[value] for value in cases[i])))
        missing -= sets[best]
        used.update(cases[best])
        kept.append(best)
    return sorted(kept)


def pairwise(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple]:
    """Combinations of one value per axis that hold every pair of values that some allowed combination holds.

    Values must be hashable. One axis or two give the whole product.
    """
    cases = [case for case in itertools.product(*axes) if allowed(*case)]
    return [cases[number] for number in cover([enumerate(case) for case in cases])]
