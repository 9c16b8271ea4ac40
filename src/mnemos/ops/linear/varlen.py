"""Causal linear attention of concatenated sequences of different lengths, without padding."""

import torch
from torch import Tensor

from mnemos._compat import forward_differentiated, transformed
from mnemos.ops.precision import full_precision
from mnemos.types import InputError

from . import BACKENDS, LinearState, choose, linear_attention
from .feature_maps import FeatureMap, Pointwise, find

__all__ = ["linear_attention_varlen"]


def linear_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    feature_map: str | FeatureMap = "elu",
    state: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> tuple[Tensor, LinearState]:
    """`linear_attention(causal=True)` of N concatenated sequences, and their states.

    q, k [total, H, D], v [total, H, M]: the tokens of all sequences. offsets [N + 1] integers: sequence n has tokens
    offsets[n] to offsets[n + 1] - 1. So the first offset is 0, the last is total, and they do not decrease; a sequence
    may be empty. y [total, H, M] in v's dtype. state: s [N, H, D', M] and z [N, H, D'] before each sequence, never
    changed; None: zeros. The returned state has the same shapes.

    Cost: O(total·H·D'·M), for any lengths. The sequences run one after another; with backend="triton" one kernel
    computes all of them, with one program per sequence and head, so the longest sequence determines the time.
    Offsets on the CPU are checked. Those on a GPU are not, because reading them would wait for the GPU: in the kernel
    wrong offsets give wrong outputs, but never access memory outside the tensors.
    Raises InputError as `linear_attention` does, and for offsets that do not fit.
    """
    _check(q, k, v, offsets)
    phi = find(feature_map)
    if not isinstance(phi, Pointwise):
        q, k = phi(q), phi(k)
    (_, h, d), m, n = k.shape, v.shape[-1], len(offsets) - 1
    if state is not None and len(state) != 2:
        raise InputError(
            f"expected a state of two tensors, s and z, found {len(state)}; compensated states are not supported here"
        )
    if state is not None and (state[0].shape != (n, h, d, m) or state[1].shape != (n, h, d)):
        found = f"{tuple(state[0].shape)} and {tuple(state[1].shape)}"
        raise InputError(f"expected a state of s {(n, h, d, m)} and z {(n, h, d)} for {n} sequences, found {found}")
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    if state is None:
        state = v.new_zeros(n, h, d, m, dtype=wide), v.new_zeros(n, h, d, dtype=wide)
    s, z = state[0].to(wide), state[1].to(wide)
    chosen = BACKENDS[choose(q[None], k[None], v[None], backend)]
    plain = torch.compiler.is_compiling() or not (transformed() or forward_differentiated())
    if hasattr(chosen, "packed") and plain:  # transforms cannot rewrite a kernel
        with full_precision(v.device.type):
            kind = phi if isinstance(phi, Pointwise) else None
            y, s, z = chosen.packed(q, k, v, s, z, offsets.to(v.device), kind, eps)
            return y, LinearState(s, z)
    given = phi if isinstance(phi, Pointwise) else _nothing
    rows, sums, norms = [], [], []
    ends = offsets.tolist()
    for i in range(n):
        here = slice(ends[i], ends[i + 1])
        before = LinearState(s[i : i + 1], z[i : i + 1])
        part = q[None, here], k[None, here], v[None, here]
        y, after = linear_attention(*part, feature_map=given, state=before, eps=eps, backend=backend)
        rows.append(y[0])
        sums.append(after.s)
        norms.append(after.z)
    return torch.cat(rows), LinearState(torch.cat(sums), torch.cat(norms))


def _nothing(x: Tensor) -> Tensor:
    """The feature map of q and k to which φ was applied already."""
    return x


def _check(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> None:
    if not isinstance(offsets, Tensor):
        raise InputError(
            f"expected offsets as a tensor of integers, found {type(offsets).__name__}; use torch.tensor(offsets)"
        )
    if not (
        q.dim() == k.dim() == v.dim() == 3 and q.is_floating_point() and k.is_floating_point() and v.is_floating_point()
    ):
        found = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise InputError(f"expected floating q, k [total, H, D] and v [total, H, M], found {found}")
    total, h, _ = q.shape
    if k.shape != q.shape or v.shape[:2] != (total, h):
        raise InputError(
            f"expected k {tuple(q.shape)} and v {(total, h)} + (M,) for q {tuple(q.shape)}, found {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    if offsets.dim() != 1 or len(offsets) < 2 or offsets.dtype not in (torch.int32, torch.int64):
        raise InputError(f"expected offsets [N + 1] of int32 or int64, found {offsets.dtype} {tuple(offsets.shape)}")
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = offsets.tolist()
        if ends[0] != 0 or ends[-1] != total or sorted(ends) != ends:
            raise InputError(f"expected offsets that rise from 0 to {total}, the number of tokens, found {ends}")
