"""Memformer's two halves: an encoder that reads the memory, and a decoder that reads what was encoded before."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.attention.cross import CrossAttention, KeysValues
from mnemos.attention.position_bias import PositionBias
from mnemos.attention.softmax import SoftmaxAttention, biased, some
from mnemos.memory.key_values import KeyValues
from mnemos.types import Output

from .blocks import MLP, Activation, add


class Sizes(NamedTuple):
    """What the blocks of both halves have in common."""

    dim: int
    num_heads: int
    mlp: int
    activation: Activation
    dropout: float
    buckets: int
    max_distance: int


class ReadingBlock(nn.Module):
    """Self-attention, an attention to each of some sources, MLP: each with a norm before it and a residual around it.

    x [B, T, D], state of the self-attention, mask [B, T], bias of its scores, keys and values of each source and
    which of them are visible -> y [B, T, D], state.
    """

    def __init__(self, sizes: Sizes, causal: bool, sources: int) -> None:
        super().__init__()
        width, heads, mlp, activation, dropout = sizes[:5]
        self.attention = SoftmaxAttention(width, heads, causal, dropout)
        self.attention_norm = nn.LayerNorm(width)
        self.reads: Any = nn.ModuleList(CrossAttention(width, heads, dropout) for _ in range(sources))
        self.read_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(sources))
        self.mlp, self.mlp_norm = MLP(width, mlp, activation, dropout), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def keys_values(self, sources: Sequence[Tensor]) -> tuple[KeysValues, ...]:
        """Of sources [B, N, D], what `forward` reads."""
        return tuple(read.keys_values(source) for read, source in zip(self.reads, sources, strict=True))

    def forward(
        self,
        x: Tensor,
        state: KeyValues | None,
        mask: Tensor | None,
        bias: Tensor | None,
        sources: Sequence[KeysValues],
        visible: Sequence[Tensor | None],
    ) -> Output:
        """See the class."""
        y, state = self.attention(self.attention_norm(x), state, mask, bias)
        x = add(x, self.dropout(y))
        for read, norm, source, seen in zip(self.reads, self.read_norms, sources, visible, strict=True):
            x = add(x, self.dropout(read(norm(x), source, seen)))
        return add(x, self.dropout(self.mlp(self.mlp_norm(x)))), state


class MemformerEncoder(nn.Module):
    """A segment, read both ways, that reads the slots in every block (eq. 1–3): x [B, L, D] -> y [B, L + cls, D].

    mask [B, L] bool; slots [B, K, D], or None where the model has no memory. `cls` learned tokens are appended, which
    all others see and whose outputs come last. What padding puts out means nothing.
    """

    def __init__(self, sizes: Sizes, layers: int, cls: int, memory: bool) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(cls, sizes.dim) * sizes.dim**-0.5) if cls else None
        self.bias = PositionBias(sizes.num_heads, sizes.buckets, sizes.max_distance, both=True)
        self.blocks: Any = nn.ModuleList(ReadingBlock(sizes, False, int(memory)) for _ in range(layers))
        self.norm = nn.LayerNorm(sizes.dim)

    def forward(self, x: Tensor, mask: Tensor | None, slots: Tensor | None) -> Tensor:
        """See the class."""
        if self.cls is not None:
            x = torch.cat([x, self.cls.expand(len(x), -1, -1)], 1)
            mask = None if mask is None else torch.cat([mask, mask.new_ones(len(x), len(self.cls))], 1)
        place = torch.arange(x.shape[1], device=x.device)
        bias = biased(None if mask is None else some(mask)[:, None, None], self.bias(place - place[:, None])[None])
        sources = () if slots is None else (slots,)
        for block in self.blocks:
            x, _ = block(x, None, None, bias, block.keys_values(sources), [None] * len(sources))
        return self.norm(x)


class Read(NamedTuple):
    """What a decoder reads: the segment before, encoded [B, L, D], valid [B, L] bool; slots [B, K, D], if it does.

    Its last place is the one before the present segment's first. Encodings that are not valid are 0.
    """

    encoded: Tensor
    valid: Tensor
    slots: Tensor | None


class DecoderCache(NamedTuple):
    """A decoder block's memory within a segment: its own keys and values so far, and those of what it reads.

    Rows may have come to different places; each one's tokens are the last columns, and the others are not valid. Where
    all rows stand at the start of a segment, all of it is empty: [B, 0, ..].
    """

    own: KeyValues
    sources: tuple[KeysValues, ...]


class MemformerDecoder(nn.Module):
    """The present segment, read causally, with attention to the encoded segment before and, perhaps, to the slots.

    x [B, t, D], mask [B, t], where in its segment each row stands, what they read and the caches so far (None: all
    rows begin) -> y [B, t, D] and the caches, one a block. No token may be of another segment than its row's first.
    """

    def __init__(self, sizes: Sizes, layers: int, memory: bool) -> None:
        super().__init__()
        self.sizes, self.memory = sizes, memory
        self.own_bias, self.read_bias = (
            PositionBias(sizes.num_heads, sizes.buckets, sizes.max_distance) for _ in range(2)
        )
        self.blocks: Any = nn.ModuleList(ReadingBlock(sizes, True, 1 + memory) for _ in range(layers))
        self.norm = nn.LayerNorm(sizes.dim)

    def empty(self, batch_size: int, device: Any = None, dtype: Any = None) -> tuple[DecoderCache, ...]:
        """The caches at the start of a segment."""
        heads, width = self.sizes.num_heads, self.sizes.dim // self.sizes.num_heads

        def none() -> Tensor:
            return torch.zeros(batch_size, 0, heads, width, device=device, dtype=dtype)

        return tuple(
            DecoderCache(
                KeyValues.empty(batch_size, heads, width, device, dtype),
                tuple((none(), none()) for _ in range(1 + self.memory)),
            )
            for _ in self.blocks
        )

    def forward(
        self, x: Tensor, mask: Tensor | None, place: list[int], read: Read, caches: tuple[DecoderCache, ...] | None
    ) -> tuple[Tensor, tuple[DecoderCache, ...]]:
        """See the class."""
        t, device = x.shape[1], x.device
        before = caches[0].own.k.shape[1] if caches else 0
        query, key = torch.arange(before, before + t, device=device), torch.arange(before + t, device=device)
        own = self.own_bias(key - query[:, None])[None]
        # A place of its own for every row only where they differ.
        stands = torch.tensor(place if len(set(place)) > 1 else place[:1], device=device)
        query = (stands[:, None] + torch.arange(t, device=device))[..., None]
        length = read.encoded.shape[1]
        encoded = self.read_bias(torch.arange(-length, 0, device=device) - query)
        visible = [biased(some(read.valid)[:, None, None], encoded), *[None] * self.memory]
        given = [read.encoded] if read.slots is None else [read.encoded, read.slots]
        after = []
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches else None
            # Some row begins, and reads what was encoded since: of the others' the same comes out again.
            anew = cache is None or 0 in place
            sources = block.keys_values(given) if anew else cache.sources  # type: ignore[union-attr]
            x, state = block(x, None if cache is None else cache.own, mask, own, sources, visible)
            after.append(DecoderCache(state, sources))
        return self.norm(x), tuple(after)

    def closed(self, caches: tuple[DecoderCache, ...], place: list[int], done: list[bool]) -> tuple[DecoderCache, ...]:
        """The caches without the tokens of rows that are `done` with their segment; `place`: where the others stand."""
        if not any(done):
            return caches
        weight = self.norm.weight
        if all(done):
            return self.empty(len(done), weight.device, weight.dtype)
        rows, longest = torch.tensor(done, device=weight.device), max(place)

        def trimmed(own: KeyValues) -> KeyValues:
            own = own.last(longest)
            # No longer a stretch of a buffer, which knows the tokens as valid.
            return KeyValues(own.k, own.v, own.valid & ~rows[:, None], own.seen.masked_fill(rows, 0))

        return tuple(DecoderCache(trimmed(cache.own), cache.sources) for cache in caches)
