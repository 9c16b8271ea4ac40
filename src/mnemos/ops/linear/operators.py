"""Register the compiled backend (native.py) as differentiable operators of PyTorch.

It provides two functions of plain tensors:

    forward(q, k, v, s, z, mask, kind, eps) -> y, s_end, z_end, den
    backward(q, k, v, s, z, mask, kind, den, gy, gs, gz) -> dq, dk, dv, ds, dz

`den`, the denominators, are for the backward and have no gradient; `kind` is the kernels' code of a feature map.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mnemos.native import codes
from mnemos.ops.padding import zero_invalid

from .feature_maps import FEATURE_MAPS, Pointwise

__all__ = ["keep", "prepare", "register"]

STATE = "Tensor q, Tensor k, Tensor v, Tensor s, Tensor z"
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, phi: Pointwise | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """q, k, v of one dtype, and the code of the feature map that the kernels apply; other maps are applied here."""
    kind = codes.FEATURE_MAPS["identity"]
    if phi is not None and FEATURE_MAPS.get(phi.name) is phi and phi.name in codes.FEATURE_MAPS:
        kind = codes.FEATURE_MAPS[phi.name]
    elif phi is not None:
        q, k = phi(q), phi(zero_invalid(k, mask))
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = q.float(), k.float(), v.float()
    return q, k, v, kind


def register(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    like_den: Callable[..., Tensor],
    derivative: Callable[..., Gradients],
    setup: Callable[..., None] | None = None,
) -> None:
    """Register mnemos::{name} and mnemos::{name}_backward on the CPU.

    like_den(q, k, v, s, z): empty denominators. derivative: the function that autograd calls for the backward, which is
    faster than the operator. setup: what autograd calls after the forward, if not `keep`.
    """
    inputs = f"{STATE}, Tensor? mask, int kind"
    torch.library.define(f"mnemos::{name}", f"({inputs}, float eps) -> ({', '.join(['Tensor'] * 4)})")
    above = "Tensor den, Tensor gy, Tensor gs, Tensor gz"
    torch.library.define(f"mnemos::{name}_backward", f"({inputs}, {above}) -> ({', '.join(['Tensor'] * 5)})")
    torch.library.impl(f"mnemos::{name}", "CPU", forward)
    torch.library.impl(f"mnemos::{name}_backward", "CPU", backward)
    torch.library.register_fake(f"mnemos::{name}", lambda *given: (*_like_results(*given), like_den(*given[:5])))
    torch.library.register_fake(f"mnemos::{name}_backward", _like_backward)
    torch.library.register_autograd(f"mnemos::{name}", make_backward(derivative), setup_context=setup or keep)

    def once(ctx: object, *_: object) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "linear_attention is differentiable once; backend='native' has no derivative of its derivative"
        )

    torch.library.register_autograd(f"mnemos::{name}_backward", once)


def _like_results(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: object) -> tuple[Tensor, ...]:
    return v.new_empty(*q.shape[:3], v.shape[-1]), s.new_empty(s.shape), z.new_empty(z.shape)


def _like_backward(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save for the backward: the inputs, and what the forward returned for it."""
    *tensors, ctx.kind, _ = inputs
    ctx.inputs = len(tensors)
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.mark_non_differentiable(*output[3:])


def make_backward(derivative: Callable[..., Gradients]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of a forward that called `keep`. A missing incoming gradient counts as zero."""

    def gradients(ctx: Any, *above: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, kept = saved[: ctx.inputs], saved[ctx.inputs :]
        q, _, v, s, z, *_ = inputs
        shapes = (*q.shape[:3], v.shape[-1]), s.shape, z.shape
        likes = zip(above, (v, s, z), shapes, strict=False)
        gy, gs, gz = (x.new_zeros(shape) if g is None else g for g, x, shape in likes)
        found = derivative(*inputs, ctx.kind, *kept, gy, gs, gz)
        return *found, *[None] * (len(inputs) - len(found) + 2)  # mask, kind, eps

    return gradients
