"""The memory of the Compressive Transformer (Rae et al. 2019): a layer's latest inputs, and older ones compressed."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.modes import reads_without_waiting
from mnemos.types import Device

Compression = Literal["convolution", "mean", "max", "most-used", "dilated"]


@exportable
class CompressedSegments(NamedTuple):
    """The inputs of a layer at the last tokens of every row, and slots for those before them; a row of zeros is new.

    slots [B, K, D]: compressed inputs, the newest last; filled [B, K] bool: those that may be attended to. x [B, N, D]:
    the last N inputs; valid [B, N] bool: those that are neither padding nor compressed. usage [B, N], or [B, 0] where
    no compression needs it: the attention that each of them received, added over queries. seen [B] int64: valid tokens
    since the row began. The size is constant: a new row has the space that a long one needs.
    """

    slots: Tensor
    filled: Tensor  # no field's name begins with another's: torch.export replaces them as text
    x: Tensor
    valid: Tensor
    usage: Tensor
    seen: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "compressed segments"

    @staticmethod
    def empty(
        batch: int,
        sizes: tuple[int, int, int],
        with_usage: bool,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> "CompressedSegments":
        """The state before the first token of B rows. sizes: K slots, N inputs, width D; with_usage: has a `usage`."""
        slots, inputs, dim = sizes

        def zeros(*shape: int, dtype: torch.dtype | None) -> Tensor:
            return torch.zeros(batch, *shape, device=device, dtype=dtype)

        return CompressedSegments(
            zeros(slots, dim, dtype=dtype),
            zeros(slots, dtype=torch.bool),
            zeros(inputs, dim, dtype=dtype),
            zeros(inputs, dtype=torch.bool),
            zeros(inputs if with_usage else 0, dtype=dtype),
            zeros(dtype=torch.int64),
        )

    def detach(self) -> "CompressedSegments":
        """The same values without the graph that computed them."""
        return CompressedSegments(*(part.detach() for part in self))


class Blocks(NamedTuple):
    """The blocks of `block` inputs that leave the memory in a call: of each row at most M, the newest last.

    x [B, M·block, D]; valid [B, M·block] bool. usage [B, M·block]: the attention that each input received, per query
    that could attend to it; or [B, 0]. moved [B]: how many of the M blocks a row has. They are the last ones; the
    places before them hold inputs that are not valid.
    """

    x: Tensor
    valid: Tensor
    usage: Tensor
    moved: Tensor


class CompressionGrid(NamedTuple):
    """When inputs are compressed: in blocks of `block` tokens, counted from the beginning of a row.

    A block is compressed as soon as one of its tokens is older than the last `memory` tokens at the end of a call. The
    uncompressed inputs are then `memory` tokens, or up to block − 1 fewer, and none is lost. Rows may be at different
    places, and the blocks are the same wherever a sequence is cut into calls.
    """

    memory: int
    block: int
    window: int | None = None  # the number of positions that a query reads, with its own; None: all before it

    def count_passed(self, seen: Tensor) -> Tensor:
        """The number of blocks that are compressed after `seen` tokens [B]."""
        return ((seen - self.memory).clamp(min=0) + self.block - 1) // self.block

    def leaving(
        self, x: Tensor, valid: Tensor, usage: Tensor, before: Tensor, after: Tensor, t: int, most: int
    ) -> Blocks | None:
        """The blocks, `most` at most, that T tokens push out of the inputs x [B, memory + T, D], which end with them.

        valid [B, memory + T] bool, usage [B, memory + T] or [B, 0], before and after [B]: tokens seen before and after
        these. None: no block leaves in any row.
        """
        last = self.count_passed(after)
        count = last - self.count_passed(before)
        if isinstance(t, int):  # else an exported program, which has one form for all T
            most = min(most, -(-t // self.block))
        if reads_without_waiting(count):
            most = min(most, int(count.max()) if count.numel() else 0)
        if not most:
            return None
        n = x.shape[1]
        places = torch.arange(most * self.block, device=x.device)
        index = ((last - most) * self.block - after + n)[:, None] + places
        # A row with fewer blocks than `most` finds compressed inputs, or the first one for those before it. That one is
        # compressed too: a row whose first input is the first of a block moves as many blocks as any.
        index, rows = index.clamp(min=0), torch.arange(x.shape[0], device=x.device)[:, None]
        if usage.shape[1]:
            asked = valid.flip(1).cumsum(1).flip(1)  # queries at this token or later
            if self.window is not None:  # without those that are too far behind it
                asked = asked - F.pad(asked, (0, self.window))[:, self.window :]
            usage = (usage / asked.clamp(min=1))[rows, index]
        return Blocks(x[rows, index], valid[rows, index], usage, count.clamp(max=most))

    def uncompressed(self, seen: Tensor) -> Tensor:
        """Which of the last `memory` inputs are in no compressed block after `seen` tokens [B], [B, memory] bool."""
        position = seen[:, None] + torch.arange(-self.memory, 0, device=seen.device)
        return position >= (self.count_passed(seen) * self.block)[:, None]


def push(kept: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """The last K of `kept` [B, K, ..] followed by the last `count` [B] of `new` [B, M, ..]."""
    k, m = kept.shape[1], new.shape[1]
    place = torch.arange(k, device=kept.device)
    index = place + count[:, None]
    index = torch.where(index < k, index, place + m)
    rows = torch.arange(kept.shape[0], device=kept.device)[:, None]
    return torch.cat([kept, new.to(kept.dtype)], 1)[rows, index]


class Compressor(nn.Module):
    """`slots, slots_valid = compressor(x, valid, usage)`: N inputs of each row become N/ratio slots.

    x [B, N, D], N divisible by the ratio; valid [B, N] bool: padding does not influence a slot; usage [B, N]: the
    average attention that an input received (only `MostUsed` reads it). slots [B, N/ratio, D]; slots_valid [B, N/ratio]
    bool: those with at least one valid input. Slots that are not valid are finite.
    """

    learned = False  # whether it has parameters, which a loss must train
    needs_usage = False  # whether `forward` reads `usage`

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__()
        self.dim, self.ratio = dim, ratio

    def forward(self, x: Tensor, valid: Tensor, usage: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        valid = valid.unflatten(1, (-1, self.ratio))
        return self.slots(x.unflatten(1, (-1, self.ratio)), valid[..., None]), valid.any(-1)

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        """Inputs x [B, n, ratio, D] and which are valid [B, n, ratio, 1] -> slots [B, n, D]."""
        raise NotImplementedError


class Mean(Compressor):
    """The mean of the valid inputs: mean pooling with kernel and stride of the ratio."""

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        """See `Compressor`."""
        return (x * valid).sum(2) / valid.sum(2).clamp(min=1)


class Max(Compressor):
    """The largest value of each channel among the valid inputs: max pooling with kernel and stride of the ratio."""

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        """See `Compressor`."""
        return x.masked_fill(~valid, -torch.inf).amax(2).masked_fill(~valid.any(2), 0)


class Convolution(Compressor):
    """A convolution with kernel and stride of the ratio, with a bias; it reads padding as zeros.

    `linear.weight` [D, ratio·D] is the convolution's weight [D, D, ratio] with its last two axes exchanged: because
    stride and kernel are equal, it is one product.
    """

    learned = True

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__(dim, ratio)
        self.linear = nn.Linear(ratio * dim, dim)

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        """See `Compressor`."""
        return self.linear((x * valid).flatten(2))


class Dilated(Compressor):
    """⌈log2 ratio⌉ convolutions of kernel 2 with dilations 1, 2, 4 …, with GELU between them.

    The stack of van den Oord et al. 2016; Rae et al. do not say how theirs is built. Only the outputs at the last input
    of each group are needed, and for them each layer halves the number of inputs. Reads padding as zeros; a group that
    is no power of 2 has zeros before its first input.
    """

    learned = True

    def __init__(self, dim: int, ratio: int) -> None:
        super().__init__(dim, ratio)
        self.levels = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(max(1, (ratio - 1).bit_length())))

    def slots(self, x: Tensor, valid: Tensor) -> Tensor:
        """See `Compressor`."""
        x = F.pad(x * valid, (0, 0, 2 ** len(self.levels) - self.ratio, 0))
        for level, convolution in enumerate(self.levels):
            x = convolution((F.gelu(x) if level else x).unflatten(2, (-1, 2)).flatten(3))
        return x.squeeze(2)


class MostUsed(Compressor):
    """The block/ratio inputs of each block that received the most attention, in their order; the others are dropped.

    With block = ratio it keeps one input of each group.
    """

    needs_usage = True

    def __init__(self, dim: int, ratio: int, block: int) -> None:
        super().__init__(dim, ratio)
        self.block = block

    def forward(self, x: Tensor, valid: Tensor, usage: Tensor) -> tuple[Tensor, Tensor]:
        """See `Compressor`."""
        ranked = usage.masked_fill(~valid, -1).unflatten(1, (-1, self.block))
        kept = ranked.topk(self.block // self.ratio, -1).indices.sort(-1).values
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        index = (kept + self.block * torch.arange(kept.shape[1], device=x.device)[:, None]).flatten(1)
        return x[rows, index], valid[rows, index]


def compressor(name: Compression, dim: int, ratio: int, block: int) -> Compressor:
    """The compression function of that name: `ratio` inputs of width `dim` become one, in blocks of `block` inputs."""
    if name == "most-used":
        return MostUsed(dim, ratio, block)
    kinds: dict[str, type[Compressor]] = {"mean": Mean, "max": Max, "convolution": Convolution, "dilated": Dilated}
    return kinds[name](dim, ratio)
