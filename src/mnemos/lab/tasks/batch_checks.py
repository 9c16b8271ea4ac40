"""Checks of a batch's shapes, dtypes and ranges against its task, before a model reads it."""

import torch
from torch import Tensor

from mnemos.types import InputError

from .batch import IGNORE, Batch


def check_tokens(batch: Batch, where: str, vocab_size: int, classes: int, max_length: int) -> None:
    """Raise InputError unless inputs are tokens [B, T], T at most `max_length`, and targets [B] classes or [B, T]."""
    rows, length = batch.inputs.shape
    wanted = (rows,) if classes else (rows, length)
    if batch.targets.shape != wanted:
        found = tuple(batch.targets.shape)
        raise InputError(f"{where}: expected targets of shape {wanted}, found {found}; check the data")
    if length > max_length:
        raise InputError(f"{where}: expected at most {max_length} tokens per row, found {length}; check the data")
    low, high = _range(batch.inputs)
    if low < 0 or high >= vocab_size:
        raise InputError(f"{where}: expected tokens 0 to {vocab_size - 1}, found {low} to {high}; check the data")
    check_targets(batch.targets, classes or vocab_size, where)


def check_frames(batch: Batch, where: str, bands: int, vocab_size: int, max_length: int) -> None:
    """Raise InputError unless inputs are finite frames [B, T, bands], padded at the end, and targets tokens [B, L]."""
    rows, length = batch.inputs.shape[:2]
    if batch.inputs.shape[2:] != (bands,) or length > max_length or batch.inputs.dtype != torch.float32:
        found = f"{batch.inputs.dtype} of shape {tuple(batch.inputs.shape)}"
        wanted = f"frames [{rows}, at most {max_length}, {bands}]"
        raise InputError(f"{where}: expected {wanted} of float32, found {found}; check the data")
    if not batch.inputs.isfinite().all():
        raise InputError(f"{where}: expected finite frames, found NaN or infinity; check the recordings")
    if batch.mask is not None and bool((batch.mask[:, 1:] & ~batch.mask[:, :-1]).any()):
        raise InputError(
            f"{where}: expected padding after a row's frames, found padding before a frame; check the mask"
        )
    if batch.targets.dim() != 2 or len(batch.targets) != rows:
        raise InputError(f"{where}: expected targets [{rows}, L], found {tuple(batch.targets.shape)}; check the data")
    check_targets(batch.targets, vocab_size, where)


def check_images(batch: Batch, where: str, shape: tuple[int, ...], classes: int) -> None:
    """Raise InputError unless inputs are images [B, *shape], and targets [B] classes or [B, classes] probabilities."""
    rows = len(batch.inputs)
    if batch.inputs.shape[1:] != shape or batch.inputs.dtype != torch.float32:
        found = f"{batch.inputs.dtype} of shape {tuple(batch.inputs.shape)}"
        raise InputError(f"{where}: expected images {shape} of float32, found {found}; check the data")
    targets = batch.targets
    wanted = (rows, classes) if targets.is_floating_point() else (rows,)
    if targets.shape != wanted:
        raise InputError(f"{where}: expected targets of shape {wanted}, found {tuple(targets.shape)}; check the data")
    if targets.is_floating_point():
        if targets.min() < 0 or not torch.allclose(targets.sum(1), torch.ones(rows), atol=1e-3):
            raise InputError(
                f"{where}: expected targets that are probabilities, found values below 0 or rows whose sum is not 1; "
                "check the data"
            )
    else:
        check_targets(targets, classes, where)


def check_targets(targets: Tensor, limit: int, where: str) -> None:
    """Raise InputError unless every counted target is in 0 … limit − 1."""
    low, high = _range(targets[targets != IGNORE])
    if low < 0 or high >= limit:
        raise InputError(f"{where}: expected targets 0 to {limit - 1}, found {low} to {high}; check the data")


def _range(tokens: Tensor) -> tuple[int, int]:
    if not tokens.numel():
        return 0, 0
    low, high = torch.aminmax(tokens)
    return int(low), int(high)
