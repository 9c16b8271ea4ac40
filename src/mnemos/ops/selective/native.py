"""The selective scan on the CPU, in C++ (native/selective.cpp), forward and backward.

The forward keeps the inputs and the state before every KEEP-th token; the backward computes what is between two of
these states again. x is float32, bfloat16 or float16; all others, all sums and states are float32. Padding and resets
are read where they are given: nothing is copied for them.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native import why_not
from mnemos.native.codes import TYPES
from mnemos.ops.kernel_call import (
    dense,
    eager,
    loaded_kernels,
    mask_address,
    pointers,
    present,
    register_pair,
    runs_here,
)
from mnemos.ops.once import differentiable_once

__all__ = ["runs_here", "scan", "takes", "why_not"]

CALL = struct.Struct("53q")  # `struct Selective` of native/selective.h
KEEP = 32  # tokens between two states that are kept
GROUP = 128  # of selective.cpp
_NO_BACKWARD, _NO_ROWS = (0,) * 15, (0,) * 4


def takes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether x is float32, bfloat16 or float16 on the CPU, and none of the others float64."""
    return x.device.type == "cpu" and all([z.dtype in TYPES for z in (x, dt, A, B, C)])


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    s: Tensor | None,
    mask: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """x, dt [B, T, C], A [C, N], B, C [B, T, N], D [C], s [B, C, N], mask, resets [B, T] -> y, s.

    Cost: B·T·C·N exponentials and 3 multiply-adds each, with gradients twice the exponentials and about 14; on
    `torch.get_num_threads()` threads, of which each takes GROUP channels of a row.
    """
    tensors = x, dt, A, B, C, D, s, mask, resets
    kept = torch.is_grad_enabled() and any([z is not None and z.requires_grad for z in tensors])
    if not eager(*tensors):
        y, end, _ = torch.ops.mnemos.selective_scan(*tensors, kept)
    elif kept:
        y, end = _Eager.apply(*tensors)
    else:
        y, end = _compute(tensors, None)
    return y, end


def _rows(x: Tensor) -> tuple[int, int, int, int]:
    """`struct Rows` of native/call.h for x [B, T, ·]."""
    b, t, _ = x.stride()
    return x.data_ptr(), b, t, 0


def _ready(tensors: Any) -> Any:
    """The tensors as the kernel reads them."""
    x, dt, A, B, C, D, s, mask, resets = tensors
    A, D, s = (z if z is None else z.contiguous() for z in (A, D, s))
    return dense(x), dense(dt), A, dense(B), dense(C), D, s, mask, resets


def _begin(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[int, ...]:
    """The fields of the call up to y."""
    sizes = *x.shape, A.shape[1], TYPES[x.dtype], torch.get_num_threads(), KEEP
    return *sizes, *_rows(x), *_rows(dt), *_rows(B), *_rows(C)


def _states(x: Tensor, A: Tensor, kept: bool) -> Tensor:
    """Empty room for the states that the backward begins with; the first of a row is its input."""
    b, t, c = x.shape
    count = (max(t, 1) - 1) // KEEP if kept else 0
    return x.new_empty(b, count, -(-c // GROUP), A.shape[1], GROUP, dtype=torch.float32)


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Of the tensors of `scan`, and whether the states are kept: y, the state after the call, and those within it."""
    *tensors, kept = inputs
    states = _states(tensors[0], tensors[2], kept)
    return *_compute(tensors, states if kept else None), states


def _compute(tensors: Any, states: Tensor | None) -> tuple[Tensor, Tensor]:
    """y and the state after the call; the states within it are written to `states`, if it is not None."""
    x, dt, A, B, C, D, s, mask, resets = _ready(tensors)
    y, end = x.new_empty(x.shape), x.new_empty(len(x), *A.shape, dtype=torch.float32)
    call = CALL.pack(
        *_begin(x, dt, A, B, C), *_rows(y), *pointers(A, D), *mask_address(mask), *mask_address(resets),
        *pointers(s, end, states), *_NO_BACKWARD,
    )  # fmt: skip
    _run(False, call)
    return y, end


def _backward(*inputs: Any) -> tuple[Tensor | None, ...]:
    """The gradients of x, dt, A, B, C, D and s, from the tensors of `scan`, the states kept, and those of y and end."""
    *tensors, states, gy, gs = inputs
    x, dt, A, B, C, D, s, mask, resets = _ready(tensors)
    gy, gs = dense(gy), gs if gs is None else gs.contiguous()
    dx, steps = x.new_empty(x.shape), dt.new_empty(dt.shape)
    writes, reads = (z.new_empty(z.shape) if len(A) else torch.zeros_like(z) for z in (B, C))
    rates, skip = torch.zeros_like(A), A.new_zeros(len(A))  # without rows or channels nothing is written
    ds = None if s is None else s.new_empty(s.shape)
    call = CALL.pack(
        *_begin(x, dt, A, B, C), *_NO_ROWS, *pointers(A, D), *mask_address(mask), *mask_address(resets),
        *pointers(s, None, states), *_rows(gy), *_rows(dx), *pointers(steps, rates, writes, reads, skip, gs, ds),
    )  # fmt: skip
    _run(True, call)
    return dx, steps, rates, writes, reads, None if D is None else skip, ds


def _run(backward: bool, call: bytes) -> None:
    loaded = loaded_kernels()
    if loaded.mnemos_selective(kernels.variant(loaded), backward, call):
        raise MemoryError("selective_scan: not enough memory for its buffers; use fewer rows or channels")


class _Eager(torch.autograd.Function):
    """The operator without the dispatcher, whose overhead is the time of many tokens."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> tuple[Tensor, Tensor]:
        y, end, states = _forward(*tensors, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, states)
        return y, end

    @staticmethod
    @differentiable_once("selective_scan")
    def backward(ctx: Any, saved: tuple[Any, ...], gy: Tensor | None, gs: Tensor | None) -> tuple[Tensor | None, ...]:
        gy = saved[0].new_zeros(saved[0].shape) if gy is None else gy
        if eager(gy, gs):
            return *_backward(*saved, gy, gs), None, None
        return *present(saved[:7], torch.ops.mnemos.selective_scan_backward(*saved, gy, gs)), None, None


def _like_results(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    x, A, kept = inputs[0], inputs[2], inputs[-1]
    end = x.new_empty(len(x), *A.shape, dtype=torch.float32)
    return x.new_empty(x.shape), end, _states(x, A, kept)


def _like_gradients(*inputs: Any) -> tuple[Tensor, ...]:
    return tuple(inputs[0].new_empty(0) if z is None else z.new_empty(z.shape) for z in inputs[:7])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9], output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gy: Tensor | None, gs: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    gy = saved[0].new_zeros(saved[0].shape) if gy is None else gy
    return *present(saved[:7], torch.ops.mnemos.selective_scan_backward(*saved, gy, gs)), None, None, None


_TENSORS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? s, Tensor? mask, Tensor? resets"
register_pair(
    "selective_scan",
    (
        f"({_TENSORS}, bool kept) -> (Tensor, Tensor, Tensor)",
        f"({_TENSORS}, Tensor states, Tensor gy, Tensor? gs) -> ({', '.join(['Tensor'] * 7)})",
    ),
    (_forward, _backward),
    (_like_results, _like_gradients),
    _gradients,
    _save,
)
