"""Checks of numbers that several operations and models share. Each raises InputError."""

import math

from torch import Tensor

from mnemos.modes import reads_without_waiting
from mnemos.types import InputError


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
