"""The memory of Transformer-XL (Dai et al. 2019): a layer's inputs at the last tokens."""

import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.types import Device

from .exported import padded
from .key_values import Buffer, appended


class Segments:
    """A layer's inputs at the last N tokens of every row; a `State`, which no operation changes.

    x [B, N, D]: the inputs, from which every call computes keys and values. valid [B, N] bool: the tokens that may be
    attended to (not padding, and not the past of a reset row); a row of zeros is therefore a new row.

    `append` costs O(T) for T new tokens, amortised, as for `KeyValues`.
    """

    __slots__ = ("_buffer", "_end", "valid", "x")

    def __init__(self, x: Tensor, valid: Tensor, _buffer: Buffer | None = None, _end: int = 0) -> None:
        self.x, self.valid = x, valid
        self._buffer, self._end = _buffer, _end

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "segments"

    @staticmethod
    def empty(batch: int, dim: int, device: Device = None, dtype: torch.dtype | None = None) -> "Segments":
        """The state before the first token: B rows of width D."""
        valid = torch.zeros(batch, 0, device=device, dtype=torch.bool)
        return Segments(torch.zeros(batch, 0, dim, device=device, dtype=dtype), valid)

    def append(self, x: Tensor, valid: Tensor) -> "Segments":
        """The state after T more tokens: x [B, T, D], valid [B, T] bool."""
        if self.x.shape[1] == 0:
            return Segments(x, valid)
        (x, valid), buffer, end = appended((self.x, self.valid), (x, valid), self._buffer, self._end)
        return Segments(x, valid, buffer, end)

    def last(self, n: int) -> "Segments":
        """The state with only the last n tokens, in the same buffer."""
        if n >= self.x.shape[1]:
            return self
        start = self.x.shape[1] - n
        return Segments(self.x[:, start:], self.valid[:, start:], self._buffer, self._end)

    def widened(self, n: int) -> "Segments":
        """The same state with at least n tokens: those that are new, in front, are not valid."""
        return Segments(padded(self.x, n), padded(self.valid, n))

    def detach(self) -> "Segments":
        """The same values without the graph that computed them."""
        return Segments(self.x.detach(), self.valid, self._buffer, self._end)

    def __repr__(self) -> str:
        return f"Segments(x={tuple(self.x.shape)})"


# PyTorch's tree functions see the tensors. A rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    Segments,
    lambda s: ([s.x, s.valid], None),
    lambda children, _: Segments(*children),
    serialized_type_name="mnemos.Segments",
)
