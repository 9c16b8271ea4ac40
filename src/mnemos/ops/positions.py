"""Positions of tokens: their numbers, the sinusoids that models add, and rotations of queries and keys.

They count valid tokens alone: padding has no position of its own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mnemos.types import Device, InputError

# --- Numbers ---


def positions(t: int, seen: Tensor | None, mask: Tensor | None, device: Device = None) -> Tensor:
    """The numbers of T tokens after `seen` [B] valid ones (None: 0), [1 or B, T] int64.

    Padding has that of the valid token before it, so that no number is beyond the last valid one.
    """
    numbers = torch.arange(t, device=device)[None] if mask is None else mask.cumsum(1) - 1
    numbers = numbers if seen is None else numbers + seen[:, None]
    return numbers if mask is None else numbers.clamp(min=0)


def count_seen(x: Tensor, seen: Tensor | None, mask: Tensor | None) -> Tensor:
    """The number of valid tokens [B] int64 after x [B, T, ..], of which `seen` were before it."""
    if mask is not None:
        return mask.sum(1) if seen is None else seen + mask.sum(1)
    return torch.full((x.shape[0],), x.shape[1], device=x.device) if seen is None else seen + x.shape[1]


def frequencies(width: int, device: Device = None, base: float = 10000.0) -> Tensor:
    """base^(−2i/width) of the ⌈width/2⌉ pairs of channels: radians per position, in the widest float the device has."""
    # float64, because float32 does not distinguish positions beyond 2^24.
    dtype = torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
    return float(base) ** (-torch.arange(0, width, 2, device=device, dtype=dtype) / width)


# --- Sinusoids (Vaswani et al. 2017, §3.5) ---


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """Sines in even and cosines in odd channels of positions [..] (integers or floats, any size): [.., D] float32."""
    each = frequencies(dim, positions.device)
    angle = positions[..., None].to(each.dtype) * each
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :dim].float()


# --- Rotary positions (Su et al. 2021): pairs of channels of queries and keys are rotated by angles of positions ---


@dataclass(frozen=True)
class Rotary:
    """The angle of pair i at position p: p/scaling · base^(−2i/d), for heads of d channels.

    Attributes:
        base: a larger one rotates the slow pairs more slowly, for longer contexts (Llama 3: 500,000).
        scaling: positions are divided by it (position interpolation, Chen et al. 2023): a model that was trained on N
            positions then reads scaling · N positions with the angles that it knows.

    Raises InputError for a base of 1 or less, and a scaling of 0 or less.
    """

    base: float = 10000.0
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if not (self.base > 1 and self.scaling > 0):
            raise InputError(
                f"rotary: expected a base above 1 and a scaling above 0, found {self.base} and {self.scaling}; change "
                "them"
            )

    def frequencies(self, width: int, device: Device = None) -> Tensor:
        """Radians per position of the ⌈width/2⌉ pairs."""
        return frequencies(width, device, self.base) / self.scaling

    def turns(
        self, t: int, width: int, start: Tensor | None = None, device: Device = None, mask: Tensor | None = None
    ) -> Tensor:
        """The rotations of T positions from start [B] (None: 0) as complex numbers, [B or 1, T, 1, width/2].

        mask [B, T] bool: the positions are those of valid tokens.
        """
        each = self.frequencies(width, device)
        angle = (positions(t, start, mask, device)[..., None].to(each.dtype) * each)[:, :, None]
        return torch.polar(torch.ones_like(angle), angle)

    def rotate(self, x: Tensor, start: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Queries or keys x [B, T, H, D], rotated: the positions are those of `turns`."""
        return rotate(x, self.turns(x.shape[1], x.shape[-1], start, x.device, mask))


def rotary_of(rotary: Rotary | bool | None, width: int) -> Rotary | None:
    """The settings of a layer whose heads have `width` channels; True: the default ones.

    Raises InputError for an odd width.
    """
    settings = Rotary() if rotary is True else rotary or None
    if settings is not None and width % 2:
        raise InputError(
            f"rotary positions: expected an even width per head, found {width}; change dim, num_heads or key_width"
        )
    return settings


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the channel pairs (2i, 2i+1) of x [B, T, H, D] by their angles.

    turns: complex numbers (`Rotary.turns`), or the cosines and then the sines of every channel, [.., T, 1, 2·D].
    """
    if not turns.is_complex():
        wide = torch.promote_types(x.dtype, torch.float32)
        other = torch.arange(x.shape[-1], device=x.device) ^ 1  # the other channel of the pair
        cos, sin = turns.to(wide).chunk(2, -1)
        return (x.to(wide) * cos + x.to(wide).index_select(-1, other) * sin).to(x.dtype)
    if x.dtype == torch.float64:
        pairs, turns = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()), turns.to(torch.complex128)
    else:
        pairs, turns = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()), turns.to(torch.complex64)
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
