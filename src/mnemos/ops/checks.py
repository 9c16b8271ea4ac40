"""Checks of arguments that several operations and models share. Each raises InputError."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mnemos.modes import reads_without_waiting
from mnemos.types import InputError


def check_mask(mask: Tensor | None, shape: Sequence[int]) -> None:
    """Refuse a mask that is not boolean or has another shape; None is no mask."""
    if mask is not None and (mask.shape != torch.Size(shape) or mask.dtype != torch.bool):
        advice = "" if mask.dtype == torch.bool else "; use .bool()"
        found = f"{mask.dtype} {tuple(mask.shape)}{advice}"
        raise InputError(f"expected a mask of booleans {tuple(shape)}, True = valid; found {found}")


def check_dropout(dropout: float) -> None:
    """Refuse a fraction of dropped values outside [0, 1)."""
    if not 0 <= dropout < 1:
        raise InputError(f"dropout: expected at least 0 and below 1, found {dropout}; use 0 for none")


def check_finite(outputs: Tensor) -> None:
    """Refuse NaN in a model's outputs, on a CPU: another device would have to finish first."""
    if not reads_without_waiting(outputs):
        return
    # One number, as a stream of one row has for each token, is looked at in a tenth of the time.
    if math.isnan(outputs.item()) if outputs.numel() == 1 else bool(outputs.isnan().any()):
        raise InputError("expected finite outputs, found NaN: the weights have diverged; use an earlier checkpoint")
