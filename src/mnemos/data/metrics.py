"""What a task is judged by, as objects: sums over batches, or records of a whole corpus.

A metric says what it is called, which way is better and how it is printed. Nothing that trains, evaluates or reports
knows any metric by name.
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

    name: what results, comparisons and reports call it. about: a sentence on what it counts, for readers of a report.
    form: how a value is printed beside others.
    """

    name: str
    higher_is_better: bool
    about: str = ""
    form: str = "{name} {value:.4f}"

    def text(self, value: float) -> str:
        """The value as it is printed, with what it is called."""
        return self.form.format(name=self.name, value=value)

    def described(self) -> dict[str, Any]:
        """What result.json says of it."""
        return {"higher_is_better": self.higher_is_better, "about": self.about}


@dataclass(frozen=True)
class SumMetric(Metric):
    """A metric made of sums, which are added over batches, segments and processes.

    `sums(model, outputs, batch)` returns `width` scalars; None stands for (the sum of the losses, the targets counted).
    `value(sums)` makes the number of the added sums. Metrics with the same `sums` function share its one call for each
    batch. training: the lines of metrics.jsonl on training say it too, which costs a call for each forward.
    """

    sums: Sums | None = None
    value: Callable[[Sequence[float]], float] = ratio
    width: int = 2
    training: bool = True


@dataclass(frozen=True)
class CorpusMetric(Metric):
    """A metric that is no sum, as BLEU or mean average precision: computed from records of every row of a split.

    `collect(model, outputs, batch)` returns one record per row (or per what is scored), which must survive pickling;
    `value(records)` is given those of the whole split, each row's once and in the order of the data, however many
    processes shared them. Cost: the records of a split are held in memory on every process.
    """

    collect: Collect = lambda model, outputs, batch: []
    value: Callable[[list[Any]], float] = len


def sum_functions(metrics: Iterable[Metric], training: bool = False) -> dict[Sums, int]:
    """The functions that metrics' sums come from, each once, and how many sums it gives."""
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
    """The sum of −log p(target), in nats, by the likelihood that the model stands for.

    A model whose outputs are no logits of classes has a `likelihood`, whose `loss(outputs, targets, mask)` is this
    sum. All others' are logits [..., C]; targets [B, C] that are probabilities give the sum of −Σ p·log q.
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
    """(right guesses, targets counted): of targets that are probabilities, a guess is right where it is the likeliest.

    A model's `likelihood`, where it has one, says what a guess is: `right(outputs, targets, mask)`.
    """
    own: Any = getattr(model, "likelihood", None)
    if own is not None:
        return own.right(outputs, batch.targets, batch.mask)
    targets = batch.targets
    if targets.is_floating_point():
        return (outputs.argmax(-1) == targets.argmax(-1)).sum(), counted(targets)
    return (outputs.argmax(-1) == targets).sum(), counted(targets)  # no guess is IGNORE, which is negative


def among_five(model: nn.Module, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """(targets [B] among the five likeliest classes, targets counted)."""
    first = outputs.topk(5).indices
    return (first == batch.targets[:, None]).any(-1).sum(), counted(batch.targets)


def perplexity(loss: float) -> float:
    """exp(loss): as uncertain as a choice among so many. Infinity where that is past a float."""
    return math.exp(loss) if loss < 709 else math.inf


def bits(loss: float) -> float:
    """loss / ln 2: bits per target (a token, a byte, a sub-pixel), whatever the targets are."""
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
ACCURACY = SumMetric("accuracy", True, "The share of targets that the likeliest guess meets.", sums=right_guesses)
TOP5 = SumMetric(
    "top5",
    True,
    "The share of targets among the five likeliest guesses.",
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
