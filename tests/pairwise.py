"""Fewer combinations of settings with the same pairs: faults mostly need one setting, or two that meet."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any


def pairwise(*axes: Sequence[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple]:
    """Combinations of one value per axis that hold every pair of values that some allowed combination holds.

    Greedy: each next combination is the one with the most pairs that are still missing, the first of several. Values
    must be hashable. One axis or two give the whole product.
    """
    cases = [case for case in itertools.product(*axes) if allowed(*case)]
    if len(axes) < 2:
        return cases
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen
