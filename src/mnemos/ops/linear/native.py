"""Causal linear attention on the CPU, in C++ (mnemos/native): φ, sums and normaliser in one pass over the tokens.

The forward accumulates S over the tokens. The backward accumulates it again for dq, and R from the end for dk and dv
(the formulas of chunked.py). It keeps q, k, v, the first state and one denominator per token and head. Inputs have
any strides and are float32, bfloat16 or float16; the sums are float32.
"""

import ctypes
from collections.abc import Sequence
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
from .native_calls import address, check, eager, loaded_kernels, mask_address, packed
from .operators import STATE, Gradients, differentiated, given, keep, register

__all__ = ["causal", "compensated", "everything", "runs_here", "takes", "token", "why_not"]

Call = ctypes.c_int64 * 56  # `struct Call` of native/call.h


@constant
def runs_here() -> bool:
    """Whether the kernels are built and loaded."""
    return library() is not None


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all tensors are float32, bfloat16 or float16 on the CPU."""
    return q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES and v.device.type == "cpu" and v.shape[-1] > 0


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z.

    Cost: O(B·T·H·D·M), on `torch.get_num_threads()` threads. If there are more threads than rows times heads, the
    sequence is divided among them too, which adds a third to a half of the work.
    """
    (q, k, v, kind), wanted = given(q, k, v, mask, phi), v.dtype
    compute = _Eager.apply if eager(q, k, v, s, z, mask) else torch.ops.mnemos.linear_attention
    y, s, z, _ = compute(q, k, v, s, z, mask, kind, eps)
    return y.to(wanted), s, z


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


def _forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, kind: int, eps: float
) -> tuple[Tensor, ...]:
    return _run(q, k, v, (s, z), mask, kind, eps)


def _compensated(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *state, mask, kind, eps = others
    return _run(q, k, v, state, mask, kind, eps)


def _run(
    q: Tensor, k: Tensor, v: Tensor, state: Sequence[Tensor], mask: Tensor | None, kind: int, eps: float
) -> tuple[Tensor, ...]:
    """y, the new s and z, the denominators, and the new s_low and z_low if they are given."""
    q, k, v, state = packed(q), packed(k), packed(v), [x.contiguous() for x in state]
    y, den = v.new_empty(v.shape), state[0].new_empty(v.shape[:3])
    ends = [torch.empty_like(x) for x in state]
    numbers = (*_sizes(q, v, kind), *address(q), *address(k), *address(v), *address(y), *mask_address(mask))
    sums = [x.data_ptr() for x in (*state[:2], *ends[:2], *state[2:], *ends[2:])]
    loaded = loaded_kernels()
    call = Call(*numbers, *sums, *[0] * (8 - len(sums)), den.data_ptr())
    check(loaded.mnemos_forward(kernels.variant(loaded), call, eps))
    return y, *ends[:2], den, *ends[2:]


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    kind: int,
    den: Tensor,
    gy: Tensor,
    gs: Tensor,
    gz: Tensor,
) -> Gradients:
    q, k, v, gy = packed(q), packed(k), packed(v), packed(gy)
    s, z, den, gs, gz = (x.contiguous() for x in (s, z, den, gs, gz))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    ds, dz = torch.empty_like(s), torch.empty_like(z)
    no_y = (0, 0, 0, 0)
    numbers = (*_sizes(q, v, kind), *address(q), *address(k), *address(v), *no_y, *mask_address(mask))
    pointers = (s.data_ptr(), z.data_ptr(), *[0] * 6, den.data_ptr())
    rows = (*address(gy), *address(dq), *address(dk), *address(dv))
    sums = (gs.data_ptr(), gz.data_ptr(), ds.data_ptr(), dz.data_ptr())
    loaded = loaded_kernels()
    check(loaded.mnemos_backward(kernels.variant(loaded), Call(*numbers, *pointers, *rows, *sums)))
    return dq, dk, dv, ds, dz


def _derivative(*inputs: Any) -> Gradients:
    direct = not torch.is_grad_enabled() and eager(*inputs[:6], *inputs[-3:])
    return _backward(*inputs) if direct else torch.ops.mnemos.linear_attention_backward(*inputs)


_gradients = differentiated(_derivative)


class _Eager(torch.autograd.Function):
    """The operator without the Python dispatcher, whose overhead is the time of a hundred tokens."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        ctx.set_materialize_grads(False)
        keep(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


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
