"""Reformer attention (Kitaev, Kaiser and Levskaya 2020) as a layer, as published."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.config import AttentionConfig
from mnemos.memory.key_values import KeyValues, check_key_values
from mnemos.ops.dense_layer import Linear
from mnemos.ops.precision import full_precision
from mnemos.registry import register
from mnemos.types import Device, InputError

from .operator import bucket_factors, check_settings, draw_rotations, reformer_attention


@register
@dataclass(frozen=True)
class ReformerConfig(AttentionConfig):
    """Locality-sensitive hashing as published: attention in chunks of the tokens sorted by hash, over several rounds.

    Attributes:
        rounds: the number of hash rounds R. Cost and accuracy grow with it.
        chunk: the number of tokens c per chunk. Sequences of at most c tokens get softmax attention.
        buckets: the number of buckets per round, an even number; None: twice the number of chunks, 2·⌈T/c⌉.
        look_back: the number of chunks before its own that a token reads.
        look_ahead: the number of chunks after its own that a token reads.
        seed: of the rotations outside training, so that an evaluation repeats; None: new ones for each forward.
    """

    name: ClassVar[str] = "reformer"
    rounds: int = 4
    chunk: int = 32
    buckets: int | None = None
    look_back: int = 1
    look_ahead: int = 0
    seed: int | None = 0

    def build(self, dim: int, num_heads: int, causal: bool = False, dropout: float = 0.0) -> "ReformerAttention":
        """The layer, [B, T, dim] -> [B, T, dim]."""
        return ReformerAttention(dim, num_heads, causal, dropout, self)


class ReformerAttention(MultiHeadAttention[KeyValues]):
    """Multi-head Reformer self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. Queries and keys are one projection; no projection has a
    bias. `reformer_attention` has the equations. Every training forward draws new rotations from PyTorch's
    generator, as the paper does, and none if T ≤ chunk. In evaluation the rotations come from `settings.seed`.

    causal=True: a token reads only itself and earlier tokens. Yet later tokens move the borders of chunks, and so
    decide which earlier tokens it reads (`future_free` is False); likewise the padding (`padding_free`). The state is a
    `KeyValues` of the N tokens so far, whose k are the shared queries and keys. A call sorts all N+T tokens and returns
    the outputs of the last T; what earlier calls returned stays as it was. A sequence in parts therefore differs from
    the same sequence as a whole (splits "segments"). Not causal: there is no state (None).

    Cost of a call: O((N+T)·R·buckets·D) to hash (√buckets beyond 128), and O((N+T)·R·c·D) to attend, or O(T·R·c·D) for
    T up to (N+T)/c. The state is O(N·D) memory per row. Queries and hashes are computed in float32 under any autocast.
    Raises InputError if D is not divisible by H, buckets is odd, or rounds or chunk is below 1.
    """

    future_free = False
    padding_free = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        settings: ReformerConfig | None = None,
    ) -> None:
        super().__init__(dim, num_heads, causal, dropout, splits="segments")
        self.settings = s = settings or ReformerConfig()
        check_settings(s.rounds, s.chunk, s.buckets, s.look_back, s.look_ahead)
        self.query_key, self.value = Linear(dim, dim, bias=False), Linear(dim, dim, bias=False)
        self.output = Linear(dim, dim, bias=False)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> KeyValues:
        """No tokens."""
        return KeyValues.empty(batch_size, self.num_heads, self.dim // self.num_heads, device, dtype)

    def check_state(self, state: KeyValues, batch_size: int) -> None:
        """Raise InputError unless the keys are [B, N, H, D/H]."""
        check_key_values(state, batch_size, self.num_heads, self.dim // self.num_heads)

    def rotations(self, length: int, device: Device = None) -> tuple[Tensor, ...]:
        """The rotations of one forward of `length` tokens: see `draw_rotations`."""
        s = self.settings
        generator = None
        if not self.training and s.seed is not None:
            generator = torch.Generator().manual_seed(s.seed)
        factors = bucket_factors(length, s.chunk, s.buckets)
        return draw_rotations(s.rounds, self.num_heads, self.dim // self.num_heads, factors, generator, device)

    def compute_heads(self, x: Tensor, state: KeyValues | None, mask: Tensor | None) -> tuple[Tensor, KeyValues | None]:
        if torch.compiler.is_exporting():
            raise InputError(
                "Reformer attention draws rotations for the number of tokens, which an exported program leaves open; "
                "use another attention"
            )
        b, t, _ = x.shape
        v = self.value(x).unflatten(-1, (self.num_heads, -1))
        with full_precision(x.device.type):  # under any autocast, because the bucket of a token must not depend on it
            qk = self.query_key(x.to(self.query_key.weight.dtype)).unflatten(-1, (self.num_heads, -1))
        if not self.causal:
            return self._attend(qk, v, mask, t), None
        if state is None:
            return self._attend(qk, v, mask, t), self.empty(b, x.device, v.dtype).append(qk, v, mask)
        new = state.append(qk.to(state.k.dtype), v.to(state.v.dtype), mask)
        return self._attend(new.k, new.v, new.valid, t).to(v.dtype), new

    def _attend(self, qk: Tensor, v: Tensor, valid: Tensor | None, last: int) -> Tensor:
        """Outputs of the last tokens. Where one chunk holds all tokens no rotation is drawn."""
        s, n = self.settings, qk.shape[1]
        unused = (qk.new_zeros(s.rounds, 1, qk.shape[3], 1),)
        rotations = self.rotations(n, qk.device) if n > s.chunk else unused
        dropout = self.active_dropout
        return reformer_attention(
            qk, v, rotations, s.chunk, self.causal, valid, s.look_back, s.look_ahead, dropout, last=last
        )
