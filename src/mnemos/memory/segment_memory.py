"""The memory of Transformer-XL (Dai et al. 2019): what a layer was given for the last tokens."""

from typing import Any

import torch
from torch import Tensor

from mnemos._compat import pytree

from .key_values import Buffer, appended


class Segments:
    """A layer's inputs at the last N tokens of every row; a `State`, never changed once made.

    x [B, N, D]: the inputs, from which keys and values are made anew. valid [B, N] bool: which of them may be attended
    to; padding and the past of a reset row may not. So a row of zeros is a fresh one.

    `append` costs O(T) for T new tokens, amortised, as that of `KeyValues` does.
    """

    __slots__ = ("_buffer", "_end", "valid", "x")

    def __init__(self, x: Tensor, valid: Tensor, _buffer: Buffer | None = None, _end: int = 0) -> None:
        self.x, self.valid = x, valid
        self._buffer, self._end = _buffer, _end

    @staticmethod
    def empty(batch: int, dim: int, device: Any = None, dtype: Any = None) -> "Segments":
        """No token seen: B rows of width D."""
        valid = torch.zeros(batch, 0, device=device, dtype=torch.bool)
        return Segments(torch.zeros(batch, 0, dim, device=device, dtype=dtype), valid)

    def append(self, x: Tensor, valid: Tensor) -> "Segments":
        """The state after T more tokens: x [B, T, D], valid [B, T] bool."""
        if self.x.shape[1] == 0:
            return Segments(x, valid)
        (x, valid), buffer, end = appended((self.x, self.valid), (x, valid), self._buffer, self._end)
        return Segments(x, valid, buffer, end)

    def last(self, n: int) -> "Segments":
        """The state with only the last n tokens; it goes on in the same buffer."""
        if n >= self.x.shape[1]:
            return self
        start = self.x.shape[1] - n
        return Segments(self.x[:, start:], self.valid[:, start:], self._buffer, self._end)

    def detach(self) -> "Segments":
        """The same values, cut from the graph that made them."""
        return Segments(self.x.detach(), self.valid, self._buffer, self._end)

    def __repr__(self) -> str:
        return f"Segments(x={tuple(self.x.shape)})"


# torch's own tree functions see through it; a rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    Segments,
    lambda s: ([s.x, s.valid], None),
    lambda children, _: Segments(*children),
    serialized_type_name="mnemos.Segments",
)
