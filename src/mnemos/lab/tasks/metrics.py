"""The metrics of tasks: sums over batches (`SumMetric`), or functions of a whole corpus (`CorpusMetric`)."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.errors import near_name
from mnemos.types import InputError, JSONObject, likelihood_of

from .batch import IGNORE, Batch, counted

Sums = Callable[[nn.Module, Any, Any], Sequence[Tensor]]
Collect = Callable[[nn.Module, Any, Any], list[Any]]


def ratio(sums: Sequence[float]) -> float:
    """The first sum divided by the second; 0 if the second is 0."""
    return sums[0] / sums[1] if sums[1] else 0.0


@dataclass(frozen=True)
class Metric:
    """Base of `SumMetric` and `CorpusMetric`.

    name: its name in results, comparisons and reports. about: a sentence that explains it to readers of a report.
    form: format of a value in a line of several metrics; "": the line leaves it out. bounds: the least and the greatest
    value that it can have, at which intervals end.
    """

    name: str
    higher_is_better: bool
    about: str = ""
    form: str = "{name} {value:.4f}"
    bounds: tuple[float, float] = field(default=(-math.inf, math.inf), kw_only=True)

    def text(self, value: float) -> str:
        return self.form.format(name=self.name, value=value)

    def described(self) -> JSONObject:
        """The metric's entry in result.json."""
        return {"higher_is_better": self.higher_is_better, "about": self.about, "bounds": bounds_json(self.bounds)}


@dataclass(frozen=True)
class SumMetric(Metric):
    """A metric that is a function of sums over all batches, segments and processes.

    sums(model, outputs, batch): returns `width` scalar tensors, which are added up. None: the sums are (sum of the
    losses, number of counted targets). value(sums): the metric's value from the totals. Metrics with the same `sums`
    function share one call per batch. with_loss: `value` gets (sum of the losses, counted targets, *sums), and must use
    the quotient of the first two alone. training: also measure it in training, at the cost of one call per forward.
    """

    sums: Sums | None = None
    value: Callable[[Sequence[float]], float] = ratio
    width: int = 2
    training: bool = True
    with_loss: bool = False


@dataclass(frozen=True)
class CorpusMetric(Metric):
    """A metric that is not a function of sums, such as BLEU or mean average precision.

    collect(model, outputs, batch): one record per row (or other item), which must be picklable. value(records): the
    metric's value from all records of the split, in the order of the data. Cost: every process holds them in memory.
    """

    collect: Collect = lambda model, outputs, batch: []
    value: Callable[[list[Any]], float] = len


# --- sums over batches ---


def sum_functions(metrics: Iterable[Metric], training: bool = False) -> dict[Sums, int]:
    """The distinct `sums` functions of the metrics, with the number of sums that each returns."""
    measured = [m for m in metrics if isinstance(m, SumMetric) and (m.training or not training)]
    return {m.sums: m.width for m in measured if m.sums is not None}


def called(function: Sums, width: int, model: nn.Module, outputs: object, batch: object) -> Sequence[Tensor]:
    """What a `sums` function returns for a batch. Raises InputError unless it is `width` scalar tensors."""
    sums: Any = function(model, outputs, batch)
    each = list(sums) if isinstance(sums, (tuple, list)) else [sums]
    if len(each) != width or not all(isinstance(x, Tensor) and x.dim() == 0 for x in each):
        name = getattr(function, "__name__", type(function).__name__)
        found = ", ".join(f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in each)
        raise InputError(
            f"metric: expected {width} scalar tensors of {name}, found {found}; return such as "
            "(right.sum(), torch.tensor(rows)), or set SumMetric(width=)"
        )
    return each


def values(
    metrics: Iterable[Metric],
    sums: Mapping[Sums, Sequence[float]],
    loss: Sequence[float] | None = None,
    training: bool = False,
) -> dict[str, float]:
    """{name: value} of the sum metrics. loss: (sum of the losses, counted targets); None omits metrics that need it."""
    scores = {}
    for m in metrics:
        if not isinstance(m, SumMetric) or (training and not m.training):
            continue
        own = () if m.sums is None else sums[m.sums]
        if m.sums is not None and not m.with_loss:
            scores[m.name] = float(m.value(own))
        elif loss is not None:
            scores[m.name] = float(m.value((*loss, *own)))
    return scores


def negative_log_likelihood(model: nn.Module, outputs: Tensor, batch: Batch) -> Tensor:
    """The sum of −log p(target) over the counted targets, in nats.

    If the model has a `likelihood`, it is likelihood.loss(outputs, targets, mask). Otherwise the outputs are logits
    [..., C]; for targets [B, C] that are probabilities p, the sum of −Σ p·log q.
    """
    if (own := likelihood_of(model)) is not None:
        return own.loss(outputs, batch.targets, batch.mask)
    targets = _scored(outputs, batch.targets)
    if targets.is_floating_point():
        wide = torch.promote_types(outputs.dtype, targets.dtype)
        return F.cross_entropy(outputs.to(wide), targets.to(wide), reduction="sum")
    if targets.numel() * outputs.shape[-1] != outputs.numel():
        raise InputError(
            f"targets: expected one for each of the outputs {list(outputs.shape[:-1])}, found "
            f"{list(batch.targets.shape)}; a model with head.classes has one output a row"
        )
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def right_predictions(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(right predictions, counted targets), by likelihood.right of a model with a `likelihood`.

    The prediction is the class of the greatest logit; for targets that are probabilities it must be the likeliest one.
    """
    if (own := likelihood_of(model)) is not None:
        return own.right(outputs, batch.targets, batch.mask)
    targets = _scored(outputs, batch.targets)
    return (outputs.argmax(-1) == _likeliest(targets)).sum(), counted(targets)


def _likeliest(targets: Tensor) -> Tensor:
    # IGNORE is negative, so no prediction equals it.
    return targets.argmax(-1) if targets.is_floating_point() else targets


def _scored(outputs: Tensor, targets: Tensor) -> Tensor:
    # Logits [n, C] are those of the n counted positions of targets [B, T]: see `GeneratedTask.forward`.
    some = outputs.dim() == targets.dim() and not targets.is_floating_point()
    return targets[targets != IGNORE] if some else targets


def right_in_top_five(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """(targets [B] or [B, T] that are among the five most probable classes, counted targets)."""
    targets = _scored(outputs, batch.targets)
    top = outputs.topk(min(5, outputs.shape[-1])).indices
    return (top == _likeliest(targets)[..., None]).any(-1).sum(), counted(targets)


def perplexity(loss: float) -> float:
    """exp(loss), the number of equally likely choices with this loss; infinity beyond the range of a float."""
    return math.exp(loss) if loss < 709 else math.inf


def bits(loss: float) -> float:
    """loss / ln 2: bits per target (token, byte or sub-pixel)."""
    return loss / math.log(2)


# --- the metrics of several tasks ---

GUESS = "a guess"  # a reference score of tasks that ask: the share of right answers when one is picked at random
MAJORITY = "majority class"  # a reference score of classification tasks: the share of the most frequent class
SHARE = (0.0, 1.0)  # the bounds of a share
LOSS = SumMetric("loss", False, "The mean negative log-likelihood of a target, in nats.", "loss {value:.4f}")
BITS = SumMetric(
    "bits", False, "The loss in bits per target.", "{value:.4f} bits", value=lambda s: bits(ratio(s)), training=False
)
BITS_PER_BYTE = SumMetric(
    "bits per byte",
    False,
    "The mean negative log-likelihood of a byte of text, in bits. It is 8 by chance: all 256 bytes equally likely.",
    "{value:.4f} bits per byte",
    value=lambda sums: bits(ratio(sums)),
)
PERPLEXITY = SumMetric(
    "perplexity",
    False,
    "The exponential of the loss.",
    "perplexity {value:.3f}",
    value=lambda sums: perplexity(ratio(sums)),
    training=False,
    bounds=(1.0, math.inf),
)
# How often the most probable class or token is the right one.
ACCURACY = SumMetric(
    "accuracy",
    True,
    "The share of targets that are the most probable prediction.",
    sums=right_predictions,
    bounds=SHARE,
)
TOP5 = SumMetric(
    "top5",
    True,
    "The share of targets that are among the five most probable predictions.",
    "top-5 {value:.4f}",
    sums=right_in_top_five,
    training=False,
    bounds=SHARE,
)
TOKEN_ERROR_RATE = SumMetric(
    "token error rate",
    False,
    "Insertions, deletions and substitutions per spoken token: 1 − accuracy. It may exceed 1.",
    sums=right_predictions,
    value=lambda sums: 1 - ratio(sums),
    bounds=(0.0, math.inf),
)
KNOWN: dict[str, SumMetric] = {
    metric.name: metric for metric in (ACCURACY, TOP5, LOSS, BITS, BITS_PER_BYTE, PERPLEXITY, TOKEN_ERROR_RATE)
}
NEXT_TOKEN: tuple[Metric, ...] = (LOSS, BITS, PERPLEXITY, ACCURACY)  # of tasks that predict all tokens
ANSWER: tuple[Metric, ...] = (ACCURACY, BITS, PERPLEXITY)  # of tasks whose targets have one right answer


def class_metrics(classes: int) -> tuple[Metric, ...]:
    """The metrics of a task of classes."""
    return (ACCURACY, TOP5) if classes > 5 else (ACCURACY,)


def bits_per_byte(lengths: Any, unknown: bool = False) -> SumMetric:
    """BITS_PER_BYTE for tokens of several bytes. lengths: an array [V] of integers, the bytes of text of each token.

    unknown: one of the tokens stands for all that the vocabulary lacks.
    """
    compares = (
        "what the vocabulary lacks is one token: compare runs of one vocabulary"
        if unknown
        else "it compares all kinds of tokens"
    )
    table = torch.as_tensor(lengths, dtype=torch.int64)

    def target_bytes(model: nn.Module, outputs: object, batch: Batch) -> tuple[Tensor, Tensor]:
        is_counted = batch.targets != IGNORE
        sizes = table.to(batch.targets.device)[batch.targets.clamp(min=0)]
        return is_counted.sum(), torch.where(is_counted, sizes, 0).sum()

    return replace(
        BITS_PER_BYTE,
        about=f"The negative log-likelihood of the text in bits, divided by its bytes: {compares}.",
        sums=target_bytes,
        value=lambda sums: bits(ratio(sums)) * ratio(sums[2:]),
        with_loss=True,
    )


# --- by name ---


def find_metrics(metrics: Sequence[Metric | str]) -> tuple[Metric, ...]:
    """The metrics, with those of this module found by their names, such as "accuracy"."""
    for one in metrics:
        if not isinstance(one, Metric) and one not in KNOWN:
            hint = near_name(str(one), KNOWN, f"known: {', '.join(KNOWN)}; or pass a SumMetric")
            raise InputError(f"metrics: expected a list of metrics or of their names, found {one!r:.80} in it; {hint}")
    return tuple(one if isinstance(one, Metric) else KNOWN[one] for one in metrics)


def described_in(entries: JSONObject, metric: str) -> JSONObject | None:
    """`Metric.described` of a metric: its entry in the "metrics" of a result.json, else of this module; or None."""
    if isinstance(entry := entries.get(metric), dict):
        return {"about": "", "bounds": None} | entry
    return KNOWN[metric].described() if metric in KNOWN else None


def bounds_json(bounds: Sequence[float]) -> list[float | None]:
    """Bounds as JSON has them: null for an infinite one."""
    return [end if math.isfinite(end) else None for end in bounds]


def bounds_of(ends: Sequence[float | None] | None) -> tuple[float, float]:
    """The bounds that `bounds_json` wrote; −∞ and ∞ without any."""
    low, high = (None if end is None or math.isnan(end) else end for end in ends or (None, None))
    return -math.inf if low is None else low, math.inf if high is None else high
