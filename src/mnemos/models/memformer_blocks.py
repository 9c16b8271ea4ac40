"""The two halves of Memformer: an encoder that reads the memory, and a decoder that reads the previous encoding."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.attention.cross import CrossAttention, KeysValues
from mnemos.attention.relative import PositionBias
from mnemos.attention.softmax import SoftmaxAttention, add_bias, open_empty_rows
from mnemos.memory.grid import Stretch
from mnemos.memory.key_values import BranchedKeyValues, KeyValues, pad_front
from mnemos.ops.dropout import Dropout
from mnemos.types import Device

from .blocks import Activation, Norm, add_into, mlp_of, module_list, norm_of


class Sizes(NamedTuple):
    """The settings that the blocks of both halves share."""

    dim: int
    num_heads: int
    mlp: int
    activation: Activation
    dropout: float
    buckets: int
    max_distance: int
    norm: Norm


class ReadingBlock(nn.Module):
    """Self-attention, an attention to each of several sources, MLP: each with a norm before it and a residual.

    x [B, T, D], state of the self-attention, mask [B, T], bias of its scores, keys and values of each source, and the
    `visible` argument of each attention to a source -> y [B, T, D], state.
    """

    def __init__(self, sizes: Sizes, causal: bool, sources: int) -> None:
        super().__init__()
        width, heads, mlp, activation, dropout = sizes[:5]
        self.attention = SoftmaxAttention(width, heads, causal, dropout)
        self.attention_norm = norm_of(sizes.norm, width)
        self.reads = module_list(CrossAttention(width, heads, dropout) for _ in range(sources))
        self.read_norms = module_list(norm_of(sizes.norm, width) for _ in range(sources))
        self.mlp, self.mlp_norm = mlp_of(width, mlp, activation, dropout), norm_of(sizes.norm, width)
        self.dropout = Dropout(dropout)

    def keys_values(self, sources: Sequence[Tensor]) -> tuple[KeysValues, ...]:
        """The keys and values of sources [B, N, D], for `forward`."""
        return tuple(read.keys_values(source) for read, source in zip(self.reads, sources, strict=True))

    def forward(
        self,
        x: Tensor,
        state: KeyValues | None,
        mask: Tensor | None,
        bias: Tensor | None,
        sources: Sequence[KeysValues],
        visible: Sequence[Tensor | None],
    ) -> tuple[Tensor, KeyValues | None]:
        """See the class."""
        y, after = self.attention(self.attention_norm(x), state, mask, bias)
        assert not isinstance(after, BranchedKeyValues)  # as no state that was given
        x = add_into(x, self.dropout(y))
        for read, norm, source, seen in zip(self.reads, self.read_norms, sources, visible, strict=True):
            x = add_into(x, self.dropout(read(norm(x), source, seen)))
        return add_into(x, self.dropout(self.mlp(self.mlp_norm(x)))), after

    if TYPE_CHECKING:
        __call__ = forward


class MemformerEncoder(nn.Module):
    """A bidirectional encoder that attends to the slots in every block (eq. 1–3): x [B, L, D] -> y [B, L + cls, D].

    slots [B, K, D], or None if the model has no memory. `cls` learned tokens are appended, which all tokens attend to
    and whose outputs come last.
    """

    def __init__(self, sizes: Sizes, layers: int, cls: int, memory: bool) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(cls, sizes.dim) * sizes.dim**-0.5) if cls else None
        self.bias = PositionBias(sizes.num_heads, sizes.buckets, sizes.max_distance, both=True)
        self.blocks = module_list(ReadingBlock(sizes, False, int(memory)) for _ in range(layers))
        self.norm = norm_of(sizes.norm, sizes.dim)

    def forward(self, x: Tensor, slots: Tensor | None) -> Tensor:
        """See the class."""
        if self.cls is not None:
            x = torch.cat([x, self.cls.expand(x.shape[0], -1, -1)], 1)
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(place - place[:, None])[None]
        sources = () if slots is None else (slots,)
        for block in self.blocks:
            x, _ = block(x, None, None, bias, block.keys_values(sources), [None] * len(sources))
        return self.norm(x)

    if TYPE_CHECKING:
        __call__ = forward


class Read(NamedTuple):
    """What a decoder attends to: the previous segment, encoded [B, L, D], valid [B, L] bool; slots [B, K, D] or None.

    The last place of `encoded` is the one before the first of the present segment. Invalid encodings are 0.
    """

    encoded: Tensor
    valid: Tensor
    slots: Tensor | None

    @property
    def given(self) -> list[Tensor]:
        """The sources of a block."""
        return [self.encoded] if self.slots is None else [self.encoded, self.slots]


class StretchRead(NamedTuple):
    """A stretch of tokens, and what the decoder reads for it."""

    stretch: Stretch
    read: Read


@exportable
class DecoderCache(NamedTuple):
    """A decoder block's cache within a segment: its own keys and values so far, and those of its sources.

    Rows may be at different places; the tokens of a row are the last columns, and the other columns are not valid. If
    all rows are at the start of a segment, all tensors are empty: [B, 0, ..].
    """

    own: KeyValues
    sources: tuple[KeysValues, ...]

    @property
    def memory_name(self) -> None:
        """None: the cache belongs to a place within the segment, which the state counts elsewhere."""
        return None

    def widened(self, length: int, sources: list[int]) -> "DecoderCache":
        """The same cache with space for `length` tokens, which are not valid where new, and for all sources."""
        pairs = zip(self.sources, sources, strict=True)
        return DecoderCache(self.own.widened(length), tuple((pad_front(k, n), pad_front(v, n)) for (k, v), n in pairs))


class MemformerDecoder(nn.Module):
    """A causal decoder of the present segment that attends to the previous encoding and, with `memory`, to the slots.

    x [B, t, D], mask [B, t], the place of each row in its segment, what the rows attend to and the caches so far (None:
    all rows are at the start) -> y [B, t, D] and the caches, one per block. All tokens of a row must be of one segment.
    """

    def __init__(self, sizes: Sizes, layers: int, memory: bool) -> None:
        super().__init__()
        self.sizes, self.memory = sizes, memory
        self.own_bias, self.read_bias = (
            PositionBias(sizes.num_heads, sizes.buckets, sizes.max_distance) for _ in range(2)
        )
        self.blocks = module_list(ReadingBlock(sizes, True, 1 + memory) for _ in range(layers))
        self.norm = norm_of(sizes.norm, sizes.dim)

    def empty(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> tuple[DecoderCache, ...]:
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
        self,
        x: Tensor,
        mask: Tensor | None,
        place: list[int] | Tensor,
        read: Read,
        caches: tuple[DecoderCache, ...] | None,
    ) -> tuple[Tensor, tuple[DecoderCache, ...]]:
        """See the class."""
        t, device = x.shape[1], x.device
        before = caches[0].own.k.shape[1] if caches else 0
        query, key = torch.arange(before, before + t, device=device), torch.arange(before + t, device=device)
        own = self.own_bias(key - query[:, None])[None]
        # One place for all rows, unless they differ.
        if isinstance(place, list):
            stands = torch.tensor(place if len(set(place)) > 1 else place[:1], device=device)
        else:
            stands = place
        query = (stands[:, None] + torch.arange(t, device=device))[..., None]
        length = read.encoded.shape[1]
        encoded = self.read_bias(torch.arange(-length, 0, device=device) - query)
        visible = [add_bias(open_empty_rows(read.valid)[:, None, None], encoded), *[None] * self.memory]
        given = read.given
        after = []
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches else None
            # A row at the start of a segment reads a new encoding; for the other rows the result is the same again.
            begins = cache is None or (isinstance(place, list) and 0 in place)
            sources = block.keys_values(given) if cache is None or begins else cache.sources
            x, state = block(x, None if cache is None else cache.own, mask, own, sources, visible)
            assert state is not None  # the block is causal
            after.append(DecoderCache(state, sources))
        return self.norm(x), tuple(after)

    if TYPE_CHECKING:
        __call__ = forward

    def closed(
        self, caches: tuple[DecoderCache, ...], stretch: Stretch, mask: Tensor | None
    ) -> tuple[DecoderCache, ...]:
        """The caches after a stretch, without padding (mask [B, t]) and the tokens of rows that are done."""
        done, weight = stretch.done, self.norm.weight
        if not any(done) and mask is None:
            return caches
        if not any(stretch.after):
            return self.empty(len(done), weight.device, weight.dtype)
        rows, longest = torch.tensor(done, device=weight.device), max(stretch.after)

        def trim(own: KeyValues) -> KeyValues:
            own = (own if mask is None else own.packed()).last(longest)
            # Without the buffer, in which these tokens are valid.
            return KeyValues(own.k, own.v, own.valid & ~rows[:, None], own.seen.masked_fill(rows, 0))

        return tuple(DecoderCache(trim(cache.own), cache.sources) for cache in caches)
