"""Rotary positions (Su et al. 2021): pairs of channels of queries and keys are rotated by angles of their positions."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mnemos.ops.padding import positions
from mnemos.types import Device, InputError


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
        """Radians per position of the ⌈width/2⌉ pairs, in the widest float the device has."""
        # float64, because float32 does not distinguish positions beyond 2^24.
        dtype = torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64
        pairs = torch.arange(0, width, 2, device=device, dtype=dtype)
        return float(self.base) ** (-pairs / width) / self.scaling

    def turns(
        self, t: int, width: int, start: Tensor | None = None, device: Device = None, mask: Tensor | None = None
    ) -> Tensor:
        """The rotations of T positions from start [B] (None: 0) as complex numbers, [B or 1, T, 1, width/2].

        mask [B, T] bool: the positions are those of valid tokens (`padding.positions`).
        """
        each = self.frequencies(width, device)
        at = positions(t, start, mask, device)
        angle = (at[..., None].to(each.dtype) * each)[:, :, None]  # float32 would be wrong beyond 2²⁴
        return torch.polar(torch.ones_like(angle), angle)


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
