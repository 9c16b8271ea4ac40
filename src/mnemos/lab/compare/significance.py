"""What the seeds of a comparison show: intervals of means, and differences between rows.

    mean ± t(97.5 %, n − 1) · s/√n                                  the 95 % interval of a row's mean
    Welch's t-test of two rows                                      difference, its 95 % interval, p
    p_Holm(i) = max over j ≤ i of min(1, (m − j + 1) · p(j))        p(1) ≤ … ≤ p(m) of the m differences

An interval ends at the bounds of its metric; what is cut off is no possible value, so the coverage stays.

Runs of equal seeds are not treated as pairs: if reading the same batches makes their scores alike, the unpaired test's
interval is too wide, not too narrow. The runs under a control are the same trained models (`paired`).

Holm (1979), Scand. J. Statist. 6, 65-70, needs no independent tests. The interval beside p_Holm has the level 1 − 5 % ·
p / p_Holm, so it is at least one of 95 % and excludes 0 exactly where p_Holm is below 5 %.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

LEVEL = 0.05
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no significant difference"
ONE_SEED = "one seed shows nothing about differences"
NO_SPREAD = "where all seeds have one score there is no spread to compute an interval from"
Bounds = tuple[float, float]  # the least and the greatest value that a metric can have
UNBOUNDED: Bounds = (-math.inf, math.inf)
_ROUNDING = 1e-9  # relative: a difference of scores in float64 has about seven digits more than any score means


class Spread(NamedTuple):
    """Mean, standard deviation of the sample (NaN for one value, and where a value is not finite), number of values."""

    mean: float
    std: float
    seeds: int


class Scored(Protocol):
    """What has a score with a spread over seeds: a row, a control, a `Spread`."""

    @property
    def mean(self) -> float: ...

    @property
    def std(self) -> float: ...

    @property
    def seeds(self) -> int: ...


@dataclass(frozen=True)
class Difference:
    """The difference of two means in the metric's units, and its 95 % interval; None where there is no spread."""

    difference: float
    interval: tuple[float, float] | None = None
    p: float = math.nan  # two-sided
    p_holm: float = math.nan  # corrected for several differences, as the interval then is (`compared`)

    def finding(self, higher_is_better: bool) -> str:
        """`BETTER`, `WORSE` or `NO_DIFFERENCE`; "" where there is no interval to judge by."""
        if self.interval is None:
            return ""
        low, high = self.interval
        if self.p_holm >= LEVEL or low <= 0 <= high:
            return NO_DIFFERENCE
        return BETTER if (low > 0) == higher_is_better else WORSE


def spread(values: Sequence[float]) -> Spread:
    """The mean and the spread of scores; NaN and infinity stay in the mean, because a run that diverged is a result."""
    if not values:
        return Spread(math.nan, math.nan, 0)
    finite = all(map(math.isfinite, values))
    mean = statistics.fmean(values) if finite else sum(values)  # ±∞ or NaN, as is their mean; fmean refuses ∞ − ∞
    return Spread(mean, statistics.stdev(values) if finite and len(values) > 1 else math.nan, len(values))


def interval(score: Scored, bounds: Bounds = UNBOUNDED) -> tuple[float, float] | None:
    """The 95 % interval (low, high) of a mean (Student's t), within the bounds of its metric.

    None for one value, if one is not finite, and for equal values: seeds that agree by chance, as they often do on a
    small test split, do not make the mean exactly known.
    """
    if score.seeds < 2 or not (math.isfinite(score.std) and score.std > 0):
        return None
    return _interval(score.mean, score.std / math.sqrt(score.seeds), score.seeds - 1, _valid(bounds, score.mean))


def _interval(mean: float, error: float, freedom: float, bounds: Bounds, level: float = LEVEL) -> Bounds:
    """Student's interval around a mean with this standard error, cut at the bounds."""
    from scipy import stats  # importing it takes longer than a small comparison needs

    low, high = stats.t.interval(1 - level, freedom, mean, error)
    return max(bounds[0], float(low)), min(bounds[1], float(high))


def _valid(bounds: Bounds, *means: float) -> Bounds:
    """The bounds, or none where a mean is outside of them: then they are not those of its metric."""
    return bounds if all(bounds[0] <= mean <= bounds[1] for mean in means) else UNBOUNDED


def _of_differences(bounds: Bounds) -> Bounds:
    return bounds[0] - bounds[1], bounds[1] - bounds[0]


def wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share of independent rows (Wilson 1927), as drawn: another seed may differ by more."""
    from scipy import stats

    low, high = stats.binomtest(right, of).proportion_ci(1 - LEVEL, method="wilson")
    return float(low), float(high)


def welch(score: Scored, reference: Scored, bounds: Bounds = UNBOUNDED, level: float = LEVEL) -> Difference:
    """The difference of two means by Welch's t-test. bounds: of the metric of both; level: 5 % for an interval of 95 %.

    Without interval and p unless both have two values or more, all finite, and one of them a spread.
    """
    difference = score.mean - reference.mean
    if min(score.seeds, reference.seeds) < 2:
        return Difference(difference)
    v, w = score.std**2 / score.seeds, reference.std**2 / reference.seeds
    if not (math.isfinite(v + w) and v + w > 0):
        return Difference(difference)
    from scipy import stats

    sides = (score.mean, score.std, score.seeds, reference.mean, reference.std, reference.seeds)
    p = float(stats.ttest_ind_from_stats(*sides, equal_var=False).pvalue)
    freedom = (v + w) ** 2 / (v**2 / (score.seeds - 1) + w**2 / (reference.seeds - 1))
    bounds = _of_differences(_valid(bounds, score.mean, reference.mean))
    return Difference(difference, _interval(difference, math.sqrt(v + w), freedom, bounds, level), p)


def paired(changes: Sequence[float], bounds: Bounds = UNBOUNDED) -> Difference | None:
    """The mean of differences that were taken run by run, with its interval; None without any, NaN if one is not
    finite.

    bounds: of the metric that changes. If every difference is exactly 0, the interval is 0 to 0: nothing changed. Equal
    differences other than 0 come from coarse scores by coincidence, so they have no interval. A mean within the
    rounding errors of its terms is 0.
    """
    if not changes:
        return None
    if not all(map(math.isfinite, changes)):
        return Difference(math.nan)
    mean, std, n = spread(changes)
    size = max(map(abs, changes))
    mean = 0.0 if abs(mean) < _ROUNDING * size else mean
    if n < 2 or (size and std < _ROUNDING * size):
        return Difference(mean)
    if not size:
        return Difference(mean, (0.0, 0.0))
    return Difference(mean, _interval(mean, std / math.sqrt(n), n - 1, _of_differences(bounds)))


def differences(scores: Mapping[str, Scored], against: str, bounds: Bounds = UNBOUNDED) -> dict[str, Difference]:
    """The difference of each other row to the reference row, corrected over all that could be tested (`compared`)."""
    names = [name for name in scores if name != against]
    return dict(zip(names, compared([(scores[name], scores[against]) for name in names], bounds), strict=True))


def compared(pairs: Sequence[tuple[Scored, Scored]], bounds: Bounds = UNBOUNDED) -> list[Difference]:
    """The difference of each pair of rows; interval and p are corrected over all that have a p, by Holm."""
    tests = correct([welch(*pair, bounds) for pair in pairs])
    tested = sum(math.isfinite(one.p) for one in tests)
    # p is 0 where it underflows; the level is then the strictest one.
    levels = [LEVEL * one.p / one.p_holm if one.p else LEVEL / tested for one in tests]
    return [
        replace(one, interval=welch(*pair, bounds, level).interval) if one.interval else one
        for one, pair, level in zip(tests, pairs, levels, strict=True)
    ]


def correct(tests: Sequence[Difference]) -> list[Difference]:
    """The differences with p corrected over those that have one, by Holm."""
    corrected = iter(holm([one.p for one in tests if math.isfinite(one.p)]))
    return [replace(one, p_holm=next(corrected)) if math.isfinite(one.p) else one for one in tests]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values, in the order given; at most 1."""
    corrected, greatest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        greatest = max(greatest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = greatest
    return corrected
