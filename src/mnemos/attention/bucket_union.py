"""Bucket-union attention as a layer: hashed attention that is exactly causal and can be resumed from a state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from mnemos.config import AttentionConfig
from mnemos.memory.hashed_keys import HashedKeys
from mnemos.ops.bucket_union import attend, check_settings, places, unit
from mnemos.ops.precision import full_precision
from mnemos.registry import register
from mnemos.types import Device, InputError, Splits, StateKind, check_heads, check_input


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


class BucketUnionAttention(nn.Module):
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

    rows_independent = True
    state_gradient = True
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
        super().__init__()
        check_heads(dim, num_heads)
        check_settings(rounds, buckets, chunk)
        self.dim, self.num_heads, self.causal, self.dropout = dim, num_heads, causal, dropout
        self.chunk, self.scale = chunk, scale
        self.query, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.register_buffer("rotations", torch.randn(rounds, num_heads, dim // num_heads, buckets // 2))

    @property
    def splits(self) -> Splits:
        """Where a sequence may be cut and resumed: "anywhere", or "never" without a state."""
        return "anywhere" if self.causal else "never"

    @property
    def state_kind(self) -> StateKind:
        """Causal: "growing". Not causal: "none"."""
        return "growing" if self.causal else "none"

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> HashedKeys | None:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        if not self.causal:
            return None
        rounds, heads, width, half = self.rotations.shape
        weight = self.value.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        return HashedKeys.empty(batch_size, heads, width, rounds, 2 * half, device, dtype)

    def heads(
        self, x: Tensor, state: HashedKeys | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, HashedKeys | None]:
        """The heads before projection, [B, T, H, D/H], and the new state."""
        check_input(x, self.dim)
        v = self.value(x).unflatten(-1, (self.num_heads, -1))
        with full_precision(x.device.type):
            q = self.query(x.to(self.query.weight.dtype)).unflatten(-1, (self.num_heads, -1))
        if mask is not None:
            q, v = (tensor.masked_fill(~mask[..., None, None], 0) for tensor in (q, v))
        if state is not None:
            self._check(state, len(x))
        place, held = places(q, self.rotations, self.chunk, mask, None if state is None else state.held)
        k = unit(q).to(q.dtype)
        dropout = self.dropout if self.training else 0.0
        if not self.causal:
            return attend(q, k, v, place, self.chunk, False, self.scale, dropout), None
        new = HashedKeys(k, v, place, held)
        if state is not None:
            new = state.append(k.to(state.k.dtype), v.to(state.v.dtype), place, held)
        return attend(q, new.k, new.v, new.place, self.chunk, True, self.scale, dropout), new

    def _check(self, state: HashedKeys, batch: int) -> None:
        rounds, heads, width, half = self.rotations.shape
        wanted = (batch, heads, width), (batch, heads, rounds, 2 * half)
        found = (state.k.shape[0], *state.k.shape[2:]), tuple(state.held.shape)
        if not self.causal or wanted != found:
            raise InputError(
                f"expected a state of (rows, heads, channels) {wanted[0]} and counts {wanted[1]}, for a layer with "
                f"causal=True; found {found[0]}, {found[1]}, causal={self.causal}; use the layer's own initial_state"
            )

    def project(self, heads: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]."""
        return self.output(heads.flatten(2))

    def forward(
        self, x: Tensor, state: HashedKeys | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, HashedKeys | None]:
        """See the class."""
        heads, state = self.heads(x, state, mask)
        return self.project(heads), state

    if TYPE_CHECKING:
        __call__ = forward
