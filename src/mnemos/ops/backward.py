"""Backward passes of our own, which compute a forward again, or have no derivative: then they raise an error."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos.ops.precision import full_precision

Gradients = tuple[Tensor | None, ...]


def differentiable_once(
    name: str, saved: Sequence[Any], upstream: Sequence[Tensor | None], compute: Callable[[], Gradients]
) -> Gradients:
    """The gradients `compute()`, for an autograd backward: differentiating them raises RuntimeError with the name.

    saved, upstream: the tensors that they are computed of. PyTorch's `once_differentiable` checks only whether the
    incoming gradient requires grad. If that is a constant, as in a gradient penalty, it returns gradients without a
    graph, and the second derivative silently lacks them.
    """
    with torch.no_grad():
        grads = compute()
    if not torch.is_grad_enabled():
        return grads
    sources = [x for x in (*saved, *upstream) if isinstance(x, Tensor) and x.requires_grad]
    if not sources:
        return grads
    return tuple([x if x is None else _Refused.apply(name, x, *sources) for x in grads])


class _Refused(torch.autograd.Function):
    """The identity of x, made dependent on the sources, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *sources: Tensor) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(f"{ctx.name} is differentiable once; it has no derivative of its derivative")


def differentiate_again(
    compute: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Any],
    needs: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> Gradients:
    """The gradients of those inputs that `needs` names, by autograd of compute(*inputs): they have derivatives, too."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: the gradient must stop at these inputs, although one input may be computed from another.
        views = [x.view_as(x) if n else x for x, n in zip(inputs, needs, strict=True)]
        pairs = [(y, g) for y, g in zip(compute(*views), upstream, strict=True) if y is not None and g is not None]
    outputs, grads = zip(*pairs, strict=True)
    wanted = [x for x, n in zip(views, needs, strict=True) if n]
    results = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=graph, allow_unused=True))
    return tuple([next(results) if n else None for n in needs])


def by_slab(
    name: str,
    compute: Callable[..., tuple[Tensor, Tensor]],
    length: int,
    tokens: Sequence[Tensor | None],
    shared: Sequence[Tensor],
    s: Tensor,
) -> tuple[Tensor, Tensor]:
    """y and the state after `y, s = compute(tokens, shared, s)` of `length` tokens at a time.

    tokens: tensors [B, T, ..], or None, which are cut, y like the first of them. shared: tensors that all slabs read.
    Only these and the state before each slab are kept. The backward computes one slab after the other again, with its
    graph, from the last to the first.
    """
    return _BySlab.apply(name, compute, length, len(tokens), *tokens, *shared, s)


class _BySlab(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str, compute: Any, length: int, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        tokens, shared, s = tensors[:count], tensors[count:-1], tensors[-1]
        y, starts = torch.empty_like(tokens[0], memory_format=torch.contiguous_format), []  # type: ignore[arg-type]
        for a in range(0, y.shape[1], length):
            starts.append(s)
            y[:, a : a + length], s = compute(_cut(tokens, a, length), shared, s)
        ctx.save_for_backward(*tensors[:-1], *starts)
        ctx.name, ctx.compute, ctx.length, ctx.counts = name, compute, length, (count, len(tensors) - 1)
        return y, s if starts else s.clone()  # type: ignore[union-attr, return-value]

    @staticmethod
    def backward(ctx: Any, gy: Tensor, gs: Tensor) -> Any:
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them out once
        gradients = functools.partial(_slab_gradients, ctx.compute, ctx.length, ctx.counts, saved, gy, gs)
        return None, None, None, None, *differentiable_once(ctx.name, saved, (gy, gs), gradients)


def _slab_gradients(
    compute: Any, length: int, counts: tuple[int, int], saved: Sequence[Any], gy: Tensor, gs: Tensor
) -> Gradients:
    """The gradients of tokens, shared tensors and the first state."""
    tokens, shared, starts = saved[: counts[0]], saved[counts[0] : counts[1]], saved[counts[1] :]
    wholes = [torch.empty_like(x, memory_format=torch.contiguous_format) if _is_floating(x) else None for x in tokens]
    totals = [torch.zeros_like(x) for x in shared]
    # The caller may have autocast on, which would round the products.
    with full_precision(gy.device.type):
        for a in reversed(range(0, gy.shape[1], length)):
            part, start = _cut(tokens, a, length), starts[a // length]
            grads, rest, gs = _gradients_of_one(compute, part, shared, start, gy[:, a : a + length], gs)
            for whole, grad in zip([x for x in wholes if x is not None], grads, strict=True):
                whole[:, a : a + length] = grad
            for total, grad in zip(totals, rest, strict=True):
                total += grad
    return *wholes, *totals, gs


def _gradients_of_one(
    compute: Any, part: Sequence[Any], shared: Sequence[Tensor], start: Tensor, gy: Tensor, gs: Tensor
) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
    """Those of a slab's floating tokens, of what it shares and of the state before it. Returning frees its graph."""
    tokens, others, first = (
        [x.detach().requires_grad_() if _is_floating(x) else x for x in group] for group in (part, shared, [start])
    )
    with torch.enable_grad():
        outputs = compute(tokens, others, first[0])
    leaves = [x for x in tokens if _is_floating(x)]
    grads = torch.autograd.grad(outputs, [*leaves, *others, *first], (gy, gs))
    return grads[: len(leaves)], grads[len(leaves) : -1], grads[-1]


def _is_floating(x: Tensor | None) -> bool:
    return x is not None and x.is_floating_point()


def _cut(tokens: Sequence[Any], a: int, length: int) -> list[Any]:
    return [x if x is None else x[:, a : a + length] for x in tokens]
