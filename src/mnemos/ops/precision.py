"""Computation in full precision, also under autocast: for sums over many tokens."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device; "meta" has no autocast."""
    return device != "meta" and torch.is_autocast_enabled(device)


def full_precision(device: str) -> AbstractContextManager:
    """A context without autocast. It does nothing where autocast is off, because entering one costs decoding time."""
    if not autocasts(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
