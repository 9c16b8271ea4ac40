"""Softmax attention on the CPU, in C++ (native/softmax/), forward and backward.

The forward keeps its output and the logarithm of each query's sum; the backward computes the weights again, a block of
queries and keys after the other. Query heads that share a key head read its keys and values where they lie, and their
gradients are added up in the kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import Outputs, dense, kernel_operator, mask_address, pointers, rows

CALL = kernels.layout(
    "Softmax", "B T S heads H D M threads causal window q:4 k:4 v:4 y:4 valid:3 lse parts g:4 dq:4 dk:4 dv:4"
)
UNITS = 8  # of the backward, if there are as many heads; never the number of threads, on which no result may depend
_NO_BACKWARD = (0,) * 17


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all tensors are float32 on the CPU, and heads are not empty."""
    typed = q.dtype is k.dtype is v.dtype is torch.float32
    return typed and v.device.type == "cpu" and q.shape[-1] > 0 and v.shape[-1] > 0


def _allocate(kept: bool, *inputs: Any) -> Outputs:
    """y, and the logarithms of the sums [B, H, T]."""
    q, _, v, *_ = inputs
    (b, t, h, _), m = q.shape, v.shape[-1]
    return q.new_empty(b, t, h, m), q.new_empty(b, h, t) if kept else None


def _forward(outputs: Outputs, *inputs: Any) -> None:
    (y, lse), (q, k, v, mask, causal, window, scale) = outputs, inputs
    q, k, v = dense(q, k, v)
    call = CALL.pack(
        *_sizes(q, v, causal, window), *rows(q, k, v, y), *mask_address(mask), *pointers(lse), *_NO_BACKWARD
    )
    _run(False, call, scale)


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    q, k, v, mask, causal, window, scale, y, lse, gy = inputs
    gy = y.new_zeros(y.shape) if gy is None else gy
    q, k, v, y, gy = dense(q, k, v, y, gy)
    # Few rows and key heads would leave threads idle, so the query heads of a key head are divided into parts.
    b, _, shared, _ = k.shape
    parts = max(1, min(q.shape[2] // shared, -(-UNITS // max(1, b * shared))))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(parts, *k.shape), v.new_empty(parts, *v.shape)
    call = CALL.pack(
        *_sizes(q, v, causal, window), *rows(q, k, v, y), *mask_address(mask), *pointers(lse), parts,
        *rows(gy, dq, dk[0], dv[0]),
    )  # fmt: skip
    _run(True, call, scale)
    dk, dv = [x[0] if parts == 1 else x.sum(0) for x in (dk, dv)]
    return dq, dk, dv


def _sizes(q: Tensor, v: Tensor, causal: bool, window: int) -> tuple[int, ...]:
    (b, t, h, d), (_, s, shared, m) = q.shape, v.shape
    return b, t, s, shared, h, d, m, torch.get_num_threads(), causal, window


def _run(backward: bool, call: bytes, scale: float) -> None:
    loaded, instructions = kernels.load_kernels()
    if loaded.mnemos_softmax(instructions, backward, call, scale):
        raise MemoryError("softmax_attention: not enough memory for its buffers; use fewer tokens or heads")


attend = kernel_operator(
    "softmax_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, int window, float scale",
    _allocate,
    _forward,
    _backward,
    results=1,
    gradients=3,
    saves=[0, 1],
)
