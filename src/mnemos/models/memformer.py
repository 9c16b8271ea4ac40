"""Memformer (Wu et al. 2022): an encoder writes each segment into slots, and a decoder predicts the next segment.

From top to bottom: the settings; the encoder, which reads the slots, and the decoder, which reads the previous encoding
and caches what it needs within a segment; the model, which encodes and writes the segments of every row one after the
other, and decodes them. What it shares with the other models of segments is in segments.py.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.attention.relative import PositionBias
from mnemos.attention.softmax import SoftmaxAttention, add_bias, open_empty_rows
from mnemos.config import ModelConfig, with_signature
from mnemos.memory.grid import Stretch, Unfinished, stretches
from mnemos.memory.slots import SlotMemory, SlotsConfig, SlotState
from mnemos.ops.padding import PackedRows
from mnemos.ops.positions import count_seen
from mnemos.registry import register
from mnemos.types import Device, InputError

from .segments import SegmentCache, SegmentedModel, change_rows
from .shared import checked_config, init_weights, language_head
from .transformer import Activation, blocks_of, dropout_of, norm_of


@register
@dataclass(frozen=True)
class MemformerConfig(ModelConfig):
    """Memformer: slots that are read and written once a segment.

    `cls` and `memory.radius` take the preset's value where they are None.

    Attributes:
        vocab_size: the number of tokens.
        dim: the width D of every layer's input and output.
        encoder_layers: those that read a segment and its slots.
        decoder_layers: those that predict the tokens.
        num_heads: of each attention; divides `dim`.
        mlp: hidden width of the MLPs.
        segment: L, the number of tokens between two writes.
        preset: "paper": radius 1 and two CLS tokens, for its "some". "mnemos": radius √D and none.
        memory: the settings of the slots; with 0 slots there is no memory.
        decoder_reads: the decoder attends to the slots as well as to the encoded segment. §3.1 conditions it on M_{t-1}
            in the equation and on the encoder's output in the text; preset="paper" follows the text.
        cls: the number of learned tokens after each segment, which the writer attends to and the decoder does not.
        bos: the token whose encoding the decoder of a new row attends to; None: a learned one.
        buckets: of relative positions; the last one holds all distances from `max_distance`.
        max_distance: see `buckets`.
        activation: of the MLPs.
        dropout: the share of hidden values that training sets to zero.
        tied: the head shares the embedding's weights.
        cutoffs: those of an adaptive softmax in a tied head; without any there is none.
        norm: of the blocks, RMSNorm ("rms") or LayerNorm ("pre").
    """

    name: ClassVar[str] = "memformer"
    vocab_size: int = 256
    dim: int = 128
    encoder_layers: int = 4
    decoder_layers: int = 8
    num_heads: int = 4
    mlp: int = 256
    segment: int = 28
    preset: Literal["paper", "mnemos"] = "mnemos"
    memory: SlotsConfig = field(default_factory=SlotsConfig)
    decoder_reads: bool = False
    cls: int | None = None
    bos: int | None = None
    buckets: int = 32
    max_distance: int = 128
    activation: Activation = "gelu"
    dropout: float = 0.0
    tied: bool = False
    cutoffs: tuple[int, ...] = ()
    norm: Literal["rms", "pre"] = "pre"

    def build(self) -> "Memformer":
        return Memformer(self)

    def resolved(self) -> "MemformerConfig":
        """The same with the preset's switches set, where they are None. Radius None still means √D."""
        cls, radius = (2, 1.0) if self.preset == "paper" else (0, None)
        memory = self.memory if self.memory.radius is not None else dataclasses.replace(self.memory, radius=radius)
        return dataclasses.replace(self, memory=memory, cls=cls if self.cls is None else self.cls)


Past = tuple[Tensor, Tensor, SlotState | None]  # of the segments before: encoded, valid and memory of a state


class MemformerEncoder(nn.Module):
    """A bidirectional encoder that attends to the slots in every block (eq. 1–3): x [B, L, D] -> y [B, L + cls, D].

    slots [B, K, D], or None if the model has no memory. `cls` learned tokens are appended, which all tokens attend to
    and whose outputs come last.
    """

    def __init__(self, c: MemformerConfig) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(c.cls, c.dim) * c.dim**-0.5) if c.cls else None
        self.bias = PositionBias(c.num_heads, c.buckets, c.max_distance, both=True)
        own = (SoftmaxAttention(c.dim, c.num_heads, False, c.dropout) for _ in range(c.encoder_layers))
        self.blocks = blocks_of(c, own, reads=int(c.memory.slots > 0))
        self.norm = norm_of(c.norm, c.dim)

    def forward(self, x: Tensor, slots: Tensor | None) -> Tensor:
        if self.cls is not None:
            x = torch.cat([x, self.cls.expand(x.shape[0], -1, -1)], 1)
        index = torch.arange(x.shape[1], device=x.device)
        bias = self.bias(index - index[:, None])[None]
        sources = () if slots is None else (slots,)
        for block in self.blocks:
            x, _ = block(x, None, None, block.keys_values(sources), [None] * len(sources), bias)
        return self.norm(x)

    if TYPE_CHECKING:
        __call__ = forward


class Read(NamedTuple):
    """What a decoder attends to: the previous segment, encoded [B, L, D], valid [B, L] bool; slots [B, K, D] or None.

    The last token of `encoded` is the one before the first of the present segment. Invalid encodings are 0.
    """

    encoded: Tensor
    valid: Tensor
    slots: Tensor | None

    @property
    def sources(self) -> list[Tensor]:
        """What each block of the decoder has an attention to."""
        return [self.encoded] if self.slots is None else [self.encoded, self.slots]


class MemformerDecoder(nn.Module):
    """A causal decoder of the present segment that attends to the previous encoding and, with `memory`, to the slots.

    x [B, t, D], mask [B, t], where in its segment each row starts, what the rows attend to and the caches so far (None:
    all rows begin a segment) -> y [B, t, D] and the caches, one per block. All tokens of a row must be of one segment.
    """

    def __init__(self, c: MemformerConfig) -> None:
        super().__init__()
        self.memory = c.memory.slots > 0 and c.decoder_reads
        self.own_bias, self.read_bias = (PositionBias(c.num_heads, c.buckets, c.max_distance) for _ in range(2))
        own = (SoftmaxAttention(c.dim, c.num_heads, True, c.dropout) for _ in range(c.decoder_layers))
        self.blocks = blocks_of(c, own, reads=1 + self.memory)
        self.norm = norm_of(c.norm, c.dim)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        start: list[int] | Tensor,
        read: Read,
        caches: tuple[SegmentCache, ...] | None,
    ) -> tuple[Tensor, tuple[SegmentCache, ...]]:
        t, device = x.shape[1], x.device
        # --- biases of the scores, by distances to its own keys and to the encoded tokens before ---
        before = caches[0].own.k.shape[1] if caches else 0
        query, key = torch.arange(before, before + t, device=device), torch.arange(before + t, device=device)
        own = self.own_bias(key - query[:, None])[None]
        if isinstance(start, list):  # one position for all rows, unless they differ
            starts = torch.tensor(start if len(set(start)) > 1 else start[:1], device=device)
        else:
            starts = start
        query = (starts[:, None] + torch.arange(t, device=device))[..., None]
        encoded = self.read_bias(torch.arange(-read.encoded.shape[1], 0, device=device) - query)
        visible = [add_bias(open_empty_rows(read.valid)[:, None, None], encoded), *[None] * self.memory]
        # --- blocks ---
        after = []
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches else None
            # A row at the start of a segment reads a new encoding; for the other rows the result is the same again.
            begins = cache is None or (isinstance(start, list) and 0 in start)
            sources = block.keys_values(read.sources) if cache is None or begins else cache.others
            x, state = block(x, None if cache is None else cache.own, mask, sources, visible, own)
            after.append(SegmentCache(state, sources))
        return self.norm(x), tuple(after)

    if TYPE_CHECKING:
        __call__ = forward


@exportable
class MemformerState(NamedTuple):
    """Where each row is in its sequence; a row of zeros is a new row.

    seen [B] int64: valid tokens since the row began. memory: its slots (None: the model has none). encoded [B, L, D],
    valid [B, L] bool: the previous segment. pending [B, L] int64, pending_valid [B, L] bool: the present one so far.
    layers: the decoder's caches within the segment, which are empty at its start. There the state has K·D + L·D numbers
    per row; within a segment each decoder layer adds 2·D for each token so far, each encoded token and, with
    decoder_reads, each slot.
    """

    seen: Tensor
    memory: SlotState | None
    encoded: Tensor
    valid: Tensor
    pending: Tensor
    pending_valid: Tensor
    layers: tuple[SegmentCache, ...]


@with_signature(MemformerConfig)
class Memformer(SegmentedModel):
    """`logits, state = model(x, state=None, mask=None)`: a language model with a memory of slots and constant cost.

    x [B, T] int64 token ids, T at least 1 in any call; mask [B, T] bool, True = valid; logits [B, T, V], logits[:, i]
    predict the token after x[:, i]. The tokens of a row are read in segments s_1, s_2, … of length L from its start:

        E_t = Encoder(s_t, M_{t−1})          M_t = Write(M_{t−1}, E_t)          logits = Decoder(s_t, E_{t−1})

    The decoder attends to the previous encoded segment (and, with decoder_reads, to M_{t−1}). Reading token by token
    gives the same outputs as reading whole segments. E_0 is a single token, BOS, encoded with M_0. It is not written:
    it is the same for every row, so a write would only move the start, which is learned. Padding takes no place in a
    segment.

    Positions are relative: a learned bias per head in the self-attentions, and from a decoder's tokens to the encoded
    ones. BOS is at the position before a row's first token. Cost: O(T·(L + K)·D + T·D²) time, and per segment and
    encoder layer O(K·D²) for the keys and values of the slots. Rows may be anywhere in their segments; a
    call then runs more and shorter pieces.

    `Memformer(MemformerConfig(...))` or `Memformer(dim=64, ...)`; `model.config` has the preset's switches set.
    Raises InputError for impossible shapes, tokens outside the vocabulary, and a state of another model or batch.
    """

    def __init__(self, config: MemformerConfig | None = None, **fields: Any) -> None:
        super().__init__()
        least = {"vocab_size": 1, "encoder_layers": 1, "decoder_layers": 1, "mlp": 1, "segment": 1}
        c = checked_config(self, config or MemformerConfig(), fields, **least)
        if c.cls is not None and c.cls < 0:
            raise InputError(f"cls: expected at least 0, or None for the preset's, found {c.cls}; use 0 for none")
        if c.bos is not None and not 0 <= c.bos < c.vocab_size:
            raise InputError(f"bos: expected a token, 0 to {c.vocab_size - 1}, or None, found {c.bos}; change it")
        if c.decoder_reads and not c.memory.slots:
            raise InputError(
                "decoder_reads: expected slots to read, found memory.slots 0; raise it or use decoder_reads=False"
            )
        self.config = c = c.resolved()
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.bos = nn.Embedding(1, c.dim) if c.bos is None else None
        self.dropout = dropout_of(c.dropout)
        self.encoder = MemformerEncoder(c)
        self.memory = SlotMemory(c.dim, c.num_heads, c.memory) if c.memory.slots else None
        self.decoder = MemformerDecoder(c)
        self.head = language_head(self.embedding, c.tied, c.cutoffs)
        init_weights(self, [self.encoder.blocks, self.decoder.blocks] if c.norm == "rms" else [], c.tied)
        self.attends_to = (c.segment, c.memory.slots)[: 1 + self.decoder.memory]
        self.cached_blocks = c.decoder_layers
        self.finish()

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> MemformerState:
        c, weight = self.config, self.embedding.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        tokens = torch.zeros(batch_size, c.segment, device=device, dtype=torch.int64)
        return MemformerState(
            torch.zeros(batch_size, device=device, dtype=torch.int64),
            None if self.memory is None else self.memory.initial_state(batch_size, device, dtype),
            torch.zeros(batch_size, c.segment, c.dim, device=device, dtype=dtype),
            torch.zeros_like(tokens, dtype=torch.bool),
            tokens,
            torch.zeros_like(tokens, dtype=torch.bool),
            self.empty_caches(batch_size, device, dtype),
        )

    def forward(
        self, x: Tensor, state: MemformerState | None = None, mask: Tensor | None = None, only: Tensor | None = None
    ) -> tuple[Tensor, MemformerState]:
        """See the class. only [B, T] bool: the outputs at these positions alone, [n, V]."""
        rows, steps, after, caches = self._encode(x, state, mask)
        b, length, i = len(x), self.config.segment, 0
        outputs = [] if steps else [self.embedding(rows.x)]  # of padding alone, which `in_place` makes zeros
        whole = [all(one.done) and one.stop - one.start == length for one, _ in steps] + [False]
        while i < len(steps):
            n = whole[i:].index(False)
            span = slice(steps[i][0].start, steps[i + max(n - 1, 0)][0].stop)
            tokens, mask = rows.x[:, span], rows.valid(span)
            if n:
                # --- segments that are whole in the call are rows of one batch: none reads what another one says ---
                encoded, valid, slots = zip(*(read for _, read in steps[i : i + n]), strict=True)
                read = Read(torch.cat(encoded), torch.cat(valid), None if slots[0] is None else torch.cat(slots))
                tokens = tokens.unflatten(1, (n, length)).transpose(0, 1).flatten(0, 1)  # [n·B, L]
                y, _ = self.decoder(self.dropout(self.embedding(tokens)), None, [0] * (n * b), read, None)
                outputs.append(y.unflatten(0, (n, b)).transpose(0, 1).flatten(1, 2))
                caches = self.empty_caches(b)  # not empty before, in rows that were reset
            else:
                # --- a part of a segment, after what is cached of it ---
                stretch, read = steps[i]
                y, caches = self.decoder(self.dropout(self.embedding(tokens)), mask, stretch.before, read, caches)
                outputs.append(y)
                caches = self.caches_after(stretch, caches, mask)
            i += max(n, 1)
        y = rows.in_place(torch.cat(outputs, 1), x.shape[1])
        return self.head(y if only is None else y[only]), after._replace(layers=caches)

    if TYPE_CHECKING:
        __call__ = forward

    def advance(self, x: Tensor, state: MemformerState | None = None, mask: Tensor | None = None) -> MemformerState:
        """The state that `forward` returns, without the logits: for whole segments only encoder and writer run.

        It draws the random numbers (dropout) that `forward` draws first. If a row is inside a segment before or after
        the call, the decoder's caches are part of the state, and all of `forward` runs.
        """
        length = self.config.segment
        after = x.new_zeros(len(x)) if state is None else state.seen
        inside = bool((after % length).any() or (count_seen(x, after, mask) % length).any())
        return self(x, state, mask)[1] if inside else self._encode(x, state, mask)[2]

    def _encode(
        self, x: Tensor, state: MemformerState | None, mask: Tensor | None
    ) -> tuple[PackedRows, list[tuple[Stretch, Read]], MemformerState, tuple[SegmentCache, ...]]:
        """Encoder and writer: the rows' tokens, what the decoder reads in each stretch, the state after, caches before.

        They run before the decoder, so that `advance` draws a prefix of the random numbers that `forward` draws.
        """
        before, seen = self.checked_state(x, state, mask)
        length, past = self.config.segment, (before.encoded, before.valid, before.memory)
        if 0 in seen:
            fresh = None if all(n == 0 for n in seen) else before.seen == 0
            past = (*self.encode_start(*past[:2], fresh), before.memory)
        unfinished = Unfinished(before.pending, before.pending_valid)
        rows = PackedRows.of(x.long(), mask)  # segments count valid tokens; the state has those of an incomplete one
        steps = []
        for stretch in stretches([n % length for n in seen], rows.counts, length):
            steps.append((stretch, Read(*past[:2], self.slots(past[2]) if self.decoder.memory else None)))
            span = slice(stretch.start, stretch.stop)
            unfinished = unfinished.with_more(rows.x[:, span], rows.valid(span), stretch.before)
            past = change_rows(stretch.done, self.write, past, unfinished.tokens)
            if any(stretch.done):
                unfinished = unfinished.emptied(torch.tensor(stretch.done, device=x.device))
        ends = self.empty_caches(len(x))
        after = MemformerState(count_seen(x, before.seen, mask), past[2], *past[:2], *unfinished, ends)
        return rows, steps, after, before.layers

    def encode_start(self, encoded: Tensor, valid: Tensor, fresh: Tensor | None) -> tuple[Tensor, Tensor]:
        """E_0 in the rows that are `fresh` [B] bool (None: all): BOS at the last position, before the first token."""
        table, token = (self.embedding, self.config.bos or 0) if self.bos is None else (self.bos, 0)
        slots = None if self.memory is None else self.memory.start()[None]
        bos = table(torch.full((1, 1), token, device=encoded.device))
        y = self.encoder(self.dropout(bos), slots)[:, :1]
        length = self.config.segment
        start = F.pad(y, (0, 0, length - 1, 0)).expand_as(encoded)
        last = (torch.arange(length, device=valid.device) == length - 1).expand_as(valid)
        if fresh is None:
            return start, last
        encoded = torch.where(fresh[:, None, None], start.to(encoded.dtype), encoded)
        return encoded, torch.where(fresh[:, None], last, valid)

    def write(self, past: Past, segment: Tensor) -> Past:
        """E_t, which of its tokens are valid (all), and M_t of segments [B, L] that are complete, after `past` ones."""
        memory = past[2]
        y = self.encoder(self.dropout(self.embedding(segment)), self.slots(memory))
        if self.memory is not None and memory is not None:
            memory = self.memory(memory, y)
        return y[:, : segment.shape[1]], torch.ones_like(segment, dtype=torch.bool), memory

    def slots(self, memory: SlotState | None) -> Tensor | None:
        """[B, K, D], or None for a model without a memory."""
        return None if self.memory is None or memory is None else self.memory.contents(memory)
