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

import numpy as np

from mnemos.types import JSONObject

LEVEL = 0.05
NO_DIFFERENCE = "no difference shown"
ONE_SEED = "one seed shows nothing about differences"
NO_SPREAD = "where all seeds have one score there is no spread to compute an interval from, so the table has –"


def interval(values: Sequence[float]) -> list[float] | None:
    """The 95 % interval [low, high] of the mean of several values (Student's t).

    None for one value, if one is not finite, and for equal values: seeds that agree by chance, as they often do on a
    small test split, do not make the mean exactly known.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)) or len({*values}) == 1:
        return None
    mean, reach = float(np.mean(values)), student(len(values) - 1) * math.sqrt(_error2(values))
    return [mean - reach, mean + reach]


def student(freedom: float) -> float:
    """The 97.5 % point of Student's t."""
    from scipy import stats  # importing it takes longer than a small comparison needs

    return float(stats.t.ppf(1 - LEVEL / 2, freedom))


def _error2(values: Sequence[float]) -> float:
    """The squared standard error of the mean."""
    return 0.0 if len({*values}) == 1 else float(np.var(values, ddof=1)) / len(values)


def welch(values: Sequence[float], reference: Sequence[float]) -> JSONObject | None:
    """{"difference" of the means, "interval" (95 %), "p" (two-sided)} by Welch's t-test.

    None unless both have two values or more, all finite, and one of them a spread.

    v = s²/n of each side; freedom (v₁ + v₂)² / (v₁²/(n₁ − 1) + v₂²/(n₂ − 1)), by Welch and Satterthwaite.
    """
    if min(len(values), len(reference)) < 2 or not all(map(math.isfinite, (*values, *reference))):
        return None
    v, w = _error2(values), _error2(reference)
    if v + w == 0:
        return None
    from scipy import stats

    difference, error = float(np.mean(values) - np.mean(reference)), math.sqrt(v + w)
    freedom = (v + w) ** 2 / (v**2 / (len(values) - 1) + w**2 / (len(reference) - 1))
    reach = student(freedom) * error
    p = 2 * float(stats.t.sf(abs(difference) / error, freedom))
    return {"difference": difference, "interval": [difference - reach, difference + reach], "p": p}


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
