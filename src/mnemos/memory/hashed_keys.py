"""The memory of LSH attention: every key and value so far, and where they stand in every round's buckets."""

from typing import Any

import torch
from torch import Tensor

from mnemos._compat import pytree

from .key_values import Buffer, appended


class HashedKeys:
    """Keys, values and places of the tokens a causal LSH attention has seen; a `State`, never changed once made.

    k, v: [B, N, H, D/H], keys at length one. place [B, N, H, R] int32: bucket and chunk in each of R rounds (see
    `mnemos.ops.lsh.places`); 0 for what nobody reads: padding, and the past of a reset row. held [B, H, R, buckets]
    int64: how many tokens a bucket holds, from which the next one's rank is known without a look at the others.

    `append` costs O(T) for T new tokens, amortised, as that of `KeyValues` does.
    """

    __slots__ = ("_buffer", "_end", "held", "k", "place", "v")

    def __init__(
        self, k: Tensor, v: Tensor, place: Tensor, held: Tensor, _buffer: Buffer | None = None, _end: int = 0
    ) -> None:
        self.k, self.v, self.place, self.held = k, v, place, held
        self._buffer, self._end = _buffer, _end

    @staticmethod
    def empty(
        batch: int, heads: int, width: int, rounds: int, buckets: int, device: Any = None, dtype: Any = None
    ) -> "HashedKeys":
        """No token seen: B rows, H heads of `width` channels."""
        nothing = torch.zeros(batch, 0, heads, width, device=device, dtype=dtype)
        place = torch.zeros(batch, 0, heads, rounds, device=device, dtype=torch.int32)
        held = torch.zeros(batch, heads, rounds, buckets, device=device, dtype=torch.int64)
        return HashedKeys(nothing, nothing.clone(), place, held)

    def append(self, k: Tensor, v: Tensor, place: Tensor, held: Tensor) -> "HashedKeys":
        """The state after T more tokens: k, v [B, T, H, D/H], place [B, T, H, R]; held as it is after them."""
        if self.k.shape[1] == 0:
            return HashedKeys(k, v, place, held)
        (k, v, place), buffer, end = appended((self.k, self.v, self.place), (k, v, place), self._buffer, self._end)
        return HashedKeys(k, v, place, held, buffer, end)

    def __repr__(self) -> str:
        return f"HashedKeys(k={tuple(self.k.shape)}, v={tuple(self.v.shape)}, held={tuple(self.held.shape)})"


# torch's own tree functions see through it; a rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    HashedKeys,
    lambda s: ([s.k, s.v, s.place, s.held], None),
    lambda children, _: HashedKeys(*children),
    serialized_type_name="mnemos.HashedKeys",
)
