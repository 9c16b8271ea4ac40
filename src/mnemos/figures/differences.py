"""How much one variant differs from another, and how surely: 95 % intervals from the spread between seeds.

Two variants are told apart where the interval of the difference of their means (Welch's) leaves out zero. The runs
under a control are the same trained models, so their difference is taken run by run.
"""

import math
from dataclasses import dataclass

from .results import Comparison, Control, Row, RunRecord, StateControls, spread

# Student's t, 97.5 % point, by degrees of freedom 1, 2, …
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Difference:
    """How much better the first is than the second (worse: negative), and the 95 % interval; NaN without spread."""

    value: float
    low: float
    high: float

    @property
    def says(self) -> str:
        """better, worse, alike (the interval holds zero) or unknown (no spread to judge by)."""
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return "unknown"
        return "better" if self.low > 0 else "worse" if self.high < 0 else "alike"


def difference(a: Row | Control, b: Row | Control, higher_is_better: bool) -> Difference:
    """a against b, whose runs are independent: Welch's interval."""
    value = (a.mean - b.mean) * (1 if higher_is_better else -1)
    if a.seeds < 2 or b.seeds < 2 or not math.isfinite(a.std) or not math.isfinite(b.std):
        return Difference(value, math.nan, math.nan)
    va, vb = a.std**2 / a.seeds, b.std**2 / b.seeds
    if va + vb == 0:
        return Difference(value, value, value)
    freedom = (va + vb) ** 2 / (va**2 / (a.seeds - 1) + vb**2 / (b.seeds - 1))
    reach = _student(freedom) * math.sqrt(va + vb)
    return Difference(value, value - reach, value + reach)


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
    """The mean of differences that were taken run by run, with its interval; None without a finite one."""
    mean, std, n = spread(values)
    if not n:
        return None
    reach = _student(n - 1) * std / math.sqrt(n) if n > 1 else math.nan
    return Difference(mean, mean - reach, mean + reach)


def _student(freedom: float) -> float:
    """The 97.5 % point of Student's t; fractional degrees of freedom are rounded down, which widens the interval."""
    whole = max(1, int(freedom + 1e-9))
    if whole <= len(_STUDENT):
        return _STUDENT[whole - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * whole) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * whole**2)
