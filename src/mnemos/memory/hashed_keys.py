"""The memory of bucket-union attention: every key and value so far, and their places in the buckets of each round."""

import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.types import Device

from .key_values import Buffer, appended


class HashedKeys:
    """What a causal bucket-union attention has read: keys, values, places; a `State`, which no operation changes.

    k, v: [B, N, H, D/H], keys of norm one. place [B, N, H, R] int32: bucket and chunk in each of R rounds (see
    `mnemos.ops.bucket_union.places`); 0 for tokens that are not attended to (padding, and the past of a reset row).
    held [B, H, R, buckets] int64: the number of tokens in each bucket, which gives the rank of the bucket's next token.

    `append` costs O(T) for T new tokens, amortised, as for `KeyValues`.
    """

    __slots__ = ("_buffer", "_end", "held", "k", "place", "v")

    def __init__(
        self, k: Tensor, v: Tensor, place: Tensor, held: Tensor, _buffer: Buffer | None = None, _end: int = 0
    ) -> None:
        self.k, self.v, self.place, self.held = k, v, place, held
        self._buffer, self._end = _buffer, _end

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "keys and values"

    @staticmethod
    def empty(
        batch: int,
        heads: int,
        width: int,
        rounds: int,
        buckets: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> "HashedKeys":
        """The state before the first token: B rows, H heads of `width` channels."""
        nothing = torch.zeros(batch, 0, heads, width, device=device, dtype=dtype)
        place = torch.zeros(batch, 0, heads, rounds, device=device, dtype=torch.int32)
        held = torch.zeros(batch, heads, rounds, buckets, device=device, dtype=torch.int64)
        return HashedKeys(nothing, nothing.clone(), place, held)

    def append(self, k: Tensor, v: Tensor, place: Tensor, held: Tensor) -> "HashedKeys":
        """The state after T more tokens: k, v [B, T, H, D/H], place [B, T, H, R]; `held` is that after them."""
        if self.k.shape[1] == 0:
            return HashedKeys(k, v, place, held)
        (k, v, place), buffer, end = appended((self.k, self.v, self.place), (k, v, place), self._buffer, self._end)
        return HashedKeys(k, v, place, held, buffer, end)

    def __repr__(self) -> str:
        return f"HashedKeys(k={tuple(self.k.shape)}, v={tuple(self.v.shape)}, held={tuple(self.held.shape)})"


# PyTorch's tree functions see the tensors. A rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    HashedKeys,
    lambda s: ([s.k, s.v, s.place, s.held], None),
    lambda children, _: HashedKeys(*children),
    serialized_type_name="mnemos.HashedKeys",
)
