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

from mnemos import native as kernels
from mnemos.native.codes import TYPES
from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import Outputs, dense, kernel_operator, pointers, rows

from .chunked import name_of

CALL = kernels.layout(
    "Delta",
    "B T heads H D M type threads channels keep q:4 k:4 v:4 y:4 decay:4 beta:4 s s_end states parts g:4 dq:4 dk:4 dv:4 "
    "d_decay d_beta gs ds",
)
UNITS = 8  # of the backward, if there are as many heads; never the number of threads, on which no result may depend
_NO_BACKWARD, _NO_GATES = (0,) * 21, (0,) * 4


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


def _allocate(kept: bool, *inputs: Any) -> Outputs:
    """y, the state after the call, and room for the states that the backward begins with but for a row's first."""
    q, _, v, *_ = inputs
    (b, t, h, m), d = v.shape, q.shape[-1]
    states = v.new_empty(b, h, (max(t, 1) - 1) // _keep(m), d, m, dtype=torch.float32) if kept else None
    return v.new_empty(v.shape), v.new_empty(b, h, d, m, dtype=torch.float32), states


def _forward(outputs: Outputs, *inputs: Any) -> None:
    y: Any
    y, end, states = outputs
    q, k, v, beta, decay, s, scale = inputs
    q, k, v, decay, s = _ready(q, k, v, decay, s)
    call = CALL.pack(
        *_sizes(q, v, decay), *rows(q, k, v, y), *_gates(decay), *_gates(beta),
        *pointers(s, end, states), *_NO_BACKWARD,
    )  # fmt: skip
    _run(False, call, scale)


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    q, k, v, beta, decay, s, scale, states, gy, gs = inputs
    q, k, v, decay, s = _ready(q, k, v, decay, s)
    (gy,) = dense(v.new_zeros(v.shape) if gy is None else gy)
    gs = gs if gs is None else gs.contiguous()
    # Few rows and key heads would leave threads idle, so the value heads of a key head are divided into parts. The
    # kernel adds up what a part's heads give to the key head that they share.
    (b, _, shared, _), h = q.shape, v.shape[2]
    parts = max(1, min(h // shared, -(-UNITS // max(1, b * shared))))
    wide = torch.float32 if shared < h else q.dtype
    dq, dk = q.new_empty(parts, *q.shape, dtype=wide), k.new_empty(parts, *k.shape, dtype=wide)
    dv = v.new_empty(v.shape)
    dbeta, ddecay, ds = [x if x is None else x.new_empty(x.shape) for x in (beta, decay, s if needs[5] else None)]
    call = CALL.pack(
        *_sizes(q, v, decay), *rows(q, k, v, None), *_gates(decay), *_gates(beta),
        *pointers(s, None, states), parts, *rows(gy, dq[0], dk[0], dv),
        *pointers(ddecay, dbeta, gs, ds),
    )  # fmt: skip
    _run(True, call, scale)
    dq, dk = [x[0] if parts == 1 else x.sum(0) for x in (dq, dk)]
    return dq.to(q.dtype), dk.to(k.dtype), dv, dbeta, ddecay, ds


def _ready(q: Tensor, k: Tensor, v: Tensor, decay: Any, s: Any) -> tuple[Any, ...]:
    """The tensors as the kernels read them."""
    channels = decay is not None and decay.dim() == 4
    q, k, v, dense_decay = dense(q, k, v, decay if channels else None)
    return q, k, v, dense_decay if channels else decay, s if s is None else s.contiguous()


def _sizes(q: Tensor, v: Tensor, decay: Tensor | None) -> tuple[int, ...]:
    (b, t, shared, d), (h, m) = q.shape, v.shape[2:]
    channels = decay is not None and decay.dim() == 4
    return b, t, shared, h, d, m, TYPES[v.dtype], torch.get_num_threads(), channels, _keep(m)


def _gates(x: Tensor | None) -> tuple[int, ...]:
    return _NO_GATES if x is None else (x.data_ptr(), *x.stride()[:3])


def _run(backward: bool, call: bytes, scale: float) -> None:
    loaded, instructions = kernels.load_kernels()
    if loaded.mnemos_delta(instructions, backward, call, scale):
        raise MemoryError("delta_rule: not enough memory for its states; use fewer rows or a smaller head width")


_operator = kernel_operator(
    "delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? decay, Tensor? s, float scale",
    _allocate,
    _forward,
    _backward,
    results=2,
    gradients=6,
    saves=[2],
    name_of=name_of,
)
