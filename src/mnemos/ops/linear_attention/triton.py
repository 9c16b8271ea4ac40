"""Causal linear attention on a GPU, in Triton (triton_kernels.py): φ, sums, mask and normaliser in one pass.

The forward reads q, k, v once and writes y and one denominator a token and head; S and z stay in registers. The
backward is a scan forwards in time for dq, and one backwards each for dk and dv (the formulas of chunked.py). Where
rows times heads are too few to fill the device, the sequence is cut in parts: first the sums of each, then all parts
at once. The numbers are float32, bfloat16 or float16, the sums float32.

TRITON_INTERPRET=1, set before Triton is first imported, runs the same kernels on CPU tensors, slowly, for a test.
"""

import functools
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .feature_maps import FEATURE_MAPS, Pointwise

__all__ = ["causal", "packed", "runs_here", "suits", "takes", "token", "why_not"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
MAPS = {"elu": 1, "relu": 2}
WIDEST = 256  # a program holds all of D or all of M
SHORTEST_PART = 512
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def runs_here() -> bool:
    """Whether Triton is installed, and a GPU, or its interpreter, is there to run it."""
    return _reason() == ""


def why_not() -> str:
    """Why this backend cannot run here, and what to do about it; empty if it can."""
    return _reason()


@torch.compiler.assume_constant_result
def _reason() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'mnemos[triton]'"
    if not torch.cuda.is_available() and not _interpreted():
        return "it needs a GPU, and PyTorch sees no CUDA device; use 'auto'"
    return ""


@torch.compiler.assume_constant_result
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """On a GPU of compute capability 8 or later (or interpreted on the CPU), float32 or shorter, D and M up to 256."""
    if not (q.dtype in TYPES and k.dtype in TYPES and v.dtype in TYPES):
        return False
    if not (0 < q.shape[-1] <= WIDEST and 0 < v.shape[-1] <= WIDEST):
        return False
    return _interpreted() if v.device.type == "cpu" else v.device.type == "cuda" and _has_tensor_cores()


def suits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """What "auto" may give it: the interpreter runs for those alone who ask for this backend by name."""
    return v.device.type == "cuda" and takes(q, k, v)


@torch.compiler.assume_constant_result
def _has_tensor_cores() -> bool:
    return torch.cuda.get_device_capability() >= (8, 0)


def causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, mask: Tensor | None, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, D] (φ still to be applied, or None), v [B, T, H, M], s [B, H, D, M], z [B, H, D] -> y, s, z.

    Cost: O(B·H·T·(C·(D + M) + D·M)) for chunks of C tokens; q, k and v are read once, k and v twice where the
    sequence is cut in parts.
    """
    return _call(q, k, v, s, z, mask, None, phi, eps)


token = causal  # a single one has a kernel of its own inside


def packed(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, offsets: Tensor, phi: Pointwise | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """N sequences one after the other, q, k [total, H, D], v [total, H, M], s [N, H, D, M], z [N, H, D] -> y, s, z.

    Sequence n is tokens offsets[n] to offsets[n + 1] - 1; a program has one of them and one head.
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
    kind = 0
    if phi is not None and FEATURE_MAPS.get(phi.name) is phi and phi.name in MAPS:
        kind = MAPS[phi.name]
    elif phi is not None:
        q, k = phi(q), phi(k)
    wanted = v.dtype
    if not q.dtype == k.dtype == wanted:
        q, k, v = q.float(), k.float(), v.float()
    y, _, s, z = torch.ops.mnemos.linear_attention_triton(q, k, v, s, z, mask, offsets, kind, eps)
    return y.to(wanted), s, z


@functools.cache
def _kernels() -> ModuleType:
    from . import triton_kernels

    return triton_kernels


def precision(dtype: torch.dtype) -> tuple[str, str]:
    """How products are taken on tensor cores: those that are read at once, and those that S is summed from.

    S is as good as float32 whatever the inputs. bf16 rounds both factors, as every bfloat16 attention does; bf16x2
    splits φ(k) in two, and v is one already; tf32x3 splits each float32 in two. float16 has no room for φ(q)·φ(k) or
    1/den, so its products are tf32's, of as many bits.
    PyTorch's setting decides for float32 where its user has made one: "tf32", or "ieee" for no tensor cores, which
    takes several times as long. Its default, "none", asks for nothing.
    """
    if dtype == torch.bfloat16:
        return "bf16", "bf16x2"
    asked = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    exact = "ieee" if asked == "ieee" else "tf32x3"
    if dtype == torch.float16:
        return "tf32", exact
    return ("tf32", "tf32") if asked == "tf32" else (exact, exact)


def _to_fill(device: torch.device) -> int:
    """How many programs keep a device busy: one a multiprocessor. Tests put more in its place."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _power(n: int) -> int:
    """The least power of two that is no less, and fit for a side of a product."""
    return max(16, 1 << (n - 1).bit_length())


@dataclass
class _Scans:
    """What all scans of a call share: its inputs, as the kernels read them."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    kind: int
    heads: int  # of all rows, or of all sequences
    den: Tensor
    g: Tensor | None = None
    y: Tensor | None = None
    gamma: Tensor | None = None

    def __post_init__(self) -> None:
        # Any strides will do but the last.
        self.q, self.k, self.v = _aligned(self.q), _aligned(self.k), _aligned(self.v)
        self.g = None if self.g is None else _aligned(self.g)
        self.mask = None if self.mask is None else self.mask.view(torch.uint8)

    def parts(self, blocks: int) -> tuple[int, int]:
        """In how many parts the sequence is cut, and their length: one where there are programs enough."""
        t = self.q.shape[1]
        programs, enough = self.heads * blocks, _to_fill(self.q.device)
        if self.offsets is not None or programs >= enough or t < 2 * SHORTEST_PART:
            return 1, max(t, 1)
        # Two programs a multiprocessor hide each other's waiting.
        length = max(SHORTEST_PART, -(-t // -(-2 * enough // programs)))
        length = -(-length // 64) * 64
        return -(-t // length), length

    def tiles(self, over_d: bool) -> tuple[int, int, int]:
        """The tile BD × BM of a running sum that a program holds, and in how many blocks M (D, if over_d) is cut."""
        d, m = self.q.shape[-1], self.v.shape[-1]
        whole, cut = (m, d) if over_d else (d, m)
        block = min(_power(cut), 64 if whole <= 128 else 32)
        sides = (block, _power(whole)) if over_d else (_power(whole), block)
        return *sides, -(-cut // block)

    def chunk(self, wide: int) -> int:
        """Tokens of a chunk. More, and a thread's registers spill, by what the compiler says for D = M of 32 to 256."""
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
        """One scan, see triton_kernels.py; halves the chunks where a device has too little shared memory for them."""
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
                    _kernels().scan[self.heads * blocks, count](
                        *(self.q, self.k, self.v, self.g, self.y, self.den, self.gamma, self.mask, self.offsets, out),
                        *(x_start, n_start, x_end, n_end, eps, *strides, t, h, length, count, blocks),
                        D=d,
                        M=self.v.shape[-1],
                        OUT=what,
                        KIND=self.kind,
                        MASKED=self.mask is not None,
                        PACKED=self.offsets is not None,
                        ENDS=end is not None,
                        C=chunk,
                        BD=bd,
                        BM=bm,
                        PRECISION=reads,
                        SUMS=sums or reads,
                        num_warps=4 if bd * bm * self.v.element_size() <= 8192 else 8,
                        num_stages=2,
                    )
                return
            except _kernels().OutOfResources:
                if chunk == 16:
                    raise
                chunk //= 2

    def totals(self, what: str, parts: tuple[int, int], sums: str | None = None) -> tuple[Tensor, Tensor]:
        """The sums of each part alone."""
        d, m = self.q.shape[-1], self.v.shape[-1]
        x, n = self.den.new_empty(self.heads, parts[0], d, m), self.den.new_empty(self.heads, parts[0], d)
        self.run(what, end=(x, n), parts=parts, sums=sums)
        return x, n


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _running(totals: Tensor, start: Tensor, backwards: bool = False) -> Tensor:
    """In place, from totals of parts to what a running sum is before each; returns it after the last."""
    end = torch.empty_like(start)
    heads, parts = totals.shape[:2]
    size = totals[0, 0].numel()
    block = min(1024, _power(size))
    with torch.cuda.device_of(totals):
        _kernels().running[heads, -(-size // block)](totals, start, end, parts, size, BACKWARDS=backwards, BLOCK=block)
    return end


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor s, Tensor z, Tensor? mask, Tensor? offsets, int kind"
torch.library.define("mnemos::linear_attention_triton", f"({_INPUTS}, float eps) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.define(
    "mnemos::linear_attention_triton_backward",
    f"({_INPUTS}, Tensor y, Tensor den, Tensor gy, Tensor gs, Tensor gz) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s, z = s.contiguous(), z.contiguous()
    y, den = v.new_empty(v.shape), s.new_empty(v.shape[:3])
    s_end, z_end = torch.empty_like(s), torch.empty_like(z)
    scans = _Scans(q, k, v, mask, offsets, kind, s.shape[0] * s.shape[1], den)
    if q.shape[1] == 1 and offsets is None:
        _step(scans, y, s, z, s_end, z_end, eps)
        return y, den, s_end, z_end
    parts, sums = scans.parts(scans.tiles(False)[2]), precision(v.dtype)[1]
    if parts[0] == 1:
        scans.run("y", y, (s, z), (s_end, z_end), sums=sums, eps=eps)
        return y, den, s_end, z_end
    x, n = scans.totals("s", parts, sums)
    s_end, z_end = _running(x, s), _running(n, z)
    scans.run("y", y, (x, n), parts=parts, sums=sums, eps=eps)
    return y, den, s_end, z_end


def _step(scans: _Scans, y: Tensor, s: Tensor, z: Tensor, s_end: Tensor, z_end: Tensor, eps: float) -> None:
    q, k, v, mask = scans.q, scans.k, scans.v, scans.mask
    _, _, h, d = q.shape
    m, bd = v.shape[-1], _power(d)
    bm = min(_power(m), 4096 // bd)
    blocks = -(-m // bm)
    if not scans.heads:
        return
    strides = [n for x in (q, k, v) for n in (x.stride(0), x.stride(2))]
    with torch.cuda.device_of(q):
        _kernels().step[scans.heads * blocks,](
            *(q, k, v, mask, y, scans.den, s, z, s_end, z_end, eps),
            *(*strides, 0 if mask is None else mask.stride(0), h, blocks),
            D=d,
            M=m,
            KIND=scans.kind,
            MASKED=mask is not None,
            BD=bd,
            BM=bm,
        )


@torch.library.register_fake("mnemos::linear_attention_triton")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    z: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    kind: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), s.new_empty(v.shape[:3]), s.new_empty(s.shape), z.new_empty(z.shape)


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
    scans = _Scans(q, k, v, mask, offsets, kind, s.shape[0] * s.shape[1], den, g=gy, y=y.contiguous(), gamma=gamma)
    parts = scans.parts(min(scans.tiles(False)[2], scans.tiles(True)[2]))
    if parts[0] == 1:
        scans.run("dq", dq, (s, z))
        scans.run("dk", dk, (gs, gz), (None, dz))
        scans.run("dv", dv, (gs, gz), (ds, None))
        return dq, dk, dv, ds, dz
    x, n = scans.totals("s", parts)
    _running(x, s), _running(n, z)
    scans.run("dq", dq, (x, n), parts=parts)
    x, n = scans.totals("r", parts)
    ds, dz = _running(x, gs, backwards=True), _running(n, gz, backwards=True)
    scans.run("dk", dk, (x, n), parts=parts)
    scans.run("dv", dv, (x, n), parts=parts)
    return dq, dk, dv, ds, dz


@torch.library.register_fake("mnemos::linear_attention_triton_backward")
def _(
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
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), s.new_empty(s.shape), z.new_empty(z.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, s, z, mask, offsets, ctx.kind, _ = inputs
    y, den, _, _ = output
    ctx.save_for_backward(q, k, v, s, z, mask, offsets, y, den)
    ctx.mark_non_differentiable(den)


def _gradients(ctx: Any, gy: Tensor | None, _: Any, gs: Tensor | None, gz: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, s, z, mask, offsets, y, den = ctx.saved_tensors
    gy, gs, gz = (torch.zeros_like(x) if g is None else g for g, x in ((gy, y), (gs, s), (gz, z)))
    backward = torch.ops.mnemos.linear_attention_triton_backward
    found = backward(q, k, v, s, z, mask, offsets, ctx.kind, y, den, gy, gs, gz)
    return *found, None, None, None, None


def _once(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
    raise RuntimeError("linear_attention is differentiable once; backend='triton' has no derivative of its derivative")


for _device in ("CPU", "CUDA"):
    torch.library.impl("mnemos::linear_attention_triton", _device, _forward)
    torch.library.impl("mnemos::linear_attention_triton_backward", _device, _backward)
torch.library.register_autograd("mnemos::linear_attention_triton", _gradients, setup_context=_keep)
torch.library.register_autograd("mnemos::linear_attention_triton_backward", _once)
