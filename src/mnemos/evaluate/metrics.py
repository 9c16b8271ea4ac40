"""Loss and accuracy of a model on a split, every counted target weighing the same."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.data.batch import IGNORE, Batch
from mnemos.models.ctc import TOKEN_ERROR_RATE
from mnemos.modes import evaluating
from mnemos.types import InputError, State
from mnemos.types import reset as make_fresh


def evaluate(
    model: nn.Module, batches: Iterable[Batch], total: Callable[[Tensor], Tensor] | None = None
) -> dict[str, float]:
    """{"loss", "accuracy", "count"} of a model over batches: means over all counted targets, and their number.

    loss: mean negative log-likelihood, in nats a target. A classifier of more than five classes has "top5" too: how
    often the right one is among its five first guesses. A model with an error rate has that too (see `error`). In eval
    mode and without gradient; the model is then as it was. Where batches say which rows start afresh (`reset`), the
    state is carried from one to the next; so rows may come in `pieces`, and one without a counted target is read by the
    model's `advance`, where it has one. `total` sums a tensor over the processes that share the batches, which then run
    the same parts of the model for every one. Raises InputError where nothing is counted.
    """
    state: State = None
    sums = [0.0, 0, 0, 0]
    ranked = False
    advance: Any = getattr(model, "advance", None) if total is None else None
    with torch.no_grad(), evaluating(model):
        for batch in batches:
            batch = fed(batch, model)
            if batch.reset is None or bool(batch.reset.all()):  # none goes on, though there be other rows than before
                state = None
            elif state is not None:
                state = make_fresh(state, batch.reset)
            if advance is not None and not counted(batch.targets):
                state = advance(batch.inputs, state, mask=batch.mask)
                continue
            logits, state = model(batch.inputs, state, mask=batch.mask)
            for i, value in enumerate(scored(model, logits, batch)):
                sums[i] += value.item()
            ranked = logits.dim() == 2 and logits.shape[-1] > 5
            if ranked:
                first = logits.topk(5).indices
                sums[3] += (first == batch.targets[:, None]).any(-1).sum().item()
    # One vector, in the widest type: counts stay exact to 2^53.
    vector = torch.tensor(sums, dtype=torch.float64)
    loss, correct, count, near = (vector if total is None else total(vector)).tolist()
    if not count:
        raise InputError("expected at least one target to score, found none; give the split more data")
    top5 = {"top5": near / count} if ranked else {}
    accuracy = correct / count
    return {"loss": loss / count, "accuracy": accuracy, **top5, **error(model, accuracy), "count": int(count)}


def error(model: nn.Module, accuracy: float) -> dict[str, float]:
    """{name: 1 − accuracy} for a model whose field knows it by that name (its `error`), {} for all others.

    One that writes down speech has a token error rate. It may be above 1, as what was never said counts too.
    """
    name = getattr(model, "error", None)
    return {} if name is None else {name: 1 - accuracy}


def quality(score: dict[str, Any]) -> str:
    """What `evaluate` found beside the loss, in words: the error rate where there is one, the accuracy elsewhere."""
    if TOKEN_ERROR_RATE in score:
        return f"{TOKEN_ERROR_RATE} {score[TOKEN_ERROR_RATE]:.4f}"
    return f"accuracy {score['accuracy']:.4f}"


def scored(model: nn.Module, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """What `score` gives, of a model's outputs for a batch, by the likelihood that the model stands for.

    A model whose outputs are no logits of classes has a `likelihood`, whose `score(outputs, targets, mask)` gives the
    same three.
    """
    own = getattr(model, "likelihood", None)
    return score(logits, batch.targets) if own is None else own.score(logits, batch.targets, batch.mask)


def score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of the negative log-likelihoods, right guesses, targets counted), of logits [..., C] and targets [...].

    Of targets [B, C] that are probabilities: the sum of −Σ p·log q, and a guess is right where it is the likeliest.
    """
    if targets.is_floating_point():
        wide = torch.promote_types(logits.dtype, targets.dtype)
        loss = F.cross_entropy(logits.to(wide), targets.to(wide), reduction="sum")
        right = (logits.detach().argmax(-1) == targets.argmax(-1)).sum()
        return loss, right, counted(targets)
    logits, targets = logits.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    right = (logits.detach().argmax(-1) == targets).sum()  # no guess is IGNORE, which is negative
    return loss, right, counted(targets)


def counted(targets: Tensor) -> Tensor:
    """How many targets a loss counts: all but IGNORE; of probabilities [B, C], B."""
    if targets.is_floating_point():
        return targets.new_tensor(len(targets), dtype=torch.int64)
    return (targets != IGNORE).sum()


def perplexity(loss: float) -> float:
    """exp(loss): as uncertain as a choice among so many. Infinity where that is past a float."""
    return math.exp(loss) if loss < 709 else math.inf


def bits(loss: float) -> float:
    """loss / ln 2: bits a target (a token, a byte, a sub-pixel), whatever the targets are."""
    return loss / math.log(2)


def fed(batch: Batch, model: nn.Module) -> Batch:
    """The batch on the model's device, images and frames in its precision (which mixed precision leaves at float32)."""
    parameter = next(model.parameters())
    batch = to_device(batch, parameter.device)
    return batch._replace(inputs=batch.inputs.to(parameter.dtype)) if batch.inputs.is_floating_point() else batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device."""
    return each(batch, lambda x: x.to(device, non_blocking=True))


def each(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with a function applied to every tensor that it has."""
    mask = None if batch.mask is None else function(batch.mask)
    reset = None if batch.reset is None else function(batch.reset)
    return Batch(function(batch.inputs), function(batch.targets), mask, reset)
