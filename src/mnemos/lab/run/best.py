"""The best evaluation of a run on the validation split: for the checkpoint that is kept, and for stopping early."""

import math
from dataclasses import dataclass, field, replace

from mnemos.lab.tasks.metrics import Metric


@dataclass(frozen=True)
class Best:
    """The best evaluation so far, by the task's first metric; a checkpoint holds it, so that a resumed run has it."""

    step: int = 0  # 0: no evaluation yet
    score: float | None = None
    valid: dict[str, float] = field(default_factory=dict)  # all scores of that evaluation
    since: int = 0  # evaluations after it

    def after(self, step: int, valid: dict[str, float], metric: Metric) -> "Best":
        """The state after one more evaluation; a score that is NaN or infinite, or equal, is not better."""
        score = valid[metric.name]
        if math.isfinite(score) and (self.score is None or _better(score, self.score, metric.higher_is_better)):
            return Best(step, score, dict(valid))
        return replace(self, since=self.since + 1)


def _better(score: float, other: float, higher_is_better: bool) -> bool:
    return score > other if higher_is_better else score < other
