"""The selective scan on the CPU, in C++ (native/selective/selective.cpp), forward and backward.

The forward keeps the inputs and the state before every KEEP-th token; the backward computes what is between two of
these states again. x is float32, bfloat16 or float16; all others, all sums and states are float32. Padding and resets
are read where they are given: nothing is copied for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos.native.codes import TYPES
from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import Kernel, Outputs, kernel_operator

from . import chunked

KERNEL = Kernel(
    "selective_scan",
    "selective",
    "Selective",
    "B T C N type threads keep x:4 dt:4 write:4 read:4 y:4 a skip valid:3 resets:3 s s_end states g:4 dx:4 "
    "d_dt d_a d_write d_read d_skip gs ds",
)
KEEP = 32  # tokens between two states that are kept
GROUP = 128  # of selective.cpp


def takes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> bool:
    """Whether x is float32, bfloat16 or float16 on the CPU, and none of the others float64."""
    return x.device.type == "cpu" and all([z.dtype in TYPES for z in (x, dt, A, B, C)])


def _sizes(x: Tensor, A: Tensor) -> tuple[int, ...]:
    return *x.shape, A.shape[1], TYPES[x.dtype], torch.get_num_threads(), KEEP


def _allocate(keeps: bool, *inputs: Any) -> Outputs:
    """y, the state after the call, and room for the states that the backward begins with but for a row's first."""
    x, _, A, *_ = inputs
    (b, t, c), n = x.shape, A.shape[1]
    states = x.new_empty(b, (max(t, 1) - 1) // KEEP, -(-c // GROUP), n, GROUP, dtype=torch.float32) if keeps else None
    return x.new_empty(x.shape), x.new_empty(b, c, n, dtype=torch.float32), states


def _forward(keeps: bool, *inputs: Any) -> Outputs:
    x, dt, A, B, C, D, s, mask, resets = inputs
    y, end, states = outputs = _allocate(keeps, *inputs)
    KERNEL((False,), (*_sizes(x, A), x, dt, B, C, y, A, D, mask, resets, s, end, states))
    return outputs


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    x, dt, A, B, C, D, s, mask, resets, states, gy, gs = inputs
    gy = x.new_zeros(x.shape) if gy is None else gy
    dx, steps = x.new_empty(x.shape), dt.new_empty(dt.shape)
    writes, reads = [z.new_empty(z.shape) if len(A) else z.new_zeros(z.shape) for z in (B, C)]
    rates, skip = A.new_zeros(A.shape), A.new_zeros(len(A))  # without rows or channels nothing is written
    ds = None if s is None else s.new_empty(s.shape)
    read = *_sizes(x, A), x, dt, B, C, None, A, D, mask, resets, s, None, states
    KERNEL((True,), (*read, gy, dx, steps, rates, writes, reads, skip, gs, ds))
    return dx, steps, rates, writes, reads, None if D is None else skip, ds


# Cost: B·T·C·N exponentials and 3 multiply-adds each, with gradients twice the exponentials and about 14; on
# `torch.get_num_threads()` threads, of which each takes GROUP channels of a row.
scan = kernel_operator(
    "selective_scan",
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? s, Tensor? mask, Tensor? resets",
    _allocate,
    _forward,
    _backward,
    chunked.scan,
    results=2,
    gradients=7,
    saves=[2],
)
