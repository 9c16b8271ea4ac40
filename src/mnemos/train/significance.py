"""What the seeds of a comparison show: intervals of means, and differences to a reference row over several rows.

    mean ± t(97.5 %, n − 1) · s/√n                                  the 95 % interval of a row's mean
    Welch's t-test of a row against the reference                   difference, its 95 % interval, p
    p_Holm(i) = max over j ≤ i of min(1, (m − j + 1) · p(j))        p(1) ≤ … ≤ p(m) of the m rows but the reference

Runs of equal seeds are not treated as pairs. They read the same batches in the same order, but a seed draws other
weights for another model, and the spread between runs comes mostly from these. If the common order makes scores of
equal seeds alike, the unpaired test is the more careful one: its interval is too wide, not too narrow.

Holm's procedure keeps the probability of one false difference or more among all rows at 5 %. It needs no independent
tests: all rows are tested against one reference. Holm (1979), Scand. J. Statist. 6, 65-70.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mnemos.types import JSONObject

LEVEL = 0.05
NO_DIFFERENCE = "no difference shown"
ONE_SEED = "one seed shows nothing about differences"


def interval(values: Sequence[float]) -> list[float] | None:
    """The 95 % interval [low, high] of the mean of several values (Student's t); None for one, or if one is not finite.

    Equal values have no spread: the interval is their mean.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    from scipy import stats  # importing it takes longer than a small comparison needs

    mean, error = float(np.mean(values)), float(stats.sem(values))
    reach = error * float(stats.t.ppf(1 - LEVEL / 2, len(values) - 1))
    return [mean - reach, mean + reach]


def welch(values: Sequence[float], reference: Sequence[float]) -> JSONObject | None:
    """{"difference" of the means, "interval" (95 %), "p" (two-sided)} by Welch's t-test.

    None unless both have two values or more, all finite. Without any spread on both sides p is 1 for equal means and 0
    for others.
    """
    if min(len(values), len(reference)) < 2 or not all(map(math.isfinite, (*values, *reference))):
        return None
    difference = float(np.mean(values) - np.mean(reference))
    if len({*values}) == len({*reference}) == 1:
        return {"difference": difference, "interval": [difference] * 2, "p": float(values[0] == reference[0])}
    from scipy import stats

    found: Any = stats.ttest_ind(values, reference, equal_var=False)
    low, high = found.confidence_interval(1 - LEVEL)
    return {"difference": difference, "interval": [float(low), float(high)], "p": float(found.pvalue)}


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values, in the order given; at most 1."""
    corrected, greatest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        greatest = max(greatest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = greatest
    return corrected


def differences(scores: Mapping[str, Sequence[float]], against: str) -> dict[str, JSONObject | None]:
    """For each row the result of `welch` against the reference row, with "p_holm" over all rows that could be tested.

    scores: {name: score of each seed}. None for the reference itself, and for rows that could not be tested.
    """
    found = {name: None if name == against else welch(scores[name], scores[against]) for name in scores}
    tested = [one for one in found.values() if one is not None]
    for one, corrected in zip(tested, holm([one["p"] for one in tested]), strict=True):
        one["p_holm"] = corrected
    return found


def finding(test: JSONObject | None, higher_is_better: bool) -> str:
    """What a row of `differences` shows, in words: better, worse or no difference shown; "" if it was not tested."""
    if test is None:
        return ""
    if test["p_holm"] >= LEVEL:
        return NO_DIFFERENCE
    return "better" if (test["difference"] > 0) == higher_is_better else "worse"
