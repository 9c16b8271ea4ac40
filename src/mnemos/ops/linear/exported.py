"""Causal linear attention in exported programs: plain operators for any number of tokens, or ONNX Runtime's kernel.

The sums are those of chunked.py, with all chunks of a call side by side: O(T·(C + D')·M) time and O(T·D'·M/C) memory.
ONNX has an operator LinearAttention (from opset 27), which ONNX Runtime 1.32 runs as the function that defines it, a
loop over tokens; its kernel has the name com.microsoft.LinearAttention. Neither has the normaliser: it is computed
apart, from a running sum of the keys.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.rotary import rotate

from .feature_maps import Pointwise, valid

Form = Literal["operators", "onnxruntime"]
CHUNK = 64

_form: Form | None = None


@contextlib.contextmanager
def exporting(form: Form) -> Iterator[None]:
    """Inside, programs that `torch.export` makes have linear attention in this form, and not this library's kernels."""
    global _form
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def active() -> bool:
    """Whether a program is being exported inside `exporting`."""
    return _form is not None and torch.compiler.is_exporting()


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z."""
    wanted, (q, k, v) = v.dtype, (x.to(s.dtype) for x in (q, k, v))
    if phi is not None:
        q, k = phi(q), phi(valid(k, mask))
    k, v = valid(k, mask), valid(v, mask)
    y, s, z = (_kernel if _form == "onnxruntime" else _chunks)(q, k, v, s, z, eps)
    return y.to(wanted), s, z


def token(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`causal` for T = 1, in few operators: their number is most of what a runtime's step costs beside reading weights.

    ONNX Runtime's kernel is slower here, because its operands and its result have other shapes than their neighbours.
    """
    wanted, (q, k, v) = v.dtype, (x.to(s.dtype) for x in (q, k, v))
    if phi is not None:
        q, k = phi(q), phi(valid(k, mask))
    k, v = valid(k, mask), valid(v, mask)
    b, _, h, m = v.shape
    q, k = q.reshape(b, h, 1, -1), k.reshape(b, h, -1)
    s, z = s + k[..., None] * v.reshape(b, h, 1, m), z + k
    y = (q @ s) / (q @ z[..., None] + eps)
    return y.reshape(b, 1, h, m).to(wanted), s, z


def projected(qkv: Tensor, heads: int, phi: Pointwise, turns: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """φ(q), φ(k) and v [B, T, H, D] of qkv [B, T, 3·H·D]: queries and keys together, which takes half the operators.

    turns: rotations of queries and keys before φ (`mnemos.ops.rotary`), or None.
    """
    qk, v = qkv.split([2 * qkv.shape[2] // 3, qkv.shape[2] // 3], 2)
    if turns is not None:
        q, k = phi(rotate(qk.unflatten(2, (2 * heads, -1)), turns)).chunk(2, 2)
        return q, k, v.unflatten(2, (heads, -1))
    q, k = phi(qk).chunk(2, 2)
    return q.unflatten(2, (heads, -1)), k.unflatten(2, (heads, -1)), v.unflatten(2, (heads, -1))


def _chunks(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    t, m = q.shape[1], v.shape[3]
    n = (t + 2 * CHUNK - 1) // CHUNK  # with one of padding: a program that has one chunk at least is of one form
    v = F.pad(v, (0, 1), value=1.0)  # the values' last column of ones sums the keys: the normaliser
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, n * CHUNK - t)).unflatten(1, (n, CHUNK)).transpose(2, 3) for x in (q, k, v))
    before = torch.cat([s, z[..., None]], -1)[:, None]  # [B, 1, H, D, M + 1]
    sums = torch.cat([before, k.mT @ v], 1).cumsum(1)
    y = torch.tril(q @ k.mT) @ v + q @ sums[:, :-1]
    y = (y[..., :m] / (y[..., m:] + eps)).transpose(2, 3).flatten(1, 2)
    y = y.index_select(1, torch.arange(t, device=y.device))  # a slice would have to know that there are as many
    return y, sums[:, -1, ..., :m], sums[:, -1, ..., m]


def _kernel(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    b, t, h, m = v.shape
    y, s = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (*(x.flatten(2) for x in (q, k, v)), s),
        {"q_num_heads": h, "kv_num_heads": h, "update_rule": "linear", "scale": 1.0},
        dtypes=(v.dtype, s.dtype),
        shapes=((b, t, h * m), s.shape),
        version=1,
    )
    sums = z[:, None] + k.cumsum(1)
    den = (q * sums).sum(-1, keepdim=True) + eps
    return y.unflatten(2, (h, m)) / den, s, sums[:, -1]
