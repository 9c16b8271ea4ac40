"""Causal linear attention on a GPU, in Triton: φ, sums, mask and normaliser in one pass (triton_kernels.py).

The forward reads q, k, v once and writes y and one denominator per token and head, and in half precision y in float32
too, for the backward; S and z stay in registers. The backward is one scan forwards in time for dq, and one backwards
each for dk and dv (the formulas of chunked.py). If rows times heads are too few to occupy the device, the sequence is
split into parts: first the sums of every part are computed, then all parts at once. Inputs are float32, bfloat16 or
float16; the sums are float32.

The kernels have not run on a GPU yet, so they run where they are named (backend="triton") and never by "auto".
TRITON_INTERPRET=1, set before Triton is first imported, runs the same kernels on CPU tensors, slowly, for tests.
"""

import functools
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import constant
from mnemos.native.codes import TYPES

from .feature_maps import Pointwise
from .operators import Gradients, keep, prepare, register

__all__ = ["causal", "packed", "runs_here", "takes", "token", "why_not"]

WIDEST = 256  # a program holds a whole row of D or of M
SHORTEST_PART = 512  # tokens


def runs_here() -> bool:
    """Whether Triton is installed, and there is a GPU or Triton's interpreter is on."""
    return why_not() == ""


@constant
def why_not() -> str:
    """Why this backend cannot run on this machine and what to do, in one line; empty if it can."""
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
    (q, k, v, kind), wanted = prepare(q, k, v, mask, phi), v.dtype
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


@functools.cache
def kernels() -> ModuleType:
    """The module of the kernels, which imports Triton."""
    from . import triton_kernels

    return triton_kernels


def precision(dtype: torch.dtype) -> tuple[str, str]:
    """The precision of products on tensor cores: of those that are read directly, and of those that are summed to S.

    S has the accuracy of float32 for all inputs. bf16 rounds both factors, as other bfloat16 attentions do; bf16x2
    splits φ(k) into two numbers (v is bfloat16 already); tf32x3 splits each float32 into two. The range of float16 is
    too small for φ(q)·φ(k) and 1/den, so its products are tf32, which has as many bits.
    For float32 the user's setting in PyTorch decides: "tf32", or "ieee" for no tensor cores, which takes several times
    as long. The default "none" means tf32x3.
    """
    if dtype == torch.bfloat16:
        return "bf16", "bf16x2"
    asked = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    exact = "ieee" if asked == "ieee" else "tf32x3"
    if dtype == torch.float16:
        return "tf32", exact
    return ("tf32", "tf32") if asked == "tf32" else (exact, exact)


def to_fill(device: torch.device) -> int:
    """The number of programs that occupy a device: one per multiprocessor. Tests replace this function."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _power(n: int) -> int:
    """The smallest power of two that is at least n and at least 16, as the side of a product must be."""
    return max(16, 1 << (n - 1).bit_length())


@dataclass
class Scans:
    """The inputs that all scans of a call share, as the kernels read them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    kind: int
    heads: int  # rows (or sequences) times heads
    den: Tensor
    g: Tensor | None = None
    y: Tensor | None = None
    gamma: Tensor | None = None

    def __post_init__(self) -> None:
        # The kernels need stride 1 in the last axis.
        self.q, self.k, self.v = _aligned(self.q), _aligned(self.k), _aligned(self.v)
        self.g = None if self.g is None else _aligned(self.g)
        self.mask = None if self.mask is None else self.mask.view(torch.uint8)

    def parts(self, blocks: int) -> tuple[int, int]:
        """The number of parts of the sequence, and their length: one part if there are enough programs."""
        t = self.q.shape[1]
        programs, enough = self.heads * blocks, to_fill(self.q.device)
        if self.offsets is not None or programs >= enough or t < 2 * SHORTEST_PART:
            return 1, max(t, 1)
        # Two programs per multiprocessor hide each other's memory latency.
        length = max(SHORTEST_PART, -(-t // -(-2 * enough // programs)))
        length = -(-length // 64) * 64
        return -(-t // length), length

    def tiles(self, over_d: bool) -> tuple[int, int, int]:
        """The tile BD × BM of a running sum in a program, and the number of blocks of M (over_d: of D)."""
        d, m = self.q.shape[-1], self.v.shape[-1]
        whole, cut = (m, d) if over_d else (d, m)
        block = min(_power(cut), 64 if whole <= 128 else 32)
        sides = (block, _power(whole)) if over_d else (_power(whole), block)
        return *sides, -(-cut // block)

    def chunk(self, wide: int) -> int:
        """Tokens per chunk: the largest for which the compiler reports no register spills, for D = M of 32 to 256."""
        if self.v.dtype == torch.bfloat16:
            return 64 if wide <= 128 else 16
        return 32 if wide <= 64 else 16

    def run(
        self,
        what: str,
        out: Tensor | None = None,
        start: tuple[Tensor, Tensor] | None = None,
        end: tuple[Tensor | None, Tensor | None] | None = None,
        parts: tuple[int, int] = (1, 0),
        sums: str | None = None,
        eps: float = 0.0,
    ) -> None:
        """Run one scan (see triton_kernels.py). Halves the chunks while the device has too little shared memory."""
        t, h, d = self.q.shape[1:]
        bd, bm, blocks = self.tiles(what in ("dq", "dk"))
        count, length = parts if parts[1] else (1, max(t, 1))
        if not self.heads:
            return
        strides = [n for x in (self.q, self.k, self.v) for n in x.stride()[:3]]
        strides += self.g.stride()[:3] if self.g is not None else (0, 0, 0)
        strides += self.mask.stride() if self.mask is not None else (0, 0)
        x_start, n_start = start or (None, None)
        x_end, n_end = end or (None, None)
        reads = precision(self.v.dtype)[0]
        chunk = min(self.chunk(max(bd, bm)), _power(t))
        while True:
            try:
                with torch.cuda.device_of(self.q):
                    kernels().scan[self.heads * blocks, count](
                        *(self.q, self.k, self.v, self.g, self.y, self.den, self.gamma, self.mask, self.offsets, out),
                        *(x_start, n_start, x_end, n_end, eps, *strides, t, h, length, count, blocks),
                        D=d,
                        M=self.v.shape[-1],
                        OUT=what,
                        KIND=self.kind,
                        MASKED=self.mask is not None,
                        PACKED=self.offsets is not None,
                        ENDS=end is not None,
                        EXACT=self.v.dtype != torch.float32,
                        C=chunk,
                        BD=bd,
                        BM=bm,
                        PRECISION=reads,
                        SUMS=sums or reads,
                        num_warps=4 if bd * bm * self.v.element_size() <= 8192 else 8,
                        num_stages=2,
                    )
                return
            except kernels().OutOfResources:
                if chunk == 16:
                    raise
                chunk //= 2

    def totals(self, what: str, parts: tuple[int, int], sums: str | None = None) -> tuple[Tensor, Tensor]:
        """The sums of each part by itself."""
        d, m = self.q.shape[-1], self.v.shape[-1]
        x, n = self.den.new_empty(self.heads, parts[0], d, m), self.den.new_empty(self.heads, parts[0], d)
        self.run(what, end=(x, n), parts=parts, sums=sums)
        return x, n


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def running(totals: Tensor, start: Tensor, backwards: bool = False) -> Tensor:
    """Replace the totals of parts, in place, by the running sum before each part; returns the sum after the last."""
    end = torch.empty_like(start)
    heads, parts = totals.shape[:2]
    size = totals[0, 0].numel()
    block = min(1024, _power(size))
    with torch.cuda.device_of(totals):
        kernels().running[heads, -(-size // block)](totals, start, end, parts, size, BACKWARDS=backwards, BLOCK=block)
    return end


def step(scans: Scans, y: Tensor, s: Tensor, z: Tensor, s_end: Tensor, z_end: Tensor, eps: float) -> None:
    """Compute one token."""
    q, k, v, mask = scans.q, scans.k, scans.v, scans.mask
    _, _, h, d = q.shape
    m, bd = v.shape[-1], _power(d)
    bm = min(_power(m), 4096 // bd)
    blocks = -(-m // bm)
    if not scans.heads:
        return
    strides = [n for x in (q, k, v) for n in (x.stride(0), x.stride(2))]
    with torch.cuda.device_of(q):
        kernels().step[scans.heads * blocks,](
            *(q, k, v, mask, y, scans.y, scans.den, s, z, s_end, z_end, eps),
            *(*strides, 0 if mask is None else mask.stride(0), h, blocks),
            D=d,
            M=m,
            KIND=scans.kind,
            MASKED=mask is not None,
            EXACT=v.dtype != torch.float32,
            BD=bd,
            BM=bm,
        )


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
