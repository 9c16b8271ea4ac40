"""Register a compiled backend (native.py, triton.py) as differentiable operators of PyTorch.

A backend provides two functions of plain tensors. `extra` are further arguments of both:

    forward(q, k, v, s, z, mask, *extra, kind, eps) -> y, den, s_end, z_end
    backward(q, k, v, s, z, mask, *extra, kind, y, den, gy, gs, gz) -> dq, dk, dv, ds, dz

`den` [B, T, H] are the denominators, kept for the backward; `kind` is the kernels' code of a feature map.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mnemos.native import codes

from .feature_maps import FEATURE_MAPS, Pointwise

__all__ = ["STATE", "differentiated", "given", "keep", "register"]

STATE = "Tensor q, Tensor k, Tensor v, Tensor s, Tensor z"
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def given(q: Tensor, k: Tensor, v: Tensor, phi: Pointwise | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """q, k, v of one dtype, and the code of the feature map that the kernels apply; other maps are applied here."""
    kind = codes.FEATURE_MAPS["identity"]
    if phi is not None and FEATURE_MAPS.get(phi.name) is phi and phi.name in codes.FEATURE_MAPS:
        kind = codes.FEATURE_MAPS[phi.name]
    elif phi is not None:
        q, k = phi(q), phi(k)
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = q.float(), k.float(), v.float()
    return q, k, v, kind


def register(
    name: str,
    backend: str,
    devices: Iterable[str],
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    derivative: Callable[..., Gradients] | None = None,
    extra: str = "",
) -> None:
    """Register mnemos::{name} and mnemos::{name}_backward on these devices.

    derivative: the function that autograd calls for the backward, if there is a faster one than the operator.
    """
    inputs = f"{STATE}, Tensor? mask, {extra}int kind"
    torch.library.define(f"mnemos::{name}", f"({inputs}, float eps) -> ({_tensors(4)})")
    above = "Tensor y, Tensor den, Tensor gy, Tensor gs, Tensor gz"
    torch.library.define(f"mnemos::{name}_backward", f"({inputs}, {above}) -> ({_tensors(5)})")
    for device in devices:
        torch.library.impl(f"mnemos::{name}", device, forward)
        torch.library.impl(f"mnemos::{name}_backward", device, backward)
    torch.library.register_fake(f"mnemos::{name}", _like_forward)
    torch.library.register_fake(f"mnemos::{name}_backward", _like_backward)
    derivative = derivative or getattr(torch.ops.mnemos, f"{name}_backward")
    torch.library.register_autograd(f"mnemos::{name}", differentiated(derivative), setup_context=keep)

    def once(ctx: object, *_: object) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"linear_attention is differentiable once; backend={backend!r} has no derivative of its derivative"
        )

    torch.library.register_autograd(f"mnemos::{name}_backward", once)


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


def _like_forward(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: object) -> tuple[Tensor, ...]:
    return v.new_empty(v.shape), s.new_empty(v.shape[:3]), s.new_empty(s.shape), z.new_empty(z.shape)


def _like_backward(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save for the backward: the inputs, y and the denominators."""
    *tensors, ctx.kind, _ = inputs
    y, den, _, _ = output
    ctx.save_for_backward(*tensors, y, den)
    ctx.mark_non_differentiable(den)


def differentiated(derivative: Callable[..., Gradients]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of a forward that called `keep`. A missing incoming gradient counts as zero."""

    def gradients(
        ctx: Any, gy: Tensor | None, _: Any, gs: Tensor | None, gz: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *inputs, y, den = ctx.saved_tensors
        gy, gs, gz = (torch.zeros_like(x) if g is None else g for g, x in ((gy, y), (gs, inputs[3]), (gz, inputs[4])))
        found = derivative(*inputs, ctx.kind, y, den, gy, gs, gz)
        return *found, *[None] * (len(inputs) - len(found) + 2)  # mask, extra, kind, eps

    return gradients
