"""Softmax attention on the CPU, in C++ (native/softmax/), forward and backward.

The forward keeps its output, the logarithm of each query's sum and its largest score, which are results too
(`attend`); the backward computes the weights again, a block of
queries and keys after the other. Query heads that share a key head read its keys and values where they lie, and their
gradients are added up in the kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.backward import Gradients
from mnemos.ops.kernel_call import Kernel, Outputs, kernel_operator

KERNEL = Kernel(
    "softmax_attention",
    "softmax",
    "Softmax",
    "B T S heads H D M threads causal window q:4 k:4 v:4 y:4 valid:3 lse top parts glse gtop g:4 dq:4 dk:4 dv:4",
)
# Units of work that the backward is divided into at least, if there are as many query heads. A constant, and not the
# number of threads, because no result may depend on that.
UNITS = 8


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether all tensors are float32 on the CPU, and heads are not empty."""
    typed = q.dtype is k.dtype is v.dtype is torch.float32
    return typed and v.device.type == "cpu" and q.shape[-1] > 0 and v.shape[-1] > 0


def _sizes(q: Tensor, v: Tensor, causal: bool, window: int) -> tuple[int, ...]:
    (b, t, h, d), (_, s, shared, m) = q.shape, v.shape
    return b, t, s, shared, h, d, m, torch.get_num_threads(), causal, window


def _allocate(kept: bool, *inputs: Any) -> Outputs:
    """y, the logarithms of the sums [B, H, T], and the largest scores [B, H, T]."""
    q, _, v, *_ = inputs
    b, t, h, _ = q.shape
    return q.new_empty(b, t, h, v.shape[-1]), q.new_empty(b, h, t), q.new_empty(b, h, t)


def _forward(kept: bool, *inputs: Any) -> Outputs:
    q, k, v, mask, causal, window, scale = inputs
    outputs = _allocate(kept, *inputs)
    KERNEL((False,), (*_sizes(q, v, causal, window), q, k, v, outputs[0], mask, *outputs[1:]), scale)
    return outputs


def _backward(needs: Sequence[bool], *inputs: Any) -> Gradients:
    q, k, v, mask, causal, window, scale, y, lse, top, gy, glse, gtop = inputs
    gy = y.new_zeros(y.shape) if gy is None else gy
    # Few rows and key heads would leave threads idle, so the query heads of a key head are divided into parts.
    b, _, shared, _ = k.shape
    parts = max(1, min(q.shape[2] // shared, -(-UNITS // max(1, b * shared))))
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(parts, *k.shape), v.new_empty(parts, *v.shape)
    values = *_sizes(q, v, causal, window), q, k, v, y, mask, lse, top
    KERNEL((True,), (*values, parts, glse, gtop, gy, dq, dk[0], dv[0]), scale)
    dk, dv = [x[0] if parts == 1 else x.sum(0) for x in (dk, dv)]
    return dq, dk, dv


def _in_pytorch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By PyTorch's kernel, with a mask that has an entry for every query and key."""
    t, s = q.shape[1], k.shape[1]
    last = torch.arange(s - t, s, device=q.device)[:, None] if causal else s
    key = torch.arange(s, device=q.device)
    visible = (key <= last) & (key > last - window if window else key >= 0)
    visible = visible.expand(1, 1, t, s) if mask is None else visible & mask[:, None, None]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    scores = (scale * q @ k.mT).masked_fill(~visible, -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, visible, scale=scale).transpose(1, 2)
    return y, scores.logsumexp(-1), scores.amax(-1)


attend = kernel_operator(
    "softmax_attention",
    "Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, int window, float scale",
    _allocate,
    _forward,
    _backward,
    _in_pytorch,
    results=3,
    gradients=3,
    saves=[0, 1, 2],
)
