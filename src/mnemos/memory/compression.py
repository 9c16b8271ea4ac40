"""Compression functions (Rae et al. 2019, section 3.2): each `ratio` inputs of a layer become one slot."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Compression = Literal["convolution", "mean", "max", "most-used", "dilated"]


class Compressor(nn.Module):
    """`slots, slots_valid = compressor(x, valid, usage)`: N inputs of each row become N/ratio slots.

    x [B, N, D], N divisible by the ratio; valid [B, N] bool: padding does not influence a slot; usage [B, N]: the
    average attention that an input received (only `MostUsed` reads it). slots [B, N/ratio, D]; slots_valid [B, N/ratio]
    bool: those with at least one valid input. Slots that are not valid are finite.
    """

    learned = False  # whether it has parameters, which a loss must train
    uses = False  # whether it needs `usage`

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

    uses = True

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
