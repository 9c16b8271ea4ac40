"""Backward passes that cannot be differentiated, and raise an error if they are."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable_once(
    name: str | Callable[[Sequence[Any]], str],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of an autograd backward: differentiating its results raises RuntimeError, with the operation's name.

    name: a function of the saved tensors where operations share a backward. The backward is called with (ctx,
    ctx.saved_tensors, *grads): activation checkpointing lets them be read once. PyTorch's `once_differentiable` checks
    only whether the incoming gradient requires grad. If that is a constant, as in a gradient penalty, it returns
    gradients without a graph, and the second derivative silently lacks them.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def guarded(ctx: Any, *grads: Any) -> Any:
            saved = ctx.saved_tensors
            with torch.no_grad():
                found = backward(ctx, saved, *grads)
            if not torch.is_grad_enabled():
                return found
            sources = [x for x in (*saved, *grads) if isinstance(x, Tensor) and x.requires_grad]
            if not sources:
                return found
            several = found if isinstance(found, tuple) else (found,)
            called = name if isinstance(name, str) else name(saved)
            marked = tuple(x if x is None else _Refused.apply(called, x, *sources) for x in several)
            return marked if isinstance(found, tuple) else marked[0]

        return guarded

    return decorate


class _Refused(torch.autograd.Function):
    """The identity of x, made dependent on the sources, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name} is differentiable once; it has no derivative of its derivative")
