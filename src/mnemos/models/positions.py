"""Absolute positions of tokens, learned or sinusoidal, which continue where a state left off."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mnemos.types import InputError

from .blocks import sinusoids

TABLE = 4096  # positions that a table of sinusoids may have; those of longer streams are computed


class LearnedPositions(nn.Embedding):
    """y [B, T, D] plus learned positions from `seen` [B] on (None: 0). Raises InputError beyond the last position."""

    def forward(self, y: Tensor, seen: Tensor | None = None) -> Tensor:
        """See the class."""
        limit, t = self.num_embeddings, y.shape[1]
        # An exported program reads no values; the look-up in the table raises its own error.
        known = not torch.compiler.is_exporting()
        start = int(seen.max()) if known and seen is not None and seen.numel() else 0
        if known and start + t > limit:
            raise InputError(
                f"learned positions: expected at most {limit} tokens, found {start + t}; raise max_length or use "
                'position="sinusoidal"'
            )
        place = torch.arange(t, device=y.device) + (0 if seen is None else seen[:, None])
        return y + super().forward(place)

    if TYPE_CHECKING:
        __call__ = forward


class SinusoidalPositions(nn.Module):
    """y [B, T, D] plus sinusoids of the positions from `seen` [B] on (None: 0). Positions have no limit.

    The first `TABLE` positions come from a table, which is kept between calls and grows as it is needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table: Tensor | None = None

    def forward(self, y: Tensor, seen: Tensor | None = None) -> Tensor:
        """See the class."""
        t, dim, stops = y.shape[1], y.shape[2], y.shape[1]
        if seen is not None and seen.device.type == "cpu" and seen.numel() and not torch.compiler.is_compiling():
            stops += int(seen.max())
        elif seen is not None:
            stops = TABLE + 1  # unknown without waiting for the device
        if torch.compiler.is_compiling() or (stops > TABLE and seen is not None):
            return y + sinusoids(t, dim, seen, y.device).to(y.dtype)
        table = self._table
        if table is None or len(table) < stops or table.device != y.device or table.dtype != y.dtype:
            longest = stops if seen is None else min(TABLE, 2 * stops)
            table = self._table = sinusoids(longest, dim, None, y.device)[0].to(y.dtype)
        if seen is None:
            return y + table[:t]
        return y + table[seen[:, None] + torch.arange(t, device=y.device)]

    if TYPE_CHECKING:
        __call__ = forward
