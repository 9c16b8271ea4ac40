"""The delta rule and decayed attention on the CPU, in C++ (native/delta.cpp), forward and backward.

The forward keeps the inputs and the state before every `_keep(M)`-th token, which is at most two numbers a token and
channel; the backward computes what is between two of these states again. Inputs have any strides and are float32,
bfloat16 or float16; all sums, gates and states are float32. Heads of values that share a key head read its queries and
keys where they lie, and their gradients are added up in the kernel.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native import why_not
from mnemos.native.codes import TYPES
from mnemos.ops.kernel_call import (
    address,
    dense,
    eager,
    loaded_kernels,
    pointers,
    present,
    register_pair,
    runs_here,
)
from mnemos.ops.once import differentiable_once

from .chunked import name_of

__all__ = ["recurrence", "runs_here", "takes", "why_not"]

CALL = struct.Struct("58q")  # `struct Delta` of native/delta.h
UNITS = 8  # of the backward, if there are as many heads; never the number of threads, on which no result may depend
_NO_BACKWARD, _NO_ROWS, _NO_GATES = (0,) * 21, (0,) * 4, (0,) * 4
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all tensors are float32, bfloat16 or float16 on the CPU, and heads are not empty."""
    typed = q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES
    return typed and v.device.type == "cpu" and q.shape[-1] > 0 and v.shape[-1] > 0


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor | None, s: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, Hk, D], v [B, T, H, M], beta [B, T, H], decay [B, T, H(, D)], s [B, H, D, M] -> y, s.

    Cost: about B·T·H·(3·D·M + 2·C·(D + M)) multiply-adds, C = 32 (16 with a decay per channel), and with gradients
    B·T·H·(11·D·M + 6·C·(D + M)); on `torch.get_num_threads()` threads, of which each takes a head of a row.
    """
    wanted = v.dtype
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = q.float(), k.float(), v.float()
    tensors = q, k, v, beta, decay, s
    kept = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors])
    if not eager(*tensors):
        y, end, _ = torch.ops.mnemos.delta_rule(*tensors, scale, kept)
    elif kept:
        y, end = _Eager.apply(*tensors, scale)
    else:
        y, end = _compute(*tensors, scale, None)
    return y if y.dtype is wanted else y.to(wanted), end


def _keep(m: int) -> int:
    """Tokens between two states that are kept: a multiple of the kernels' chunks."""
    return max(64, (m + 127) // 128 * 64)


def _parts(q: Tensor, v: Tensor) -> int:
    """Parts of the heads that share a key head, for the backward: few rows and key heads would leave threads idle."""
    b, _, shared, _ = q.shape
    return max(1, min(v.shape[2] // shared, -(-UNITS // max(1, b * shared))))


def _sizes(q: Tensor, v: Tensor, decay: Tensor | None) -> tuple[int, ...]:
    (b, t, shared, d), (h, m) = q.shape, v.shape[2:]
    channels = decay is not None and decay.dim() == 4
    return b, t, shared, h, d, m, TYPES[v.dtype], torch.get_num_threads(), channels, _keep(m)


def _gates(x: Tensor | None) -> tuple[int, ...]:
    return _NO_GATES if x is None else (x.data_ptr(), *x.stride()[:3])


def _ready(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor | None, s: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The tensors as the kernel reads them."""
    decay = decay if decay is None or decay.dim() == 3 else dense(decay)
    return dense(q), dense(k), dense(v), beta, decay, s if s is None else s.contiguous()


def _states(v: Tensor, d: int, kept: bool) -> Tensor:
    """Empty room for the states that the backward begins with; the first of a row is its input."""
    b, t, h, m = v.shape
    return v.new_empty(b, h, (max(t, 1) - 1) // _keep(m) if kept else 0, d, m, dtype=torch.float32)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    s: Tensor | None,
    scale: float,
    kept: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the state after the call, and the states within it if they are `kept`."""
    states = _states(v, q.shape[-1], kept)
    return *_compute(q, k, v, beta, decay, s, scale, states if kept else None), states


def _compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    s: Tensor | None,
    scale: float,
    states: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y and the state after the call; the states within it are written to `states`, if it is not None."""
    q, k, v, beta, decay, s = _ready(q, k, v, beta, decay, s)
    b, _, h, m = v.shape
    y, end = v.new_empty(v.shape), v.new_empty(b, h, q.shape[-1], m, dtype=torch.float32)
    call = CALL.pack(
        *_sizes(q, v, decay), *address(q), *address(k), *address(v), *address(y), *_gates(decay), *_gates(beta),
        *pointers(s, end, states), *_NO_BACKWARD,
    )  # fmt: skip
    _run(False, call, scale)
    return y, end


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    decay: Tensor | None,
    s: Tensor | None,
    scale: float,
    states: Tensor,
    gy: Tensor,
    gs: Tensor | None,
    starts: bool = True,
) -> Gradients:
    """The gradients of the six tensors; starts: whether that of s is wanted."""
    q, k, v, beta, decay, s = _ready(q, k, v, beta, decay, s)
    gy, gs = dense(gy), gs if gs is None else gs.contiguous()
    # The kernel adds up what a part's heads give to the key head that they share.
    wide, parts = torch.float32 if q.shape[2] < v.shape[2] else q.dtype, _parts(q, v)
    dq, dk = q.new_empty(parts, *q.shape, dtype=wide), k.new_empty(parts, *k.shape, dtype=wide)
    dv = v.new_empty(v.shape)
    dbeta, ddecay, ds = (x if x is None else x.new_empty(x.shape) for x in (beta, decay, s if starts else None))
    call = CALL.pack(
        *_sizes(q, v, decay), *address(q), *address(k), *address(v), *_NO_ROWS, *_gates(decay), *_gates(beta),
        *pointers(s, None, states), parts, *address(gy), *address(dq[0]), *address(dk[0]), *address(dv),
        *pointers(ddecay, dbeta, gs, ds),
    )  # fmt: skip
    _run(True, call, scale)
    dq, dk = (x[0] if parts == 1 else x.sum(0) for x in (dq, dk))
    return dq.to(q.dtype), dk.to(k.dtype), dv, dbeta, ddecay, ds


def _run(backward: bool, call: bytes, scale: float) -> None:
    loaded = loaded_kernels()
    if loaded.mnemos_delta(kernels.variant(loaded), backward, call, scale):
        raise MemoryError("delta_rule: not enough memory for its states; use fewer rows or a smaller head width")


class _Eager(torch.autograd.Function):
    """The operator without the dispatcher, whose overhead is the time of many tokens."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, beta, decay, s, ctx.scale = inputs
        y, end, states = _forward(q, k, v, beta, decay, s, ctx.scale, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, beta, decay, s, states)
        return y, end

    @staticmethod
    @differentiable_once(name_of)
    def backward(ctx: Any, saved: tuple[Any, ...], gy: Tensor | None, gs: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, states = saved
        if gy is None:
            gy = tensors[2].new_zeros(tensors[2].shape)
        if eager(gy, gs):
            q, k, v, beta, decay, s = tensors
            found = _backward(q, k, v, beta, decay, s, ctx.scale, states, gy, gs, ctx.needs_input_grad[5])
            return *found, None
        return *present(tensors, torch.ops.mnemos.delta_rule_backward(*tensors, ctx.scale, states, gy, gs)), None


def _like_results(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, *_, kept = inputs
    b, _, h, m = v.shape
    end = v.new_empty(b, h, q.shape[-1], m, dtype=torch.float32)
    return v.new_empty(v.shape), end, _states(v, q.shape[-1], kept)


def _like_gradients(*inputs: Any) -> tuple[Tensor, ...]:
    q = inputs[0]
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:6])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gy: Tensor | None, gs: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    *tensors, states = ctx.saved_tensors
    gy = tensors[2].new_zeros(tensors[2].shape) if gy is None else gy
    return *present(tensors, torch.ops.mnemos.delta_rule_backward(*tensors, ctx.scale, states, gy, gs)), None, None


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? decay, Tensor? s, float scale"
register_pair(
    "delta_rule",
    (
        f"({_TENSORS}, bool kept) -> (Tensor, Tensor, Tensor)",
        f"({_TENSORS}, Tensor states, Tensor gy, Tensor? gs) -> ({', '.join(['Tensor'] * 6)})",
    ),
    (_forward, _backward),
    (_like_results, _like_gradients),
    _gradients,
    _save,
    name_of,
)
