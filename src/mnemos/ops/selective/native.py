"""The selective scan on the CPU, in C++ (native/selective/selective.cpp), forward and backward.

The forward keeps the inputs and the state before every KEEP-th token; the backward computes what is between two of
these states again. x is float32, bfloat16 or float16; all others, all sums and states are float32. Padding and resets
are read where they are given: nothing is copied for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.native.codes import TYPES
from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import (
    Outputs,
    contiguous,
    dense,
    kernel_operator,
    mask_address,
    pointers,
    rows,
)

CALL = kernels.layout(
    "Selective",
    "B T C N type threads keep x:4 dt:4 write:4 read:4 y:4 a skip valid:3 resets:3 s s_end states g:4 dx:4 "
    "d_dt d_a d_write d_read d_skip gs ds",
)
KEEP = 32  # tokens between two states that are kept
GROUP = 128  # of selective.cpp
_NO_BACKWARD = (0,) * 15


def takes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether x is float32, bfloat16 or float16 on the CPU, and none of the others float64."""
    return x.device.type == "cpu" and all([z.dtype in TYPES for z in (x, dt, A, B, C)])


def _allocate(kept: bool, *inputs: Any) -> Outputs:
    """y, the state after the call, and room for the states that the backward begins with but for a row's first."""
    x, _, A, *_ = inputs
    (b, t, c), n = x.shape, A.shape[1]
    states = x.new_empty(b, (max(t, 1) - 1) // KEEP, -(-c // GROUP), n, GROUP, dtype=torch.float32) if kept else None
    return x.new_empty(x.shape), x.new_empty(b, c, n, dtype=torch.float32), states


def _forward(outputs: Outputs, *inputs: Any) -> None:
    y: Any
    (y, end, states), (x, dt, A, B, C, D, s, mask, resets) = outputs, _ready(inputs)
    call = CALL.pack(
        *_sizes(x, A), *rows(x, dt, B, C, y), *pointers(A, D),
        *mask_address(mask), *mask_address(resets), *pointers(s, end, states), *_NO_BACKWARD,
    )  # fmt: skip
    _run(False, call)


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    x, dt, A, B, C, D, s, mask, resets = _ready(inputs)
    states, gy, gs = inputs[9:]
    (gy,), (gs,) = dense(x.new_zeros(x.shape) if gy is None else gy), contiguous(gs)
    dx, steps = x.new_empty(x.shape), dt.new_empty(dt.shape)
    writes, reads = [z.new_empty(z.shape) if len(A) else z.new_zeros(z.shape) for z in (B, C)]
    rates, skip = A.new_zeros(A.shape), A.new_zeros(len(A))  # without rows or channels nothing is written
    ds = None if s is None else s.new_empty(s.shape)
    call = CALL.pack(
        *_sizes(x, A), *rows(x, dt, B, C, None), *pointers(A, D),
        *mask_address(mask), *mask_address(resets), *pointers(s, None, states), *rows(gy, dx),
        *pointers(steps, rates, writes, reads, skip, gs, ds),
    )  # fmt: skip
    _run(True, call)
    return dx, steps, rates, writes, reads, None if D is None else skip, ds


def _ready(inputs: Sequence[Any]) -> list[Any]:
    """The tensors as the kernels read them."""
    x, dt, A, B, C, D, s, mask, resets = inputs[:9]
    A, D, s = contiguous(A, D, s)
    x, dt, B, C = dense(x, dt, B, C)
    return [x, dt, A, B, C, D, s, mask, resets]


def _sizes(x: Tensor, A: Tensor) -> tuple[int, ...]:
    return *x.shape, A.shape[1], TYPES[x.dtype], torch.get_num_threads(), KEEP


def _run(backward: bool, call: bytes) -> None:
    loaded, instructions = kernels.load_kernels()
    if loaded.mnemos_selective(instructions, backward, call):
        raise MemoryError("selective_scan: not enough memory for its buffers; use fewer rows or channels")


# Cost: B·T·C·N exponentials and 3 multiply-adds each, with gradients twice the exponentials and about 14; on
# `torch.get_num_threads()` threads, of which each takes GROUP channels of a row.
scan = kernel_operator(
    "selective_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? s, Tensor? mask, Tensor? resets",
    _allocate,
    _forward,
    _backward,
    results=2,
    gradients=7,
    saves=[2],
)
