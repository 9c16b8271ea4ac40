"""An encoder-decoder for translation: a bidirectional encoder, with a gated cache if wanted, and a causal decoder.

From top to bottom: the settings, and the model: `encode` makes a state of a source, once, and `forward` reads tokens of
the target after it. Blocks and positions are those of the Transformer.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.attention.softmax import SoftmaxConfig, open_empty_rows
from mnemos.config import AttentionConfig, ModelConfig, check_fields, check_mode, default_config
from mnemos.memory.gated_cache import GRC, begin_forward, end_forward
from mnemos.memory.key_values import Encoded
from mnemos.modes import reads_without_waiting
from mnemos.ops.dense_layer import Linear
from mnemos.ops.padding import zero_invalid
from mnemos.ops.positions import count_seen
from mnemos.registry import register
from mnemos.types import Attention, Device, InputError, State, StateKind, check_token_ids, combined_state_kind

from .shared import AttentionModel, check_state, checked_config, init_weights
from .transformer import Ungated, attentions_of, blocks_of, dropout_of, final_norm_of, positions_of


@register
@dataclass(frozen=True)
class EncoderDecoderConfig(ModelConfig):
    """An encoder that reads a source, a decoder with a state that writes: translation.

    source_vocab_size: 0 for that of the target. mlp: hidden width of the MLPs. max_length: the longest source or target
    with learned positions, and the length of a cache of length "auto". encoder, decoder: the self-attentions; that of
    the decoder is causal and has a state. cache: a gated cache around every attention of the encoder. share: "all": one
    matrix is both embeddings and the head; "target": one is the target's embedding and the head; "none".
    scale_embedding: multiply embeddings by √D (Vaswani et al. 2017, §3.4). head_bias: add a bias to the logits.
    """

    name: ClassVar[str] = "encoder-decoder"
    inputs: ClassVar[str] = "pairs"
    vocab_size: int = 256
    source_vocab_size: int = 0
    dim: int = 128
    encoder_layers: int = 4
    decoder_layers: int = 4
    num_heads: int = 4
    mlp: int = 256
    max_length: int = 512
    norm: Literal["pre", "post"] = "pre"
    position: Literal["sinusoidal", "learned", "none"] = "sinusoidal"
    activation: Ungated = "relu"
    dropout: float = 0.0
    encoder: AttentionConfig = field(default_factory=SoftmaxConfig)  # or the name of one
    decoder: AttentionConfig = field(default_factory=SoftmaxConfig)  # or the name of one
    cache: GRC | None = None
    share: Literal["all", "target", "none"] = "all"
    scale_embedding: bool = True
    head_bias: bool = False

    def __post_init__(self) -> None:
        for part in ("encoder", "decoder"):
            if isinstance(name := getattr(self, part), str):
                object.__setattr__(self, part, default_config("attention", name, part))

    def build(self) -> "EncoderDecoder":
        return EncoderDecoder(self)


class Pair(NamedTuple):
    """Sources and the targets to predict: source [B, S] and target [B, T] int64; mask [B, S] bool, True = valid source.

    target: what the decoder reads: the token that begins every sentence, then the target without its last token.
    """

    source: Tensor
    target: Tensor
    mask: Tensor | None = None


@exportable
class EncoderDecoderState(NamedTuple):
    """seen [R] int64: valid target tokens so far. source: what the rows read of their sources. layers: the decoder's.

    The source's keys and values are stored once per source, however many rows read it (see `mnemos.memory.Encoded`).
    """

    seen: Tensor
    source: Encoded
    layers: tuple[State, ...]


class EncoderDecoder(AttentionModel):
    """A Transformer from a source to a target (Vaswani et al. 2017), with the memory of its attentions.

        logits, state = model(Pair(source, target, source_mask), mask=target_mask)     # training
        state = model.encode(source, source_mask)                                      # decoding: once per source
        logits, state = model(tokens, state)                                           # then any tokens of the target

    source [B, S], target [B, T], tokens [R, T] int64; masks bool, True = valid. logits [R, T, V]: logits[:, i] predict
    the token after target i. Encoder: bidirectional self-attention over the valid source tokens, with `cache` mixed
    with an attention to a gated recurrent cache. Decoder: causal self-attention with a state, then softmax attention to
    the encoded source, whose keys and values are projected once per source and are part of the state. Each block has a
    residual and a layer norm around each part, before it (and one at the end) or after the sum.

    `mnemos.beam_search(model, state, prefix, config)` searches for the best targets; rows that branch from one
    source read one copy of its keys and values. A gated cache with scope="stream" begins anew with every source.
    Cost: encode O(S·(S + D)·D) per layer with softmax; a token O((N + S + D)·D) per layer after N tokens.

    `EncoderDecoder(EncoderDecoderConfig(...))` or `EncoderDecoder(dim=64, ...)` with the configuration's fields.
    Raises InputError for impossible shapes, tokens outside a vocabulary, tokens without a source or a state with one,
    a state of another model or batch, and sequences longer than learned positions.
    """

    autoregressive = True

    def __init__(self, config: EncoderDecoderConfig | None = None, **fields: Any) -> None:
        super().__init__()
        least = {"vocab_size": 1, "encoder_layers": 1, "decoder_layers": 1, "mlp": 1, "max_length": 1}
        self.config = c = checked_config(self, config or EncoderDecoderConfig(), fields, **least)
        check_fields(c.encoder, "model.encoder")
        check_fields(c.decoder, "model.decoder")
        check_mode(c.decoder, True)
        if c.source_vocab_size < 0 or (c.share == "all" and c.source_vocab_size not in (0, c.vocab_size)):
            raise InputError(
                f"source_vocab_size: expected 0 or {c.vocab_size}, as the embeddings are shared, found "
                f'{c.source_vocab_size}; use share="target" for separate vocabularies'
            )
        # --- embeddings and positions of both sides ---
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.source_embedding = self.embedding
        if c.share != "all":
            self.source_embedding = nn.Embedding(c.source_vocab_size or c.vocab_size, c.dim)
        self.positions, self.source_positions = (positions_of(c.position, c.max_length, c.dim) for _ in range(2))
        self.dropout = dropout_of(c.dropout)
        # --- blocks ---
        causal = False not in c.encoder.causal_modes  # where the attention has no other mode
        self.encoder = blocks_of(c, attentions_of(c, c.encoder, c.encoder_layers, causal, c.max_length))
        self.decoder = blocks_of(c, attentions_of(c, c.decoder, c.decoder_layers, True), reads=1)
        self.encoder_norm, self.decoder_norm = final_norm_of(c.norm, c.dim), final_norm_of(c.norm, c.dim)
        self.head = Linear(c.dim, c.vocab_size, bias=c.head_bias)
        init_weights(self, tied=c.share != "none")
        self.own_caches()

    @property
    def attentions(self) -> list[Attention]:
        """Those of the decoder, which say where a target may be cut; a source is always encoded as a whole."""
        return [block.attention for block in self.decoder]

    @property
    def state_kind(self) -> StateKind:
        """That of the decoder's layers; the source's keys and values do not grow with the target."""
        return combined_state_kind(["constant", super().state_kind])

    @property
    def rows_independent(self) -> bool:
        return super().rows_independent and all(block.attention.rows_independent for block in self.encoder)

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> EncoderDecoderState:
        """The state of `batch_size` rows with an empty source, whose one token is padding; `reset` makes rows so."""
        c, weight = self.config, self.embedding.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        nothing = torch.zeros(batch_size, 1, c.num_heads, c.dim // c.num_heads, device=device, dtype=dtype)
        valid = torch.zeros(batch_size, 1, dtype=torch.bool, device=device)
        source = Encoded(tuple((nothing.clone(), nothing.clone()) for _ in self.decoder), valid)
        return self._new_rows(source, device, dtype)

    def _new_rows(self, source: Encoded, device: Device, dtype: torch.dtype) -> EncoderDecoderState:
        seen = torch.zeros(source.rows, dtype=torch.int64, device=device)
        return EncoderDecoderState(seen, source, self.layers_of_new_rows(source.rows, device, dtype))

    def encode(self, source: Tensor, mask: Tensor | None = None) -> EncoderDecoderState:
        """The state of B new rows that translate source [B, S] int64; mask [B, S] bool, True = valid.

        Each decoder layer projects its keys and values of the source here, and nowhere else. In training mode the call
        is one forward of the gated caches.
        """
        return self.begin(self.hidden(source, mask), mask)

    def hidden(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the encoder makes of a source, [B, S, D]: the first half of `encode`, which `begin` completes."""
        check_token_ids(source, self.source_embedding.num_embeddings, mask)
        began = self.training and begin_forward(self._caches)
        y = self._embed(self.source_embedding, self.source_positions, source, None, mask)
        for block in self.encoder:
            y, _ = block(y, None, mask)
        y = self.encoder_norm(y)
        if began:
            end_forward(self._caches)
        return y

    def begin(self, hidden: Tensor, mask: Tensor | None = None) -> EncoderDecoderState:
        """The state of B new rows that read encoded sources [B, S, D]; mask [B, S] bool, True = valid."""
        layers = tuple(block.keys_values([hidden])[0] for block in self.decoder)
        if mask is not None:  # a row whose source is all padding reads zeros, as in `initial_state`
            layers = tuple((zero_invalid(k, mask), zero_invalid(v, mask)) for k, v in layers)
        if not torch.is_grad_enabled():  # heads before tokens in memory, as each head reads them
            layers = tuple((_by_head(k), _by_head(v)) for k, v in layers)
        # A copy: the caller may change the mask.
        valid = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device) if mask is None else mask.clone()
        return self._new_rows(Encoded(layers, valid), hidden.device, self.embedding.weight.dtype)

    def forward(
        self, x: Tensor | Pair, state: EncoderDecoderState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, EncoderDecoderState]:
        """See the class. mask: that of the target [R, T]."""
        pair, x = (x, x.target) if isinstance(x, Pair) else (None, x)
        check_token_ids(x, self.config.vocab_size, mask)
        # --- training: a source begins a new row ---
        if pair is not None:
            if state is not None:
                raise InputError(
                    f"expected no state, because a source begins a new row, found {type(state).__name__}; pass the "
                    "target tokens alone to continue a row"
                )
            if len(pair.source) != len(x):
                raise InputError(
                    f"expected as many sources as targets, found {len(pair.source)} and {len(x)}; pair them row by row"
                )
            state = self.encode(pair.source, pair.mask)
        # --- the target's tokens, after those that the state has read ---
        start = "encode(source), or Pair(source, target)"
        rows = x.shape[0]  # len() would fix the number of rows of an exported program
        check_state(state, EncoderDecoderState, len(self.decoder), rows, start=start)
        assert state is not None
        y = self._embed(self.embedding, self.positions, x, state.seen, mask)
        valid, visible = state.source.valid, None
        # All are visible: faster. Checking it would make a device wait, and is no part of a compiled program.
        if not (reads_without_waiting(valid) and bool(valid.all())):
            visible = open_empty_rows(valid)[:, None, None]
        layers = []
        for block, before, source in zip(self.decoder, state.layers, state.source.layers, strict=True):
            y, after = block(y, before, mask, [source], [visible])
            layers.append(after)
        seen = count_seen(x, state.seen, mask)
        return self.head(self.decoder_norm(y)), state._replace(seen=seen, layers=tuple(layers))

    if TYPE_CHECKING:
        __call__ = forward

    def _embed(
        self, embedding: nn.Embedding, positions: nn.Module | None, x: Tensor, seen: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        y = embedding(x)
        if self.config.scale_embedding:
            y = y * self.config.dim**0.5
        return self.dropout(y if positions is None else positions(y, seen, mask))

    def branch(self, state: EncoderDecoderState, copies: int) -> EncoderDecoderState:
        """The state of `copies` rows for every row, next to each other: they share their source and their tokens."""
        source = state.source
        branched: EncoderDecoderState = super().branch(state, copies)
        return branched._replace(source=Encoded(source.layers, source.valid, source.copies * copies))


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)
