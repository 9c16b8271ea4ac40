"""Sums that last are kept in full precision, whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocasts(device: str) -> bool:
    """Whether autocast is on for a kind of device; "meta" has none at all."""
    return device != "meta" and torch.is_autocast_enabled(device)


def full_precision(device: str) -> AbstractContextManager:
    """No autocast inside. Leaving it alone where it is off keeps a decoding step short."""
    if not autocasts(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
