"""Metrics as objects: sums over batches, or values computed from the records of a whole split.

A metric has a name, a direction and a text. The rooms train, evaluate and figures contain no metric's name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batch import IGNORE, counted

Sums = Callable[[nn.Module, Any, Any], Sequence[Tensor]]
Collect = Callable[[nn.Module, Any, Any], list[Any]]


def ratio(sums: Sequence[float]) -> float:
    """The first sum by the second; 0 where nothing is counted."""
    return sums[0] / sums[1] if sums[1] else 0.0


@dataclass(frozen=True)
class Metric:
    """Base of `SumMetric` and `CorpusMetric`.

    name: its key in results, comparisons and reports. about: a sentence for reports on what it counts. form: the format
    of a printed value.
    """

    name: str
    higher_is_better: bool
    about: str = ""
    form: str = "{name} {value:.4f}"

    def text(self, value: float) -> str:
        """The name and the value, as they are printed."""
        return self.form.format(name=self.name, value=value)

    def described(self) -> dict[str, Any]:
        """The metric's entry in result.json."""
        return {"higher_is_better": self.higher_is_better, "about": self.about}


@dataclass(frozen=True)
class SumMetric(Metric):
    """A metric computed from sums, which are added over batches, segments and processes.

    `sums(model, outputs, batch)` returns `width` scalars; None means (sum of the losses, number of counted targets).
    `value(sums)` is the metric. Metrics with the same `sums` function share one call per batch. training: the metric is
    also computed in training, for the lines of metrics.jsonl, at the cost of one call per forward.
    """

    sums: Sums | None = None
    value: Callable[[Sequence[float]], float] = ratio
    width: int = 2
    training: bool = True


@dataclass(frozen=True)
class CorpusMetric(Metric):
    """A metric of a whole split that is not a ratio of sums, for example BLEU or mean average precision.

    `collect(model, outputs, batch)` returns a list of records, for example one per row; they must be picklable.
    `value(records)` computes the metric from the records of the whole split, in the order of the data. Each row is
    counted once, with any number of processes. Cost: every process holds the records of the split in memory.
    """

    collect: Collect = lambda model, outputs, batch: []
    value: Callable[[list[Any]], float] = len


def sum_functions(metrics: Iterable[Metric], training: bool = False) -> dict[Sums, int]:
    """The distinct `sums` functions of metrics, and how many sums each returns."""
    found = [m for m in metrics if isinstance(m, SumMetric) and (m.training or not training)]
    return {m.sums: m.width for m in found if m.sums is not None}


def values(
    metrics: Iterable[Metric],
    sums: Mapping[Sums, Sequence[float]],
    loss: Sequence[float] | None = None,
    training: bool = False,
) -> dict[str, float]:
    """{name: value} of the sum metrics. loss: (sum of the losses, targets counted); None leaves out what needs it."""
    found = {}
    for m in metrics:
        if isinstance(m, SumMetric) and (m.training or not training):
            of = loss if m.sums is None else sums[m.sums]
            if of is not None:
                found[m.name] = m.value(of)
    return found


def negative_log_likelihood(model: nn.Module, outputs: Any, batch: Any) -> Tensor:
    """The sum of −log p(target) over the counted targets, in nats.

    A model whose outputs are not logits of classes has a `likelihood` with `loss(outputs, targets, mask)`, which
    returns this sum. Outputs of all other models are logits [..., C]. Targets [B, C] of floats are probabilities p; for
    them it is the sum of −Σ p·log q.
    """
    own: Any = getattr(model, "likelihood", None)
    if own is not None:
        return own.loss(outputs, batch.targets, batch.mask)
    targets = batch.targets
    if targets.is_floating_point():
        wide = torch.promote_types(outputs.dtype, targets.dtype)
        return F.cross_entropy(outputs.to(wide), targets.to(wide), reduction="sum")
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def right_guesses(model: nn.Module, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """(correct guesses, counted targets). The guess is the most likely class, also of targets that are probabilities.

    A model that has a `likelihood` decides itself, by its `right(outputs, targets, mask)`.
    """
    own: Any = getattr(model, "likelihood", None)
    if own is not None:
        return own.right(outputs, batch.targets, batch.mask)
    targets = batch.targets
    if targets.is_floating_point():
        return (outputs.argmax(-1) == targets.argmax(-1)).sum(), counted(targets)
    return (outputs.argmax(-1) == targets).sum(), counted(targets)  # no guess is IGNORE, which is negative


def among_five(model: nn.Module, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """(targets [B] among the five most likely classes, counted targets)."""
    first = outputs.topk(5).indices
    return (first == batch.targets[:, None]).any(-1).sum(), counted(batch.targets)


def perplexity(loss: float) -> float:
    """exp(loss): the uncertainty of a choice among that many equally likely values; infinity beyond a float."""
    return math.exp(loss) if loss < 709 else math.inf


def bits(loss: float) -> float:
    """loss / ln 2: bits per target (per token, byte or sub-pixel)."""
    return loss / math.log(2)


MAJORITY = "majority class"  # the reference score of classifications: the share of the commonest class
LOSS = SumMetric("loss", False, "The mean negative log-likelihood of a target, in nats.", "loss {value:.4f}")
BITS = SumMetric(
    "bits", False, "The loss in bits per target.", "{value:.4f} bits", None, lambda sums: bits(ratio(sums)), 2, False
)
PERPLEXITY = SumMetric(
    "perplexity",
    False,
    "The exponential of the loss.",
    "perplexity {value:.3f}",
    None,
    lambda sums: perplexity(ratio(sums)),
    2,
    False,
)
ACCURACY = SumMetric("accuracy", True, "The share of targets that equal the most likely guess.", sums=right_guesses)
TOP5 = SumMetric(
    "top5",
    True,
    "The share of targets among the five most likely guesses.",
    "top-5 {value:.4f}",
    among_five,
    training=False,
)
TOKEN_ERROR_RATE = SumMetric(
    "token error rate",
    False,
    "Insertions, deletions and substitutions per token that was said: 1 − accuracy. It may be above 1.",
    sums=right_guesses,
    value=lambda sums: 1 - ratio(sums),
)
