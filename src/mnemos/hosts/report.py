"""The report of `cache`: which attentions have a cache, which were left and why, and the cost."""

from dataclasses import dataclass

from mnemos.memory.gated_cache import GRC
from mnemos.ops.gated_cache import Windows
from mnemos.ops.gated_cache.cost import Shape, inference_macs, training_macs


@dataclass(frozen=True)
class Swapped:
    """One attention that got a cache.

    length Tm, width D, cache_width Dm, heads H; tokens: T of a call, None if it varies; out_width: D of its output
    (mix="heads": of its heads); prefix: number of class tokens in front; grid: (height, width) of the other tokens;
    rows: rows of its batch per sample (Swin: windows); pool: side of the squares of tokens that are averaged to one
    slot; windows: those that the cache spans together (length="paper" in Swin: tokens is then the number in all
    windows); grc: with every switch set.
    """

    name: str
    host: str
    length: int
    width: int
    cache_width: int
    heads: int
    tokens: int | None
    out_width: int
    prefix: int
    grid: tuple[int, int] | None
    rows: int
    pool: int
    windows: Windows | None
    grc: GRC
    parameters: int

    @property
    def shape(self) -> Shape:
        """The sizes for the cost formula; T = Tm where T varies."""
        tokens = self.tokens or self.length
        grid = self.grid[0] * self.grid[1] if self.grid else 0
        sizes = tokens, self.length, self.width, self.cache_width, self.heads, self.out_width
        return Shape(*sizes, rows=self.rows, grid_tokens=grid, lifts=self.grc.mix == "channels")


@dataclass(frozen=True)
class Left:
    """One attention that got no cache, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class LeftLayer:
    """A layer, or functions of one, that `linearise` or `fast` left as before, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class Report:
    """Attentions swapped and left, parameters added, and FLOPs added to a training and to an eval() forward per sample.

    A multiply-add is 2 FLOPs. They are computed by mnemos/ops/gated_cache/cost.py from the T of each attention (T = Tm
    where it varies), for a batch of one sample: what a batch shares counts in full.
    """

    swapped: tuple[Swapped, ...]
    left: tuple[Left, ...]

    @property
    def parameters(self) -> int:
        """Parameters added."""
        return sum(one.parameters for one in self.swapped)

    @property
    def flops(self) -> int:
        """FLOPs added to a training forward of one sample."""
        return sum(2 * training_macs(one.shape, one.grc) for one in self.swapped)

    @property
    def inference_flops(self) -> int:
        """FLOPs added to an eval() forward of one sample."""
        return sum(2 * inference_macs(one.shape, one.grc) for one in self.swapped)

    def __str__(self) -> str:
        kinds: dict[str, int] = {}
        for one in self.swapped:
            key = f"{one.host}: {one.length} slots of {one.cache_width} channels, {one.heads} heads"
            key += f", each the mean of {one.pool} x {one.pool} tokens" if one.pool > 1 else ""
            key += ", across all windows" if one.windows else ""
            key += f", mix={one.grc.mix}"
            kinds[key] = kinds.get(key, 0) + 1
        count = len(self.swapped)
        lines = [f"{count} attention{'s have' if count > 1 else ' has'} a gated cache now:"]
        lines += [f"  {count} x {key}" for key, count in kinds.items()]
        lines += [f"  left {one.name}: {one.why}" for one in self.left]
        if all(one.tokens for one in self.swapped):
            flops = f"{self.flops / 1e6:,.1f} MFLOP per training forward of a sample added"
            lines.append(f"{self.parameters:,} parameters and {flops}")
            lines.append(f"({self.inference_flops / 1e6:,.1f} MFLOP in eval)")
        else:
            lines.append(f"{self.parameters:,} parameters added; FLOPs depend on T, which varies: example= gives one")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook and the prompt of Python show
