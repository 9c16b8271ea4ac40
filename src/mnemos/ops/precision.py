"""Sums that last are kept in full precision, whatever autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch


def full_precision(device: str) -> AbstractContextManager:
    """No autocast inside. Leaving it alone where it is off keeps a decoding step short; "meta" has none at all."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
