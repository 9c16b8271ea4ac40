"""The type `Batch`, and functions for batches of any kind: pytrees of tensors whose first axis is the row."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.types import leaves, map_state

IGNORE = -100  # a target that no loss and no metric counts


class Batch(NamedTuple):
    """The common batch: inputs and targets.

    inputs [B, T] int64 token ids, [B, C, H, W] float32 images, normalised, or [B, T, bands] float32 frames of sound;
    targets [B] (a class per row), [B, classes] float32 (probabilities, where training mixes images or smooths labels),
    [B, T] (the token after each, IGNORE where none counts) or, of frames, [B, L] (the tokens said, IGNORE behind them);
    mask [B, T] bool, True = valid, or None where nothing is padded; reset [B] bool, True where the row starts a new
    document and its state must be made fresh first, or None where no state is carried.
    """

    inputs: Any
    targets: Any
    mask: Tensor | None = None
    reset: Tensor | None = None


def each(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with a function applied to each of its tensors; other leaves stay."""
    return map_state(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on a device."""
    return each(batch, lambda x: x.to(device, non_blocking=True))


def fed(batch: Any, model: nn.Module) -> Any:
    """The batch on the model's device, its floats in the model's precision (mixed precision leaves it at float32)."""
    parameter = next(model.parameters())
    dtype = parameter.dtype
    return each(to_device(batch, parameter.device), lambda x: x.to(dtype) if x.is_floating_point() else x)


def row_count(batch: Any) -> int:
    """B: the length of the first tensor's first axis."""
    return leaves(batch)[0].shape[0]


def counted(targets: Tensor) -> Tensor:
    """How many targets a loss counts: all but IGNORE; of probabilities [B, C], B."""
    if targets.is_floating_point():
        return targets.new_tensor(len(targets), dtype=torch.int64)
    return (targets != IGNORE).sum()


def pieces(batches: Iterable[Batch], length: int) -> Iterator[Batch]:
    """Batches of rows of tokens [B, T], each in pieces [B, length], the last maybe shorter; 0: batches as they are.

    A model reads them one after the other and hands its state on: `reset` says that all rows of a first piece start.
    """
    for batch in batches:
        if not length:
            yield batch
            continue
        for start in range(0, batch.inputs.shape[1], length):
            span = slice(start, start + length)
            fresh = torch.full((len(batch.inputs),), start == 0, device=batch.inputs.device)
            mask = None if batch.mask is None else batch.mask[:, span]
            yield Batch(batch.inputs[:, span], batch.targets[:, span], mask, fresh)
