"""Fewer combinations of settings with the same pairs: faults mostly need one setting, or two that meet."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


def cover(cases: Sequence[Iterable[Hashable]]) -> list[int]:
    """Numbers of cases, each a collection of values, that hold every value and every pair that any case holds.

    Greedy: each next case is the first of those with the most pairs that are still missing.
    """
    pairs = [{frozenset(p) for p in itertools.combinations(values, 2)} | {*values} for values in map(list, cases)]
    missing, kept = set().union(*pairs), []
    while missing:
        best = max(range(len(pairs)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        kept.append(best)
    return sorted(kept)


def pairwise(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple]:
    """Combinations of one value per axis that hold every pair of values that some allowed combination holds.

    Values must be hashable. One axis or two give the whole product.
    """
    cases = [case for case in itertools.product(*axes) if allowed(*case)]
    return [cases[number] for number in cover([enumerate(case) for case in cases])]
