"""Causal linear attention on a GPU, in Triton: φ, sums, mask and normaliser in one pass (triton_kernels.py).

The forward reads q, k, v once and writes y and one denominator per token and head, and in half precision y in float32
too, for the backward; S and z stay in registers. The
backward is one scan forwards in time for dq, and one backwards each for dk and dv (the formulas of chunked.py). If rows
times heads are too few to occupy the device, the sequence is split into parts: first the sums of every part are
computed, then all parts at once. Inputs are float32, bfloat16 or float16; the sums are float32.

The kernels have not run on a GPU yet, so they run where they are named (backend="triton") and never by "auto".
TRITON_INTERPRET=1, set before Triton is first imported, runs the same kernels on CPU tensors, slowly, for tests.
"""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import constant
from mnemos.native.codes import TYPES

from .feature_maps import Pointwise
from .operators import Gradients, given, keep, register
from .triton_launch import Scans, precision, running, step

__all__ = ["causal", "packed", "runs_here", "takes", "token", "why_not"]

WIDEST = 256  # a program holds a whole row of D or of M


def runs_here() -> bool:
    """Whether Triton is installed, and there is a GPU or Triton's interpreter is on."""
    return _reason() == ""


def why_not() -> str:
    """Why this backend cannot run on this machine and what to do, in one line; empty if it can."""
    return _reason()


@constant
def _reason() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'mnemos-torch[triton]'"
    if not torch.cuda.is_available() and not _interpreted():
        return "it needs a GPU, and PyTorch sees no CUDA device; use 'auto'"
    return ""


@constant
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether D, M ≤ 256, no dtype has over 32 bits, and the GPU has compute capability 8 (or Triton interprets)."""
    if not (q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES):
        return False
    if not (0 < q.shape[-1] <= WIDEST and 0 < v.shape[-1] <= WIDEST):
        return False
    return _interpreted() if v.device.type == "cpu" else v.device.type == "cuda" and _has_tensor_cores()


@constant
def _has_tensor_cores() -> bool:
    return torch.cuda.get_device_capability() >= (8, 0)


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (before `phi`, if that is not None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z.

    Cost: O(B·H·T·(C·(D + M) + D·M)) for chunks of C tokens. q, k and v are read once; k and v twice if the sequence is
    split into parts.
    """
    return _call(q, k, v, s, z, mask, None, phi, eps)


token = causal  # `_forward` has a separate kernel for a single token


def packed(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, offsets: Tensor, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """N concatenated sequences: q, k [total, H, D], v [total, H, M], s [N, H, D, M], z [N, H, D] -> y, s, z.

    Sequence n has the tokens offsets[n] to offsets[n + 1] - 1. A program computes one sequence and one head.
    """
    y, s, z = _call(q[None], k[None], v[None], s, z, None, offsets, phi, eps)
    return y[0], s, z


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    phi: Pointwise | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v, kind), wanted = given(q, k, v, mask, phi), v.dtype
    y, s, z, *_ = torch.ops.mnemos.linear_attention_triton(q, k, v, s, z, mask, offsets, kind, eps)
    return y.to(wanted), s, z


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    kind: int,
    eps: float,
) -> tuple[Tensor, ...]:
    s, z = s.contiguous(), z.contiguous()
    y, den = v.new_empty(v.shape), s.new_empty(v.shape[:3])
    exact = _exact(v)
    s_end, z_end = torch.empty_like(s), torch.empty_like(z)
    scans = Scans(q, k, v, mask, offsets, kind, s.shape[0] * s.shape[1], den, y=exact)
    if q.shape[1] == 1 and offsets is None:
        step(scans, y, s, z, s_end, z_end, eps)
        return y, s_end, z_end, exact, den
    parts, sums = scans.parts(scans.tiles(False)[2]), precision(v.dtype)[1]
    if parts[0] == 1:
        scans.run("y", y, (s, z), (s_end, z_end), sums=sums, eps=eps)
        return y, s_end, z_end, exact, den
    x, n = scans.totals("s", parts, sums)
    s_end, z_end = running(x, s), running(n, z)
    scans.run("y", y, (x, n), parts=parts, sums=sums, eps=eps)
    return y, s_end, z_end, exact, den


def _exact(v: Tensor) -> Tensor:
    """Memory for y in float32, or nothing if y is float32 itself.

    dq = S·ĝ + γ·z with γ = −ĝ·y, and the two cancel where the values have a mean. A rounded y would not let them.
    """
    return v.new_empty(v.shape if v.dtype != torch.float32 else (0,), dtype=torch.float32)


def _like_kept(q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    return _exact(v), s.new_empty(v.shape[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, _, _, exact, den = output
    keep(ctx, inputs, output, (y if y.dtype == torch.float32 else exact, den))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    kind: int,
    y: Tensor,
    den: Tensor,
    gy: Tensor,
    gs: Tensor,
    gz: Tensor,
) -> Gradients:
    s, z, gs, gz = s.contiguous(), z.contiguous(), gs.contiguous(), gz.contiguous()
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    ds, dz = torch.empty_like(s), torch.empty_like(z)
    den, gamma = den.contiguous(), torch.empty_like(den)
    scans = Scans(q, k, v, mask, offsets, kind, s.shape[0] * s.shape[1], den, g=gy, y=y.contiguous(), gamma=gamma)
    parts, sums = scans.parts(min(scans.tiles(False)[2], scans.tiles(True)[2])), precision(v.dtype)[1]
    # S and z, and R and w, cancel in dq and dk, so their products are as exact as in the forward.
    if parts[0] == 1:
        scans.run("dq", dq, (s, z), sums=sums)
        scans.run("dk", dk, (gs, gz), (None, dz), sums=sums)
        scans.run("dv", dv, (gs, gz), (ds, None), sums=sums)
        return dq, dk, dv, ds, dz
    x, n = scans.totals("s", parts, sums)
    running(x, s), running(n, z)
    scans.run("dq", dq, (x, n), parts=parts, sums=sums)
    x, n = scans.totals("r", parts, sums)
    ds, dz = running(x, gs, backwards=True), running(n, gz, backwards=True)
    scans.run("dk", dk, (x, n), parts=parts, sums=sums)
    scans.run("dv", dv, (x, n), parts=parts)
    return dq, dk, dv, ds, dz


register(
    "linear_attention_triton",
    "triton",
    ["CPU", "CUDA"],
    _forward,
    _backward,
    _like_kept,
    "y den",
    extra="Tensor? offsets, ",
    setup=_keep,
)
