"""Bucket-union attention as a layer: hashed attention that is exactly causal and can be resumed from a state."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mnemos.config import AttentionConfig
from mnemos.memory.key_values import HashedKeys
from mnemos.ops.bucket_union import attend, check_settings, places, unit
from mnemos.registry import register
from mnemos.types import Device, InputError

from .multi_head import MultiHeadAttention, queries_and_values


@register
@dataclass(frozen=True)
class BucketUnionConfig(AttentionConfig):
    """softmax(q·k)·v over the keys k = q/|q| that share a bucket with q in one of the hash rounds.

    Attributes:
        rounds: the number of hash rounds R. Cost and accuracy grow with it.
        chunk: the number of tokens c per chunk. A query attends to at most 2·c tokens of its bucket per round.
        buckets: the number of buckets per round, an even number: about N/chunk for sequences of N tokens.
        scale: the factor of scores; None: 1/√(D/H). The Reformer uses 1.
    """

    name: ClassVar[str] = "bucket-union"
    rounds: int = 4
    chunk: int = 32
    buckets: int = 64
    scale: float | None = None

    def build(self, dim: int, num_heads: int, causal: bool = False, dropout: float = 0.0) -> "BucketUnionAttention":
        """The layer, [B, T, dim] -> [B, T, dim]."""
        return BucketUnionAttention(dim, num_heads, causal, dropout, self.rounds, self.chunk, self.buckets, self.scale)


class BucketUnionAttention(MultiHeadAttention[HashedKeys]):
    """Multi-head bucket-union self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. `mnemos.ops.bucket_union_attention` says which tokens a
    token attends to; the Reformer, as published, is `ReformerAttention`. Causal: the state is a `HashedKeys` of the N
    tokens so far, and it grows with every token. A sequence may be cut anywhere, because chunks are counted within
    buckets and later tokens do not move them. A call costs O((N+T)·R·c·D) time or, for T up to 3·R·c,
    O(T·(N+T)·(D+H·R)); memory per row is O((N+T)·(D+H·R)) and 8·H·R·buckets bytes of counts. Not causal: there is no
    state (None). Queries and hashes are computed in float32 under any autocast, because a bucket must not depend on it.

    The rotations are drawn once and saved. With other rotations, a resumed stream could not find its keys, and a model
    would answer differently each time. (`ReformerAttention` draws new rotations for every training forward.)
    Raises InputError if D is not divisible by H, buckets is odd, or rounds or chunk is below 1.
    """

    attend = staticmethod(attend)  # programs have another form of it
    rotations: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        rounds: int = 4,
        chunk: int = 32,
        buckets: int = 64,
        scale: float | None = None,
    ) -> None:
        super().__init__(dim, num_heads, causal, dropout)
        check_settings(rounds, buckets, chunk)
        self.chunk, self.scale = chunk, scale
        self.query, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.register_buffer("rotations", torch.randn(rounds, num_heads, dim // num_heads, buckets // 2))

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> HashedKeys:
        """No tokens."""
        rounds, heads, width, half = self.rotations.shape
        return HashedKeys.empty(batch_size, heads, width, rounds, 2 * half, device, dtype)

    def compute_heads(
        self, x: Tensor, state: HashedKeys | None, mask: Tensor | None
    ) -> tuple[Tensor, HashedKeys | None]:
        """The heads before projection, [B, T, H, D/H], and the new state."""
        q, v = queries_and_values(self.query, self.value, x, mask, self.num_heads)
        place, held = places(q, self.rotations, self.chunk, mask, None if state is None else state.held)
        k = unit(q).to(q.dtype)
        dropout = self.dropout if self.training else 0.0
        if not self.causal:
            return self.attend(q, k, v, place, self.chunk, False, self.scale, dropout), None
        new = HashedKeys(k, v, place, held)
        if state is not None:
            new = state.append(k.to(state.k.dtype), v.to(state.v.dtype), place, held)
        return self.attend(q, new.k, new.v, new.place, self.chunk, True, self.scale, dropout), new

    def check_state(self, state: HashedKeys, batch_size: int) -> None:
        """Raise InputError unless the keys are [B, N, H, D/H], with counts of this layer's rounds and buckets."""
        rounds, heads, width, half = self.rotations.shape
        wanted = (batch_size, heads, width), (batch_size, heads, rounds, 2 * half)
        found: object = type(state).__name__
        if isinstance(state, HashedKeys):
            found = (state.k.shape[0], *state.k.shape[2:]), tuple(state.held.shape)
        if wanted != found:
            raise InputError(
                f"expected a state of (rows, heads, channels) and counts {wanted}, found {found}; use the layer's own "
                "initial_state"
            )
