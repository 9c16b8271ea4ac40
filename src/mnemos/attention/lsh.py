"""LSH attention (Reformer, Kitaev et al. 2020) as a layer, exactly causal, with a state."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mnemos.config import AttentionConfig
from mnemos.memory.hashed_keys import HashedKeys
from mnemos.ops.lsh import attend, check_settings, places, unit
from mnemos.ops.precision import full_precision
from mnemos.registry import register
from mnemos.types import InputError, Output, check_heads, check_input


@register
@dataclass(frozen=True)
class LSHConfig(AttentionConfig):
    """softmax(q·k)·v over the keys k = q/|q| that share a bucket with q in one of the hash rounds."""

    name: ClassVar[str] = "lsh"
    rounds: int = 4
    chunk: int = 32  # tokens; a query reads at most 2·chunk of its bucket in a round
    buckets: int = 64  # even, and about N/chunk for sequences of N tokens
    scale: float | None = None  # of scores; None: 1/√(D/H). Reformer's own code, whose keys are as long as √D, takes 1

    def build(self, dim: int, num_heads: int, causal: bool = False, dropout: float = 0.0) -> "LSHAttention":
        """The layer, [B, T, dim] -> [B, T, dim]."""
        return LSHAttention(dim, num_heads, causal, dropout, self.rounds, self.chunk, self.buckets, self.scale)


class LSHAttention(nn.Module):
    """Multi-head LSH self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. See `mnemos.ops.lsh_attention` for what a token reads.
    Causal: the state is a `HashedKeys` of the N tokens so far; a sequence is split and resumed anywhere, because chunks
    are counted within buckets, which the future cannot move. A call costs O((N+T)·R·c·D) or, for T up to 3·R·c,
    O(T·(N+T)·(D+H·R)); memory O((N+T)·(D+H·R)) a row, and 8·H·R·buckets bytes of counts. Not causal: there is no state
    (None). Queries and hashes are computed in float32 whatever autocast says: a bucket must not depend on it.

    The rotations are drawn once, and saved: what was hashed with others could not be found again after a resume, and
    a model would not answer twice alike. (Reformer draws new ones for every batch.)
    Raises InputError where D is not divisible by H, for buckets that are not even, and rounds or a chunk below 1.
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
    def splits(self) -> str:
        """Where a sequence may be cut and resumed: "anywhere", or "never" (there is no state)."""
        return "anywhere" if self.causal else "never"

    def initial_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> HashedKeys | None:
        """The state of `batch_size` fresh rows; None is short for it."""
        if not self.causal:
            return None
        rounds, heads, width, half = self.rotations.shape
        weight = self.value.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        return HashedKeys.empty(batch_size, heads, width, rounds, 2 * half, device, dtype)

    def heads(self, x: Tensor, state: HashedKeys | None = None, mask: Tensor | None = None) -> Output:
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
                f"expected a state of {wanted[0]} rows, heads and channels, and counts {wanted[1]}, for a layer with "
                f"causal=True; found {found[0]}, {found[1]}, causal={self.causal}; use the layer's own initial_state"
            )

    def project(self, heads: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]."""
        return self.output(heads.flatten(2))

    def forward(self, x: Tensor, state: HashedKeys | None = None, mask: Tensor | None = None) -> Output:
        """See the class."""
        heads, state = self.heads(x, state, mask)
        return self.project(heads), state
