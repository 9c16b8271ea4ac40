"""Checks and conversions of the arguments of `replay`."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mnemos.types import InputError

E = TypeVar("E")


def check(step: object, advance: object, module: object, verify: object) -> None:
    """Raise InputError for arguments of the wrong type."""
    for name, value in (("step", step), ("advance", advance)):
        if not callable(value) and not (name == "advance" and value is None):
            raise InputError(f"replay: expected {name} to be a function of (segment, state), found {value!r:.60}")
    if module is not None and not isinstance(module, nn.Module):
        raise InputError(f"replay: expected module to be a torch.nn.Module, found {_kind(module)}")
    if not isinstance(verify, bool | int | float) or verify < 0:
        raise InputError(f"replay: expected verify to be True, False or a difference from 0 on, found {verify!r:.60}")


def sequence(segments: object) -> Any:
    """The segments as a sequence."""
    if hasattr(segments, "__getitem__") and hasattr(segments, "__len__"):
        found = segments
    elif isinstance(segments, Iterable):
        found = list(segments)
    else:
        raise InputError(
            f"replay: expected segments to go through, as in replay(step, segments), found {_kind(segments)}"
        )
    if not len(found):
        raise InputError("replay: expected at least one segment, found none")
    return found


def kept(checkpoints: int | str) -> Callable[[int], int]:
    """The number of states of so many steps that are kept at a time."""
    if checkpoints == "all":
        return lambda steps: steps
    if checkpoints == "sqrt":
        return lambda steps: max(2, math.isqrt(steps - 1) + 1)
    if not isinstance(checkpoints, int) or checkpoints < 2:  # True is 1
        raise InputError(f'replay: expected checkpoints "all", "sqrt" or an integer from 2 on, found {checkpoints!r}')
    return lambda steps: checkpoints


def horizon(truncate_every: int | None, steps: int) -> int:
    """The number of steps that gradient flows through."""
    if truncate_every is None:
        return steps
    if not isinstance(truncate_every, int) or isinstance(truncate_every, bool) or truncate_every < 1:
        raise InputError(f"replay: expected truncate_every of at least 1, found {truncate_every!r}")
    return truncate_every


def window_step(slide: int | None, steps: int) -> int:
    """The number of steps from the start of this rollout to that of the next one."""
    if slide is None:
        return steps
    if not isinstance(slide, int) or isinstance(slide, bool) or not 1 <= slide <= steps:
        raise InputError(
            f"replay: expected slide from 1 to {steps}, the number of segments, found {slide!r}; use None for rollouts "
            "that share no segment"
        )
    return slide


def scaled(
    scaler: torch.amp.GradScaler | None, backward: Callable[[Tensor], object] | None
) -> Callable[[Tensor], object] | None:
    """The function that runs a backward pass; None is PyTorch's own."""
    if scaler is not None and backward is not None:
        raise InputError("replay: expected a scaler or a backward, found both; let the backward scale")
    if scaler is not None:
        return lambda root: scaler.scale(root).backward()
    return backward


def each(name: str, values: Iterable[E] | None, count: int) -> list[E | None]:
    """The values, one per segment; raises InputError for another number of them."""
    found: list[E | None] = [None] * count if values is None else list(values)
    if len(found) != count:
        raise InputError(f"replay: expected {name} for {count} segments, found {len(found)}")
    return found


def numbers(weights: Iterable[float | Tensor] | None, count: int) -> list[float]:
    """The weights of the losses, as numbers."""
    found = each("weights", [1 / count] * count if weights is None else weights, count)
    if any(isinstance(weight, Tensor) and weight.requires_grad for weight in found):
        raise InputError(
            "replay: expected weights without gradient, found some that require it; "
            "multiply the loss by them inside the step"
        )
    return [float(weight) for weight in found if weight is not None]


def owner(step: Callable[..., object]) -> nn.Module | None:
    """The module that `step` belongs to, or None."""
    called: object = step
    while isinstance(called, functools.partial):
        called = called.func
    found = called if isinstance(called, nn.Module) else getattr(called, "__self__", None)
    return found if isinstance(found, nn.Module) else None


def _kind(value: object) -> str:
    """The name of a value's type."""
    return "None" if value is None else type(value).__name__
