"""Launch the kernels of triton.py: precision, tiles, chunks and parts of the sequence."""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["Scans", "kernels", "precision", "running", "step", "to_fill"]

SHORTEST_PART = 512


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
