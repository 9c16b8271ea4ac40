"""How much one variant differs from another, and how surely: 95 % intervals from the spread between seeds.

Two variants are told apart where the interval of the difference of their means (Welch's) leaves out zero; of several
differences from one variant, those whose p is below 0.05 after Holm's correction (`compare.significance`). Where that
one variant is chosen for its score, all pairs of variants count as tested (`differences_of_best`). The runs under a
control are the same trained models, so their difference is taken run by run.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mnemos.lab.compare.significance import LEVEL, holm, student

from .results import Comparison, Control, Row, RunRecord, StateControls, spread

_ROUNDING = 1e-9  # relative: a difference of scores in float64 has about seven digits more than any score means


@dataclass(frozen=True)
class Difference:
    """How much better the first is than the second (worse: negative), and the 95 % interval; NaN without spread.

    p: two-sided; NaN if it was not computed. p_holm: corrected for several differences; NaN if it is the only one.
    """

    value: float
    low: float
    high: float
    p: float = math.nan
    p_holm: float = math.nan

    @property
    def says(self) -> str:
        """better, worse, alike (no difference is shown) or unknown (no spread to judge by)."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return "unknown"
        if self.p_holm >= LEVEL:
            return "alike"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "alike"


def difference(a: Row | Control, b: Row | Control, higher_is_better: bool) -> Difference:
    """a against b, whose runs are independent: Welch's interval and test."""
    value = (a.mean - b.mean) * (1 if higher_is_better else -1)
    if a.seeds < 2 or b.seeds < 2 or not math.isfinite(a.std) or not math.isfinite(b.std):
        return Difference(value, math.nan, math.nan)
    va, vb = a.std**2 / a.seeds, b.std**2 / b.seeds
    if va + vb == 0:
        return Difference(value, math.nan, math.nan)
    freedom = (va + vb) ** 2 / (va**2 / (a.seeds - 1) + vb**2 / (b.seeds - 1))
    reach = student(freedom) * math.sqrt(va + vb)
    from scipy import stats  # importing it takes longer than a small report needs

    p = stats.ttest_ind_from_stats(a.mean, a.std, a.seeds, b.mean, b.std, b.seeds, equal_var=False).pvalue
    return Difference(value, value - reach, value + reach, float(p))


def mean_interval(row: Row | Control) -> tuple[float, float]:
    """The 95 % interval of a mean (Student's t); NaN without a spread, also if all seeds have one score."""
    if row.seeds < 2 or not (math.isfinite(row.std) and row.std > 0):
        return math.nan, math.nan
    reach = student(row.seeds - 1) * row.std / math.sqrt(row.seeds)
    return row.mean - reach, row.mean + reach


def differences(row: Row, others: Sequence[Row], higher_is_better: bool) -> list[Difference]:
    """The row against each other one, with p corrected over these differences by Holm."""
    return _corrected([difference(row, other, higher_is_better) for other in others])


def differences_of_best(rows: Sequence[Row], higher_is_better: bool) -> tuple[Row, list[tuple[Row, Difference]]]:
    """The row of the best mean, and each other one with the difference of the best to it, p corrected by Holm.

    The best row is chosen by the scores that are tested: the greatest difference of all pairs is one of its own. So p
    is corrected over all K(K − 1)/2 pairs of K rows. Over the K − 1 differences of the best alone, equal rows would be
    told apart in more than one of twenty comparisons.
    """
    best = (max if higher_is_better else min)(rows, key=lambda row: row.mean)
    others = [row for row in rows if row is not best]
    pairs = [(best, other) for other in others] + list(itertools.combinations(others, 2))
    found = _corrected([difference(a, b, higher_is_better) for a, b in pairs])
    return best, list(zip(others, found, strict=False))


def _corrected(found: list[Difference]) -> list[Difference]:
    """The differences with p corrected over those that have one, by Holm."""
    tested = [i for i, one in enumerate(found) if math.isfinite(one.p)]
    for i, p in zip(tested, holm([found[i].p for i in tested]), strict=True):
        found[i] = replace(found[i], p_holm=p)
    return found


def effect(comparison: Comparison, name: str, control: str = "emptied") -> Difference | None:
    """What a control does to a variant: run by run where the runs' results are at hand, else by means.

    Worse means that the trained model depends on what the control took away. None where the control was not run.
    """
    sign = 1 if comparison.higher_is_better else -1
    metric = comparison.metric
    pairs = [(r.tested(metric, control), r.tested(metric)) for r in comparison.runs.get(name, ())]
    if found := _paired([sign * (without - intact) for without, intact in pairs]):
        return found
    for row in comparison.controls:
        if (row.name, row.control) == (name, control) and math.isfinite(row.mean):
            intact = next(r for r in comparison.rows if r.name == name)
            return difference(row, intact, comparison.higher_is_better)
    return None


def state_controls(comparison: Comparison, name: str) -> list[tuple[RunRecord, StateControls]]:
    """The runs of a variant that recorded controls of their state, or why there are none."""
    found = [(run, run.explained.memory) for run in comparison.runs.get(name, ()) if run.explained]
    return [(run, known) for run, known in found if known is not None]


def memory_effect(comparison: Comparison, name: str, memory: str, control: str) -> Difference | None:
    """What a control of one memory of the state does to a variant, run by run; None where it was not run.

    It is measured in the comparison's metric, or in the runs' own where that is not recorded.
    """
    sign = 1 if comparison.higher_is_better else -1
    changes = []
    for _, known in state_controls(comparison, name):
        metric = comparison.metric if comparison.metric in known.carried else known.metric
        changed = [
            one.scores[control][metric] for one in known.memories if one.name == memory and control in one.scores
        ]
        changes += [sign * (value - known.carried[metric]) for value in changed]
    return _paired(changes)


def _paired(values: list[float]) -> Difference | None:
    """The mean of differences that were taken run by run, with its interval; None without a finite one.

    If every difference is exactly 0, the control acts on no score of any run, and the interval is 0 to 0. Equal
    differences other than 0 come from coarse scores by coincidence: the spread between seeds is unknown, and there is
    no interval. A mean within the rounding errors of its terms is 0.
    """
    mean, std, n = spread(values)
    if not n:
        return None
    size = max(abs(value) for value in values if math.isfinite(value))
    mean = 0.0 if abs(mean) < _ROUNDING * size else mean
    if n < 2 or (size and std < _ROUNDING * size):
        return Difference(mean, math.nan, math.nan)
    reach = student(n - 1) * std / math.sqrt(n)
    return Difference(mean, mean - reach, mean + reach)
