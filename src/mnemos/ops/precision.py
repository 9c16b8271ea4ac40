"""Computation in full precision, also under autocast: for sums over many tokens."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def autocasts(device: str) -> bool:
    """Whether autocast is on for a type of device; "meta" has no autocast."""
    return device != "meta" and torch.is_autocast_enabled(device)


def full_precision(device: str) -> AbstractContextManager:
    """A context without autocast. It does nothing where autocast is off, because entering one costs decoding time."""
    if not autocasts(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function whose first argument, which has no name, is a tensor: it is computed without autocast."""

    @functools.wraps(function)
    def compute(*args: P.args, **options: P.kwargs) -> R:
        with full_precision(args[0].device.type):  # type: ignore[attr-defined]
            return function(*args, **options)

    return compute
