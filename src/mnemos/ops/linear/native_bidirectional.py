"""Linear attention over all keys on the CPU, in C++ (mnemos/native/bidirectional.cpp): causal=False, any T and N.

The forward sums S = Σ φ(k)·vᵀ over the keys and multiplies the queries with it. The backward keeps q, k, v, the sums
(which the forward returns as the new state) and one denominator per token and head. Types as in native.py.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native.codes import TYPES

from .feature_maps import Pointwise
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
from .operators import Gradients, given, keep, register

CALL = struct.Struct("53q")  # `struct Everything` of native/bidirectional.h
_NO_Y, _NO_BACKWARD = (0,) * 4, (0,) * 20  # fields that a call leaves empty


def everything(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor | None,
    z: Tensor | None,
    mask: Tensor | None,
    phi: Pointwise | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, T, H, D], k [B, N, H, D] (before `phi`, if that is not None), v [B, N, H, M], s, z -> y, s, z.

    s and z may be None: zeros. Cost: 2·(T + N)·B·H·D·M operations, 4·(T + N)·B·H·D·M for the backward, on
    `torch.get_num_threads()` threads.
    """
    (q, k, v, kind), wanted = given(q, k, v, mask, phi), v.dtype
    operator = torch.ops.mnemos.linear_attention_bidirectional
    y, s_end, z_end = attend(_kernel, _EAGER, operator, (q, k, v, s, z, mask), kind, eps)
    return y if y.dtype is wanted else y.to(wanted), s_end, z_end


def _call(backward: bool, eps: float, *words: int) -> None:
    loaded = loaded_kernels()
    check(loaded.mnemos_bidirectional(kernels.variant(loaded), backward, CALL.pack(*words), eps))


def _sizes(q: Tensor, k: Tensor, v: Tensor, kind: int) -> tuple[int, ...]:
    (b, t, h, d), n, m = q.shape, k.shape[1], v.shape[-1]
    return b, t, n, h, d, m, TYPES[v.dtype], kind, torch.get_num_threads()


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
) -> tuple[Any, ...]:
    """y, the new s and z, and the denominators if they are `kept`."""
    q, k, v = dense(q), dense(k), dense(v)
    y, s_end, z_end, den = results(q, v, kept)
    s, z = (x if x is None else x.contiguous() for x in (s, z))
    sums = pointers(s, z, s_end, z_end, den)
    rows = *address(q), *address(k), *address(v), *address(y)
    _call(False, eps, *_sizes(q, k, v, kind), *rows, *mask_address(mask), *sums, *_NO_BACKWARD)
    return y, s_end, z_end, den


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    return _kernel(*inputs)


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
    gs: Tensor | None,
    gz: Tensor | None,
    starts: bool = True,
) -> tuple[Any, ...]:
    """The gradients; gs and gz may be None: zeros. starts: whether those of the first state are wanted."""
    q, k, v, gy = dense(q), dense(k), dense(v), dense(gy)
    s_end, z_end, den = s_end.contiguous(), z_end.contiguous(), den.contiguous()
    dq, dk, dv = q.new_empty(*q.shape), k.new_empty(*k.shape), v.new_empty(*v.shape)
    ds, dz = (s_end.new_empty(*s_end.shape), z_end.new_empty(*z_end.shape)) if starts else (None, None)
    gs, gz = (x if x is None else x.contiguous() for x in (gs, gz))
    sums = pointers(s_end, z_end, None, None, den)
    rows = *address(q), *address(k), *address(v), *_NO_Y
    found = *address(gy), *address(dq), *address(dk), *address(dv)
    _call(True, 0.0, *_sizes(q, k, v, kind), *rows, *mask_address(mask), *sums, *found, *pointers(gs, gz, ds, dz))
    return dq, dk, dv, ds, dz


def _derivative(*inputs: Any) -> Gradients:
    direct = not torch.is_grad_enabled() and eager(*inputs[:6], *inputs[-3:])
    return _backward(*inputs) if direct else torch.ops.mnemos.linear_attention_bidirectional_backward(*inputs)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Like `keep`, with the new state in the place of the given one: the backward needs S and z of all keys."""
    q, k, v, _, _, *rest = inputs
    keep(ctx, (q, k, v, *output[1:3], *rest), output)


_EAGER = eager_function(_kernel, _backward, "linear_attention_bidirectional_backward", after=True).apply


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
