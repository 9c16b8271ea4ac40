"""Causal linear attention on the CPU, in C++ (mnemos/native): φ, sums and normaliser in one pass over the tokens.

The forward accumulates S over the tokens. The backward accumulates it again for dq, and R from the end for dk and dv
(the formulas of chunked.py). It keeps q, k, v, the first state and one denominator per token and head. Inputs have
any strides and are float32, bfloat16 or float16; the sums are float32.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos._compat import constant
from mnemos.native import library, why_not
from mnemos.native.codes import TYPES

from .compensated import CompensatedState
from .feature_maps import Pointwise
from .native_bidirectional import everything
from .native_calls import (
    address,
    attend,
    check,
    dense,
    eager,
    eager_function,
    loaded_kernels,
    mask_address,
    pointers,
    results,
)
from .operators import STATE, Gradients, differentiated, given, keep, register

__all__ = ["FROM_NOTHING", "causal", "compensated", "everything", "runs_here", "takes", "token", "why_not"]

CALL = struct.Struct("56q")  # `struct Call` of native/call.h
_NO_Y, _NO_ENDS, _NO_BACKWARD = (0,) * 4, (0,) * 6, (0,) * 20  # fields that a call leaves empty


@constant
def runs_here() -> bool:
    """Whether the kernels are built and loaded."""
    return library() is not None


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all tensors are float32, bfloat16 or float16 on the CPU."""
    return q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES and v.device.type == "cpu" and v.shape[-1] > 0


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z.

    s and z may be None: zeros. Cost: O(B·T·H·D·M), on `torch.get_num_threads()` threads. If there are more threads than
    rows times heads, the sequence is divided among them too, which adds a third to a half of the work.
    """
    (q, k, v, kind), wanted = given(q, k, v, mask, phi), v.dtype
    operator = torch.ops.mnemos.linear_attention
    y, s_end, z_end = attend(_kernel, _EAGER, operator, (q, k, v, s, z, mask), kind, eps)
    return y if y.dtype is wanted else y.to(wanted), s_end, z_end


FROM_NOTHING = ("causal", "token", "everything")
token = causal  # the kernel has a faster path for a single token


def compensated(
    q: Tensor, k: Tensor, v: Tensor, state: CompensatedState, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, CompensatedState]:
    """`causal` with a `CompensatedState`; within a call the kernels always compensate their sums."""
    (q, k, v, kind), wanted = given(q, k, v, mask, phi), v.dtype
    y, s, z, _, *low = torch.ops.mnemos.linear_attention_compensated(q, k, v, *state, mask, kind, eps)
    return y.to(wanted), CompensatedState(s, z, *low)


def _sizes(q: Tensor, v: Tensor, kind: int) -> tuple[int, ...]:
    return *q.shape, v.shape[-1], TYPES[v.dtype], kind, torch.get_num_threads()


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    kind: int,
    eps: float,
    kept: bool = True,
    low: tuple[Tensor, ...] = (),
) -> tuple[Any, ...]:
    """y, the new s and z, the denominators if they are `kept`, and the new s_low and z_low if those are given."""
    q, k, v = dense(q), dense(k), dense(v)
    y, s_end, z_end, den = results(q, v, kept)
    s, z = (x if x is None else x.contiguous() for x in (s, z))
    lows = [x.contiguous() for x in low]
    ends = [torch.empty_like(x) for x in lows]
    lower = pointers(*lows, *ends) or (0, 0, 0, 0)
    call = CALL.pack(
        *_sizes(q, v, kind), *address(q), *address(k), *address(v), *address(y), *mask_address(mask),
        *pointers(s, z, s_end, z_end), *lower, *pointers(den), *_NO_BACKWARD,
    )  # fmt: skip
    loaded = loaded_kernels()
    check(loaded.mnemos_forward(kernels.variant(loaded), call, eps))
    return y, s_end, z_end, den, *ends


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    return _kernel(*inputs)


def _compensated(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *low, mask, kind, eps = others
    return _kernel(q, k, v, s, z, mask, kind, eps, low=tuple(low))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    kind: int,
    den: Tensor,
    gy: Tensor,
    gs: Tensor | None,
    gz: Tensor | None,
    starts: bool = True,
) -> tuple[Any, ...]:
    """The gradients; s and z, and gs and gz, may be None: zeros. starts: whether those of s and z are wanted."""
    q, k, v, gy, den = dense(q), dense(k), dense(v), dense(gy), den.contiguous()
    b, t, h, d = q.shape
    m = v.shape[-1]
    dq, dk, dv = q.new_empty(b, t, h, d), k.new_empty(b, t, h, d), v.new_empty(b, t, h, m)
    ds, dz = (den.new_empty(b, h, d, m), den.new_empty(b, h, d)) if starts else (None, None)
    s, z, gs, gz = (x if x is None else x.contiguous() for x in (s, z, gs, gz))
    call = CALL.pack(
        *_sizes(q, v, kind), *address(q), *address(k), *address(v), *_NO_Y, *mask_address(mask),
        *pointers(s, z), *_NO_ENDS, den.data_ptr(), *address(gy), *address(dq), *address(dk), *address(dv),
        *pointers(gs, gz, ds, dz),
    )  # fmt: skip
    loaded = loaded_kernels()
    check(loaded.mnemos_backward(kernels.variant(loaded), call))
    return dq, dk, dv, ds, dz


def _derivative(*inputs: Any) -> Gradients:
    direct = not torch.is_grad_enabled() and eager(*inputs[:6], *inputs[-3:])
    return _backward(*inputs) if direct else torch.ops.mnemos.linear_attention_backward(*inputs)


_gradients = differentiated(_derivative)
_EAGER = eager_function(_kernel, _backward, "linear_attention_backward").apply


def _denominators(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor]:
    return (s.new_empty(v.shape[:3]),)


register("linear_attention", "native", ["CPU"], _forward, _backward, _denominators, "den", _derivative)


def _like_compensated(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    s, z, s_low, z_low = (x.new_empty(x.shape) for x in others[:4])
    return v.new_empty(v.shape), s, z, s.new_empty(v.shape[:3]), s_low, z_low


def _keep_compensated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    keep(ctx, (*inputs[:5], *inputs[7:]), output[:4])
    ctx.mark_non_differentiable(*output[3:])


def _gradients_compensated(ctx: object, gy: object, gs: object, gz: object, *_: object) -> tuple[Tensor | None, ...]:
    *found, mask, kind, eps = _gradients(ctx, gy, gs, gz)
    return *found, None, None, mask, kind, eps


torch.library.define(
    "mnemos::linear_attention_compensated",
    f"({STATE}, Tensor s_low, Tensor z_low, Tensor? mask, int kind, float eps) -> ({', '.join(['Tensor'] * 6)})",
)
torch.library.impl("mnemos::linear_attention_compensated", "CPU", _compensated)
torch.library.register_fake("mnemos::linear_attention_compensated", _like_compensated)
torch.library.register_autograd(
    "mnemos::linear_attention_compensated", _gradients_compensated, setup_context=_keep_compensated
)
