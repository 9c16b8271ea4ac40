"""The common `Batch`, and functions of batches: any pytree of tensors whose first axis is the row (one per sample)."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mnemos.types import InputError, leaves, map_state

IGNORE = -100  # a target with this value is not counted by losses and metrics
B = TypeVar("B")  # a batch of any type


class Batch(NamedTuple):
    """The common batch: inputs and targets.

    inputs: [B, T] int64 token ids, [B, C, H, W] float32 normalised images, or [B, T, bands] float32 frames of sound.
    targets: [B] int64 classes; [B, classes] float32 probabilities (mixed images, smoothed labels); [B, T] int64 next
    tokens; or, for frames, [B, L] int64 spoken tokens. IGNORE marks targets that do not count.
    mask: [B, T] bool, True = valid, or None without padding. reset: [B] bool, True where a row starts a new document,
    so that its state is reset before the batch; None for tasks that carry no state.
    """

    inputs: Any
    targets: Any
    mask: Tensor | None = None
    reset: Tensor | None = None


def each(batch: B, function: Callable[[Tensor], Tensor]) -> B:
    """Apply a function to every tensor of a batch; other leaves are unchanged."""
    return map_state(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def to_device(batch: B, device: torch.device) -> B:
    """Copy the batch to a device."""
    return each(batch, lambda x: x.to(device, non_blocking=True))


def to_model(batch: B, model: nn.Module) -> B:
    """The batch on the model's device, its floats in the dtype of the model's parameters."""
    parameter = next(model.parameters())
    dtype = parameter.dtype
    return each(to_device(batch, parameter.device), lambda x: x.to(dtype) if x.is_floating_point() else x)


def row_count(batch: object) -> int:
    """The number of rows B: the first axis of the batch's first tensor."""
    return leaves(batch)[0].shape[0]


def counted(targets: Tensor) -> Tensor:
    """The number of counted targets, a scalar int64: those that are not IGNORE, or B for probabilities [B, C]."""
    if targets.is_floating_point():
        return targets.new_tensor(len(targets), dtype=torch.int64)
    return (targets != IGNORE).sum()


def pieces(batches: Iterable[Batch], length: int) -> Iterator[Batch]:
    """Split batches of tokens [B, T] into segments [B, length]; the last may be shorter. length 0: do not split.

    A model reads the segments in order and carries its state; `reset` is True for all rows of a batch's first segment.
    """
    for batch in batches:
        if not length:
            yield batch
            continue
        for start in range(0, batch.inputs.shape[1], length):
            span = slice(start, start + length)
            reset = torch.full((len(batch.inputs),), start == 0, device=batch.inputs.device)
            mask = None if batch.mask is None else batch.mask[:, span]
            yield Batch(batch.inputs[:, span], batch.targets[:, span], mask, reset)


def check_tokens(batch: Batch, where: str, vocab_size: int, classes: int, max_length: int) -> None:
    """Raise InputError unless inputs are tokens [B, T], T at most `max_length`, and targets [B] classes or [B, T]."""
    rows, length = batch.inputs.shape
    shape = (rows,) if classes else (rows, length)
    if batch.targets.shape != shape or length > max_length:
        raise InputError(
            f"{where}: expected tokens [B, T] of T up to {max_length} and targets {list(shape)}, found "
            f"{list(batch.inputs.shape)} and {list(batch.targets.shape)}; check the data"
        )
    targets = batch.targets[batch.targets != IGNORE]
    for what, tokens, limit in (("tokens", batch.inputs, vocab_size), ("targets", targets, classes or vocab_size)):
        low, high = map(int, torch.aminmax(tokens)) if tokens.numel() else (0, 0)
        if low < 0 or high >= limit:
            raise InputError(f"{where}: expected {what} 0 to {limit - 1}, found {low} to {high}; check the data")
