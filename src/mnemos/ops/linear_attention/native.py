"""Causal linear attention on the processor, in C++ (mnemos/native): φ, sums and normaliser in one pass over the tokens.

The forward walks S over the tokens; the backward walks it again for dq, and R from the end for dk and dv (the formulas
of chunked.py). What lasts from one to the other is q, k, v, y, the first state and one denominator a token and head.
Any strides will do; the numbers are float32, bfloat16 or float16, the sums float32.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from mnemos.native import library, why_not

from .feature_maps import FEATURE_MAPS, Pointwise

__all__ = ["causal", "runs_here", "takes", "token", "why_not"]

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAPS = {"elu": 1, "relu": 2}
Call = ctypes.c_int64 * 56  # `struct Call` of native/call.h
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.compiler.assume_constant_result
def runs_here() -> bool:
    """Whether the kernels were built."""
    return library() is not None


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """On the CPU, float32 or shorter."""
    return q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES and v.device.type == "cpu" and v.shape[-1] > 0


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (φ still to be applied, or None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z.

    Cost: O(B·T·H·D·M), by as many threads as `torch.get_num_threads()`; where there are more of them than rows and
    heads, the sequence is shared out too, for a third to a half of the work again.
    """
    kind = 0
    if phi is not None and FEATURE_MAPS.get(phi.name) is phi and phi.name in MAPS:
        kind = MAPS[phi.name]
    elif phi is not None:
        q, k = phi(q), phi(k)
    wanted = v.dtype
    if not q.dtype == k.dtype == wanted:
        q, k, v = q.float(), k.float(), v.float()
    y, _, s, z = torch.ops.mnemos.linear_attention(q, k, v, s, z, mask, kind, eps)
    return y.to(wanted), s, z


token = causal  # a single one takes a shorter way inside


def _library() -> ctypes.CDLL:
    loaded = library()
    if loaded is None:
        raise RuntimeError(why_not())
    return loaded


def _variant(loaded: ctypes.CDLL) -> int:
    """0 for any processor, 1 with AVX2, 2 with AVX-512. Tests put the lesser ones in its place."""
    return loaded.mnemos_best()


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    b, t, h, _ = x.stride()
    return x.data_ptr(), b, t, h


def _packed(x: Tensor) -> Tensor:
    """The kernels take any strides but the last."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _sizes(q: Tensor, v: Tensor, kind: int) -> tuple[int, ...]:
    return *q.shape, v.shape[-1], TYPES[v.dtype], kind, torch.get_num_threads()


def _mask(mask: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for the states of linear attention")


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? mask, int kind"
torch.library.define("mnemos::linear_attention", f"({_INPUTS}, float eps) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "mnemos::linear_attention_backward",
    f"({_INPUTS}, Tensor y, Tensor den, Tensor gy, Tensor gs, Tensor gz) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, kind: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, s, z = _packed(q), _packed(k), _packed(v), s.contiguous(), z.contiguous()
    y, den = v.new_empty(v.shape), s.new_empty(v.shape[:3])
    s_end, z_end = torch.empty_like(s), torch.empty_like(z)
    numbers = (*_sizes(q, v, kind), *_rows(q), *_rows(k), *_rows(v), *_rows(y), *_mask(mask))
    pointers = (s.data_ptr(), z.data_ptr(), s_end.data_ptr(), z_end.data_ptr(), 0, 0, 0, 0, den.data_ptr())
    loaded = _library()
    _check(loaded.mnemos_forward(_variant(loaded), Call(*numbers, *pointers), eps))
    return y, den, s_end, z_end


@torch.library.register_fake("mnemos::linear_attention")
def _(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), s.new_empty(v.shape[:3]), s.new_empty(s.shape), z.new_empty(z.shape)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    kind: int,
    y: Tensor,
    den: Tensor,
    gy: Tensor,
    gs: Tensor,
    gz: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, y, gy = _packed(q), _packed(k), _packed(v), _packed(y), _packed(gy)
    s, z, den, gs, gz = (x.contiguous() for x in (s, z, den, gs, gz))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    ds, dz = torch.empty_like(s), torch.empty_like(z)
    numbers = (*_sizes(q, v, kind), *_rows(q), *_rows(k), *_rows(v), *_rows(y), *_mask(mask))
    pointers = (s.data_ptr(), z.data_ptr(), 0, 0, 0, 0, 0, 0, den.data_ptr(), *_rows(gy), *_rows(dq), *_rows(dk), *_rows(dv))
    sums = (gs.data_ptr(), gz.data_ptr(), ds.data_ptr(), dz.data_ptr())
    loaded = _library()
    _check(loaded.mnemos_backward(_variant(loaded), Call(*numbers, *pointers, *sums)))
    return dq, dk, dv, ds, dz


@torch.library.register_fake("mnemos::linear_attention_backward")
def _(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, s, z, mask, ctx.kind, _ = inputs
    y, den, _, _ = output
    ctx.save_for_backward(q, k, v, s, z, mask, y, den)
    ctx.mark_non_differentiable(den)


def _gradients(ctx: Any, gy: Tensor | None, _: Any, gs: Tensor | None, gz: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, s, z, mask, y, den = ctx.saved_tensors
    gy, gs, gz = (torch.zeros_like(x) if g is None else g for g, x in ((gy, y), (gs, s), (gz, z)))
    found = torch.ops.mnemos.linear_attention_backward(q, k, v, s, z, mask, ctx.kind, y, den, gy, gs, gz)
    return *found, None, None, None


def _once(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
    raise RuntimeError("linear_attention is differentiable once; backend='native' has no derivative of its derivative")


torch.library.impl("mnemos::linear_attention", "CPU", _forward)
torch.library.impl("mnemos::linear_attention_backward", "CPU", _backward)
torch.library.register_autograd("mnemos::linear_attention", _gradients, setup_context=_keep)
torch.library.register_autograd("mnemos::linear_attention_backward", _once)
