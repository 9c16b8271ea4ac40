"""Register a compiled backend (native.py, triton.py) as differentiable operators of PyTorch.

A backend provides two functions of plain tensors. `extra` are further arguments of both:

    forward(q, k, v, s, z, mask, *extra, kind, eps) -> y, s_end, z_end, *kept
    backward(q, k, v, s, z, mask, *extra, kind, *kept, gy, gs, gz) -> dq, dk, dv, ds, dz

`kept` are tensors for the backward, which have no gradient; `kind` is the kernels' code of a feature map.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mnemos.native import codes

from .feature_maps import FEATURE_MAPS, Pointwise, zero_invalid

__all__ = ["STATE", "keep", "make_backward", "prepare", "register"]

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
    backend: str,
    devices: Iterable[str],
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    like_kept: Callable[..., tuple[Tensor, ...]],
    kept: str,
    derivative: Callable[..., Gradients] | None = None,
    extra: str = "",
    setup: Callable[..., None] | None = None,
) -> None:
    """Register mnemos::{name} and mnemos::{name}_backward on these devices.

    kept: the names of the tensors that the forward keeps, separated by spaces; like_kept(q, k, v, s, z): empty ones.
    derivative: the function that autograd calls for the backward, if there is a faster one than the operator.
    setup: what autograd calls after the forward, if not `keep`.
    """
    names = kept.split()
    inputs = f"{STATE}, Tensor? mask, {extra}int kind"
    torch.library.define(f"mnemos::{name}", f"({inputs}, float eps) -> ({_tensors(3 + len(names))})")
    above = ", ".join(f"Tensor {x}" for x in (*names, "gy", "gs", "gz"))
    torch.library.define(f"mnemos::{name}_backward", f"({inputs}, {above}) -> ({_tensors(5)})")
    for device in devices:
        torch.library.impl(f"mnemos::{name}", device, forward)
        torch.library.impl(f"mnemos::{name}_backward", device, backward)
    torch.library.register_fake(f"mnemos::{name}", lambda *given: (*_like_results(*given), *like_kept(*given[:5])))
    torch.library.register_fake(f"mnemos::{name}_backward", _like_backward)
    derivative = derivative or getattr(torch.ops.mnemos, f"{name}_backward")
    torch.library.register_autograd(f"mnemos::{name}", make_backward(derivative), setup_context=setup or keep)

    def once(ctx: object, *_: object) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"linear_attention is differentiable once; backend={backend!r} has no derivative of its derivative"
        )

    torch.library.register_autograd(f"mnemos::{name}_backward", once)


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


def _like_results(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: object) -> tuple[Tensor, ...]:
    return v.new_empty(*q.shape[:3], v.shape[-1]), s.new_empty(s.shape), z.new_empty(z.shape)


def _like_backward(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...], kept: tuple[Tensor, ...] | None = None) -> None:
    """Save for the backward: the inputs, and what the forward returned for it (or `kept`)."""
    *tensors, ctx.kind, _ = inputs
    ctx.inputs = len(tensors)
    ctx.save_for_backward(*tensors, *(output[3:] if kept is None else kept))
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
        return *found, *[None] * (len(inputs) - len(found) + 2)  # mask, extra, kind, eps

    return gradients
