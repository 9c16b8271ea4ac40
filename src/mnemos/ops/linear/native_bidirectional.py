"""Linear attention over all keys on the CPU, in C++ (mnemos/native/bidirectional.cpp): causal=False, any T and N.

The forward sums S = Σ φ(k)·vᵀ over the keys and multiplies the queries with it. The backward keeps q, k, v, the sums
(which the forward returns as the new state) and one denominator per token and head. Types as in native.py.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native.codes import TYPES

from .feature_maps import Pointwise
from .native_calls import address, check, eager, loaded_kernels, mask_address, packed
from .operators import Gradients, differentiated, given, keep, register

Call = ctypes.c_int64 * 53  # `struct Everything` of native/bidirectional.h


def everything(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k [B, N, H, D] (before `phi`, if that is not None), v [B, N, H, M], s, z -> y, s, z.

    Cost: 2·(T + N)·B·H·D·M operations, 4·(T + N)·B·H·D·M for the backward, on `torch.get_num_threads()` threads.
    """
    (q, k, v, kind), wanted = given(q, k, v, mask, phi), v.dtype
    compute = _Eager.apply if eager(q, k, v, s, z, mask) else torch.ops.mnemos.linear_attention_bidirectional
    y, s, z, _ = compute(q, k, v, s, z, mask, kind, eps)
    return y.to(wanted), s, z


def _call(backward: bool, eps: float, *words: int) -> None:
    loaded = loaded_kernels()
    check(loaded.mnemos_bidirectional(kernels.variant(loaded), backward, Call(*words), eps))


def _given(q: Tensor, k: Tensor, v: Tensor, y: Tensor | None, mask: Tensor | None, kind: int) -> tuple[int, ...]:
    (b, t, h, d), n, m = q.shape, k.shape[1], v.shape[-1]
    sizes = b, t, n, h, d, m, TYPES[v.dtype], kind, torch.get_num_threads()
    result = (0, 0, 0, 0) if y is None else address(y)
    return *sizes, *address(q), *address(k), *address(v), *result, *mask_address(mask)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, kind: int, eps: float
) -> tuple[Tensor, ...]:
    q, k, v, s, z = packed(q), packed(k), packed(v), s.contiguous(), z.contiguous()
    y, den = v.new_empty(*q.shape[:3], v.shape[-1]), s.new_empty(q.shape[:3])
    ends = torch.empty_like(s), torch.empty_like(z)
    _call(False, eps, *_given(q, k, v, y, mask, kind), *(x.data_ptr() for x in (s, z, *ends, den)))
    return y, *ends, den


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_end: Tensor,
    z_end: Tensor,
    mask: Tensor | None,
    kind: int,
    den: Tensor,
    gy: Tensor,
    gs: Tensor,
    gz: Tensor,
) -> Gradients:
    q, k, v, gy = packed(q), packed(k), packed(v), packed(gy)
    s_end, z_end, den, gs, gz = (x.contiguous() for x in (s_end, z_end, den, gs, gz))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    ds, dz = torch.empty_like(s_end), torch.empty_like(z_end)
    sums = (s_end.data_ptr(), z_end.data_ptr(), 0, 0, den.data_ptr())
    rows = (*address(gy), *address(dq), *address(dk), *address(dv))
    _call(True, 0.0, *_given(q, k, v, None, mask, kind), *sums, *rows, *(x.data_ptr() for x in (gs, gz, ds, dz)))
    return dq, dk, dv, ds, dz


def _derivative(*inputs: Any) -> Gradients:
    direct = not torch.is_grad_enabled() and eager(*inputs[:6], *inputs[-3:])
    return _backward(*inputs) if direct else torch.ops.mnemos.linear_attention_bidirectional_backward(*inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Like `keep`, with the new state in the place of the given one: the backward needs S and z of all keys."""
    q, k, v, _, _, *rest = inputs
    keep(ctx, (q, k, v, *output[1:3], *rest), output)


_gradients = differentiated(_derivative)


class _Eager(torch.autograd.Function):
    """The operator without the Python dispatcher, whose overhead is the time of a hundred tokens."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        ctx.set_materialize_grads(False)
        _keep(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


def _denominators(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor]:
    return (s.new_empty(q.shape[:3]),)


register(
    "linear_attention_bidirectional",
    "native",
    ["CPU"],
    _forward,
    _backward,
    _denominators,
    "den",
    _derivative,
    setup=_keep,
)
