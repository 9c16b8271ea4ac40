"""The delta rule and decayed attention on the CPU, in C++ (native/delta/delta.cpp), forward and backward.

The forward keeps the inputs and the state before every `_keep(M)`-th token, which is at most two numbers a token and
channel; the backward computes what is between two of these states again. Inputs have any strides and are float32,
bfloat16 or float16; all sums, gates and states are float32. Heads of values that share a key head read its queries and
keys where they lie, and their gradients are added up in the kernel.
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
    "delta_rule",
    "delta",
    "Delta",
    "B T heads H D M type threads channels keep q:4 k:4 v:4 y:4 decay:4 beta:4 s s_end states parts g:4 dq:4 dk:4 dv:4 "
    "d_decay d_beta gs ds",
)
UNITS = 8  # of the backward, if there are as many heads; never the number of threads, on which no result may depend


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
    y, end = _operator(q, k, v, beta, decay, s, scale)
    return y if y.dtype is wanted else y.to(wanted), end


def _keep(m: int) -> int:
    """Tokens between two states that are kept: a multiple of the kernels' chunks."""
    return max(64, (m + 127) // 128 * 64)


def _sizes(q: Tensor, v: Tensor, decay: Tensor | None) -> tuple[int, ...]:
    (b, t, shared, d), (h, m) = q.shape, v.shape[2:]
    channels = decay is not None and decay.dim() == 4
    return b, t, shared, h, d, m, TYPES[v.dtype], torch.get_num_threads(), channels, _keep(m)


def _allocate(keeps: bool, *inputs: Any) -> Outputs:
    """y, the state after the call, and room for the states that the backward begins with but for a row's first."""
    q, _, v, *_ = inputs
    (b, t, h, m), d = v.shape, q.shape[-1]
    states = v.new_empty(b, h, (max(t, 1) - 1) // _keep(m), d, m, dtype=torch.float32) if keeps else None
    return v.new_empty(v.shape), v.new_empty(b, h, d, m, dtype=torch.float32), states


def _forward(keeps: bool, *inputs: Any) -> Outputs:
    q, k, v, beta, decay, s, scale = inputs
    y, end, states = outputs = _allocate(keeps, *inputs)
    KERNEL((False,), (*_sizes(q, v, decay), q, k, v, y, decay, beta, s, end, states), scale)
    return outputs


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    q, k, v, beta, decay, s, scale, states, gy, gs = inputs
    gy = v.new_zeros(v.shape) if gy is None else gy
    # Few rows and key heads would leave threads idle, so the value heads of a key head are divided into parts. The
    # kernel adds up what a part's heads give to the key head that they share.
    (b, _, shared, _), h = q.shape, v.shape[2]
    parts = max(1, min(h // shared, -(-UNITS // max(1, b * shared))))
    wide = torch.float32 if shared < h else q.dtype
    dq, dk = q.new_empty(parts, *q.shape, dtype=wide), k.new_empty(parts, *k.shape, dtype=wide)
    dv = v.new_empty(v.shape)
    dbeta, ddecay, ds = [x if x is None else x.new_empty(x.shape) for x in (beta, decay, s if needs[5] else None)]
    read = *_sizes(q, v, decay), q, k, v, None, decay, beta, s, None, states
    KERNEL((True,), (*read, parts, gy, dq[0], dk[0], dv, ddecay, dbeta, gs, ds), scale)
    dq, dk = [x[0] if parts == 1 else x.sum(0) for x in (dq, dk)]
    return dq.to(q.dtype), dk.to(k.dtype), dv, dbeta, ddecay, ds


_operator = kernel_operator(
    "delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? decay, Tensor? s, float scale",
    _allocate,
    _forward,
    _backward,
    chunked.recurrence,
    results=2,
    gradients=6,
    saves=[2],
    name_of=chunked.name_of,
)
