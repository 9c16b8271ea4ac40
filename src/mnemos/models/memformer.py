"""Memformer (Wu et al. 2022): an encoder writes each segment into slots, and a decoder predicts the next segment."""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.config import ModelConfig, check_fields, with_fields
from mnemos.memory.grid import Stretch, Unfinished, stretches
from mnemos.memory.slots import SlotMemory, SlotsConfig, SlotState
from mnemos.ops.checks import check_dropout
from mnemos.ops.dropout import Dropout
from mnemos.ops.padding import Rows, count_seen
from mnemos.registry import register
from mnemos.types import (
    Device,
    InputError,
    Likelihood,
    Splits,
    StateKind,
    check_heads,
    check_token_ids,
    leaves,
    map_state,
)

from .blocks import Activation, init_weights, shrink_residuals
from .fields import MemformerFields, check_sizes, with_signature
from .heads import language_head, likelihood_of_head, tie
from .memformer_blocks import DecoderCache, MemformerDecoder, MemformerEncoder, Read, Sizes, StretchRead


@register
@dataclass(frozen=True)
class MemformerConfig(ModelConfig):
    """The sizes and parts of a `Memformer`. `cls` and `memory.radius` take the preset's value where they are None.

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
        cutoffs: those of an adaptive softmax; without any there is none.
        div_value: of the adaptive softmax: the division of the width from cluster to cluster.
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
    div_value: float = 1.0
    norm: Literal["rms", "pre"] = "pre"

    def build(self) -> "Memformer":
        """The model, freshly initialised."""
        return Memformer(self)

    def resolved(self) -> "MemformerConfig":
        """The same with the preset's switches set: the given value, else the preset's. Radius None still means √D."""
        cls, radius = PRESETS[self.preset]
        memory = self.memory if self.memory.radius is not None else dataclasses.replace(self.memory, radius=radius)
        return dataclasses.replace(self, memory=memory, cls=cls if self.cls is None else self.cls)


PRESETS: dict[str, tuple[int, float | None]] = {"paper": (2, 1.0), "mnemos": (0, None)}  # cls, memory.radius


@exportable
class MemformerState(NamedTuple):
    """The place of each row in its sequence; a row of zeros is a new row.

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
    layers: tuple[DecoderCache, ...]


@with_signature(MemformerConfig)
class Memformer(nn.Module):
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
    encoder layer O(K·D²) for the keys and values of the slots. Rows may be at different places of their segments; a
    call then runs more and shorter pieces.

    `Memformer(MemformerConfig(...))` or `Memformer(dim=64, ...)`; `model.config` has the preset's switches set.
    Raises InputError for impossible shapes, tokens outside the vocabulary, and a state of another model or batch.
    """

    splits: Splits = "anywhere"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    autoregressive = True
    picks_positions = True

    def __init__(self, config: MemformerConfig | None = None, **fields: Unpack[MemformerFields]) -> None:
        super().__init__()
        c = with_fields(config or MemformerConfig(), dict(fields), "Memformer")
        _check(c)
        self.config = c = c.resolved()
        sizes = Sizes(c.dim, c.num_heads, c.mlp, c.activation, c.dropout, c.buckets, c.max_distance, c.norm)
        has_memory = c.memory.slots > 0
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.bos = nn.Embedding(1, c.dim) if c.bos is None else None
        self.dropout = Dropout(c.dropout)
        self.encoder = MemformerEncoder(sizes, c.encoder_layers, c.cls or 0, has_memory)
        self.memory = SlotMemory(c.dim, c.num_heads, c.memory) if has_memory else None
        self.decoder = MemformerDecoder(sizes, c.decoder_layers, has_memory and c.decoder_reads)
        self.head = language_head(self.embedding, c.tied, c.cutoffs, c.div_value)
        init_weights(self)
        if c.norm == "rms":
            shrink_residuals(self.encoder.blocks)
            shrink_residuals(self.decoder.blocks)
        if c.tied:
            tie(self.head, self.embedding)

    @property
    def likelihood(self) -> Likelihood | None:
        """Scores the hidden states [B, T, D], the outputs of an adaptive softmax; None if outputs are logits."""
        return likelihood_of_head(self.head)

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> MemformerState:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        c, weight = self.config, self.embedding.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        marks = torch.zeros(batch_size, c.segment, device=device, dtype=torch.bool)
        return MemformerState(
            torch.zeros(batch_size, device=device, dtype=torch.int64),
            None if self.memory is None else self.memory.initial_state(batch_size, device, dtype),
            torch.zeros(batch_size, c.segment, c.dim, device=device, dtype=dtype),
            marks,
            torch.zeros(batch_size, c.segment, device=device, dtype=torch.int64),
            marks.clone(),
            self.decoder.empty(batch_size, device, dtype),
        )

    def forward(
        self, x: Tensor, state: MemformerState | None = None, mask: Tensor | None = None, only: Tensor | None = None
    ) -> tuple[Tensor, MemformerState]:
        """See the class. only [B, T] bool: the outputs at these positions alone, [n, V]."""
        rows, steps, after, caches = self._encode(x, state, mask)
        y, caches = self._decode(rows, steps, caches)
        y = rows.in_place(y, x.shape[1])
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

    def writing(
        self, x: Tensor, state: MemformerState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, MemformerState]:
        """`advance` with the writer's attention: weights [B, S, H, K, 1 + L + cls] of S segments, and the state.

        Column 0 is the slot itself: weight 1 keeps the slot, 0 overwrites it. A row that completes fewer segments than
        another has zeros behind them. For figures.
        """
        if self.memory is None or not self.config.memory.write:
            raise InputError(
                f"writing: expected a model that writes slots, found memory.slots {self.config.memory.slots} and "
                f"memory.write {self.config.memory.write}; use a model with both"
            )
        found: list[Tensor] = []

        def listen(memory: SlotMemory, given: tuple[SlotState, Tensor, Tensor | None]) -> None:
            found.append(memory.write_attention(*given[:3]))

        hook = self.memory.register_forward_pre_hook(listen)
        try:
            before, state = state, self.advance(x, state, mask)
        finally:
            hook.remove()
        if not found:
            raise InputError(f"writing: expected a whole segment, {self.config.segment} tokens; found none in any row")
        place = [0] * len(x) if before is None else (before.seen % self.config.segment).tolist()
        steps = stretches(place, Rows.of(x, mask).counts, self.config.segment)
        written, wholes = [0] * len(x), [sum(row) for row in zip(*(step.done for step in steps), strict=True)]
        weights = found[0].new_zeros(len(x), max(wholes), *found[0].shape[1:])
        for step, new in zip((step for step in steps if any(step.done)), found, strict=True):
            for row, one in zip((row for row, done in enumerate(step.done) if done), new, strict=True):
                weights[row, written[row]] = one
                written[row] += 1
        return weights, state

    def _encode(
        self, x: Tensor, state: MemformerState | None, mask: Tensor | None
    ) -> tuple[Rows, list[StretchRead], MemformerState, tuple[DecoderCache, ...]]:
        """Encoder and writer: the rows' tokens, what the decoder reads in each stretch, the state after, caches before.

        They run before the decoder, so that `advance` draws a prefix of the random numbers that `forward` draws.
        """
        check_token_ids(x, self.config.vocab_size, mask)
        b = len(x)
        if state is None:
            state, seen = self.initial_state(b), [0] * b
        else:
            self._check_state(state, b)
            seen = state.seen.tolist()
        encoded, valid, memory, caches = state.encoded, state.valid, state.memory, state.layers
        if 0 in seen:
            encoded, valid = self.encode_start(encoded, valid, None if all(n == 0 for n in seen) else state.seen == 0)
        unfinished = Unfinished(state.pending, state.pending_valid)
        rows = Rows.of(x.long(), mask)  # segments count valid tokens; the state keeps those of one that is not complete
        steps = []
        for stretch in stretches([n % self.config.segment for n in seen], rows.counts, self.config.segment):
            slots = self.slots(memory) if self.decoder.memory else None
            steps.append(StretchRead(stretch, Read(encoded, valid, slots)))
            span = slice(stretch.start, stretch.stop)
            unfinished = unfinished.with_more(rows.x[:, span], rows.valid(span), stretch.place)
            if any(stretch.done):
                encoded, valid, memory = self._write_rows(unfinished.tokens, stretch.done, encoded, valid, memory)
                unfinished = unfinished.emptied(torch.tensor(stretch.done, device=x.device))
        ends = self.decoder.empty(b, x.device, self.embedding.weight.dtype)
        after = MemformerState(count_seen(x, state.seen, mask), memory, encoded, valid, *unfinished, ends)
        return rows, steps, after, caches

    def widened(self, state: MemformerState) -> MemformerState:
        """The same state with the decoder's caches as long as they become, so that its size is constant."""
        length, slots = self.config.segment, self.config.memory.slots
        sources = [length, slots] if self.decoder.memory else [length]
        return state._replace(layers=tuple(cache.widened(length - 1, sources) for cache in state.layers))

    def encode_start(self, encoded: Tensor, valid: Tensor, fresh: Tensor | None) -> tuple[Tensor, Tensor]:
        """E_0 in the rows that are `fresh` [B] bool (None: all): BOS at the last place, before the first token."""
        table, token = (self.embedding, self.config.bos or 0) if self.bos is None else (self.bos, 0)
        slots = None if self.memory is None else self.memory.start()[None]
        bos = table(torch.full((1, 1), token, device=encoded.device))
        y = self.encoder(self.dropout(bos), slots)[:, :1]
        length = self.config.segment
        start = F.pad(y, (0, 0, length - 1, 0)).expand_as(encoded)
        last = (torch.arange(length, device=valid.device) == length - 1).expand_as(valid)
        if fresh is None:
            return start, last
        return torch.where(fresh[:, None, None], start.to(encoded.dtype), encoded), torch.where(
            fresh[:, None], last, valid
        )

    def _write_rows(
        self, segment: Tensor, done: list[bool], encoded: Tensor, valid: Tensor, memory: SlotState | None
    ) -> tuple[Tensor, Tensor, SlotState | None]:
        """E_t, which of its places are valid, and M_t in the rows that are `done` with s_t [B, L]."""
        if all(done):
            return self.write(segment, memory)
        rows = torch.tensor([i for i, d in enumerate(done) if d], device=encoded.device)
        new = self.write(segment[rows], map_state(lambda x: x[rows], memory))
        put = (encoded, valid, memory)
        return map_state(lambda old, x: old.index_copy(0, rows, x.to(old.dtype)), put, new)

    def write(self, segment: Tensor, memory: SlotState | None) -> tuple[Tensor, Tensor, SlotState | None]:
        """E_t, which of its places are valid (all), and M_t of segments [B, L] that are complete."""
        y = self.encoder(self.dropout(self.embedding(segment)), self.slots(memory))
        if self.memory is not None and memory is not None:
            memory = self.memory(memory, y)
        return y[:, : segment.shape[1]], torch.ones_like(segment, dtype=torch.bool), memory

    def slots(self, memory: SlotState | None) -> Tensor | None:
        """[B, K, D], or None for a model without a memory."""
        return None if self.memory is None or memory is None else self.memory.contents(memory)

    def _decode(
        self, rows: Rows, steps: list[StretchRead], caches: tuple[DecoderCache, ...]
    ) -> tuple[Tensor, tuple[DecoderCache, ...]]:
        """The decoder over all stretches; segments that are whole in the call are independent and run as one batch."""
        x, length, i = rows.x, self.config.segment, 0
        outputs = [] if steps else [self.embedding(x)]  # of padding alone, which `in_place` makes zeros
        while i < len(steps):
            same = i
            while same < len(steps) and _is_whole(steps[same].stretch, length):
                same += 1
            if same > i:
                outputs.append(self._side_by_side(x, steps[i:same]))
                caches = self.decoder.empty(
                    len(x), x.device, self.embedding.weight.dtype
                )  # not empty before, in rows that were reset
                i = same
                continue
            stretch, read = steps[i]
            span = slice(stretch.start, stretch.stop)
            y = self.dropout(self.embedding(x[:, span]))
            mask = rows.valid(span)
            y, caches = self.decoder(y, mask, stretch.place, read, caches)
            caches = self.decoder.closed(caches, stretch, mask)
            outputs.append(y)
            i += 1
        return torch.cat(outputs, 1), caches

    def _side_by_side(self, x: Tensor, steps: list[StretchRead]) -> Tensor:
        """Whole segments as rows of one batch: each reads the encoding before it, and not the other segments."""
        n, b = len(steps), len(x)
        span = slice(steps[0].stretch.start, steps[-1].stretch.stop)

        def rows(tokens: Tensor) -> Tensor:  # [B, n·L] -> [n·B, L]
            return tokens[:, span].unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)

        encoded, valid, slots = zip(*(step.read for step in steps), strict=True)
        read = Read(torch.cat(encoded), torch.cat(valid), None if slots[0] is None else torch.cat(slots))
        y = self.dropout(self.embedding(rows(x)))
        y, _ = self.decoder(y, None, [0] * (n * b), read, None)
        return y.unflatten(0, (n, b)).transpose(0, 1).flatten(1, 2)

    def _check_state(self, state: object, rows: int) -> None:
        if not isinstance(state, MemformerState):
            raise InputError(
                f"expected the state that this model returned, found {type(state).__name__}; start with state=None"
            )
        fits = state.encoded.shape[1:] == (self.config.segment, self.config.dim)
        fits = fits and len(state.layers) == self.config.decoder_layers
        slots = None if self.memory is None else self.memory.bias.shape
        if not fits or (None if state.memory is None else state.memory.slots.shape[1:]) != slots:
            raise InputError(
                "expected the state that this model returned, found one of a model of another configuration; start "
                "with state=None"
            )
        found = [leaf.shape[0] for leaf in leaves(state)]
        if any(count != rows for count in found):
            counts = " and ".join(map(str, sorted(set(found))))
            raise InputError(
                f"expected a state of {rows} rows, as the tokens have, found {counts}; use select or reset"
            )


def _is_whole(stretch: Stretch, length: int) -> bool:
    """Whether it is a whole segment of every row."""
    return stretch.stop - stretch.start == length and all(stretch.done)


def _check(c: MemformerConfig) -> None:
    check_fields(c, "model")
    check_heads(c.dim, c.num_heads)
    check_sizes(c, vocab_size=1, encoder_layers=1, decoder_layers=1, mlp=1, segment=1)
    if c.cls is not None and c.cls < 0:
        raise InputError(f"cls: expected at least 0, or None for the preset's, found {c.cls}; use 0 for none")
    if c.bos is not None and not 0 <= c.bos < c.vocab_size:
        raise InputError(f"bos: expected a token, 0 to {c.vocab_size - 1}, or None, found {c.bos}; change it")
    check_dropout(c.dropout)
    if c.decoder_reads and not c.memory.slots:
        raise InputError(
            "decoder_reads: expected slots to read, found memory.slots 0; raise it or use decoder_reads=False"
        )
