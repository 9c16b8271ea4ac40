"""The plain Transformer: any attention, with or without a gated cache, as a language model or a classifier."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.attention.gated import gated
from mnemos.attention.multi_head import widened
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig, check_fields, default_config, with_fields
from mnemos.memory.gated_cache import GRC, begin_forward, caches, end_forward
from mnemos.ops.checks import check_dropout
from mnemos.ops.dropout import Dropout
from mnemos.ops.padding import count_seen, zero_invalid
from mnemos.ops.rotary import Rotary
from mnemos.registry import load_baseline, register
from mnemos.types import (
    Device,
    HeadAttention,
    InputError,
    Likelihood,
    Splits,
    State,
    StateKind,
    check_heads,
    check_token_ids,
    check_vectors,
    combined_splits,
    combined_state_kind,
    leaves,
)

from .blocks import (
    ACTIVATIONS,
    Activation,
    Block,
    LearnedPositions,
    Norm,
    SinusoidalPositions,
    branch_layers,
    final_norm_of,
    init_weights,
    mlp_of,
    module_list,
    shrink_residuals,
)
from .fields import TransformerFields, check_sizes, with_signature
from .heads import HeadConfig, check_head, language_head, likelihood_of_head, tie


@register
@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """The sizes and parts of a `Transformer`. The defaults are those of Llama and Mistral; `classic` has older ones.

    Attributes:
        vocab_size: the number of tokens; with `features`, the number of outputs.
        dim: the width D of every layer's input and output.
        layers: the number of blocks of attention and MLP.
        num_heads: of each attention; divides `dim`.
        mlp: hidden width of the MLP; 0: blocks of attention alone. A gated MLP has three matrices of this width.
        max_length: the longest sequence, which sizes learned positions and a cache of length "auto".
        causal: whether a token reads only those up to itself, as a language model must.
        norm: before attention and MLP, an RMSNorm ("rms") or a LayerNorm ("pre"); "post": a LayerNorm after each.
        position: "auto": rotary where the attention can rotate queries and keys of an even width; none where its scores
            depend on distances (Transformer-XL, compressive); else sinusoidal. Rotary and sinusoidal positions have no
            limit; with rotary ones softmax scores depend on distances alone, linear attention on the positions too.
        scale_embedding: tokens' embeddings times √D, so that sinusoids are not larger than new embeddings. They are
            always scaled with the norm "rms" and sinusoids.
        activation: of the MLP; "swiglu": gated, SiLU(W₁·x) ⊙ W₂·x.
        dropout: the share of hidden values that training sets to zero.
        attention: its settings, or the name of one.
        cache: a gated cache around every attention.
        head: what is predicted: the next token, or one of `head.classes` for the whole sequence.
        rotary: base and scaling of rotary positions.
        features: of inputs that are vectors [B, T, features] instead of tokens; 0: tokens.
    """

    name: ClassVar[str] = "transformer"
    at_evaluation: ClassVar[tuple[str, ...]] = ("max_length",)
    vocab_size: int = 256
    dim: int = 128
    layers: int = 2
    num_heads: int = 4
    mlp: int = 352
    max_length: int = 512
    causal: bool = True
    norm: Norm = "rms"
    position: Literal["auto", "rotary", "sinusoidal", "learned", "none"] = "auto"
    scale_embedding: bool = False
    activation: Activation = "swiglu"
    dropout: float = 0.0
    attention: AttentionConfig = dataclasses.field(default_factory=SoftmaxConfig)
    cache: GRC | None = None
    head: HeadConfig = dataclasses.field(default_factory=HeadConfig)
    rotary: Rotary = dataclasses.field(default_factory=Rotary)
    features: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.attention, str):  # the name of an attention
            object.__setattr__(self, "attention", default_config("attention", self.attention, "attention"))

    @classmethod
    def classic(cls, **fields: Any) -> "TransformerConfig":
        """A configuration whose block is that of 2017 to 2020: LayerNorm first, GELU, sinusoids, an MLP of width 512.

        `fields` are set as in the class itself, and win over the block's. Raises TypeError for unknown ones.
        """
        return cls(**{"norm": "pre", "activation": "gelu", "position": "sinusoidal", "mlp": 512, **fields})

    @property
    def positions(self) -> Literal["rotary", "sinusoidal", "learned", "none"]:
        """`position`, with "auto" resolved."""
        if self.position != "auto":
            return self.position
        if self.attention.knows_distances:
            return "none"
        pairs = self.num_heads > 0 and self.dim // self.num_heads % 2 == 0
        return "rotary" if self.attention.rotates and pairs else "sinusoidal"

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by: √D or 1."""
        scaled = self.scale_embedding or (self.norm == "rms" and self.positions == "sinusoidal" and not self.features)
        return self.dim**0.5 if scaled else 1.0

    def build(self) -> "Transformer":
        """The model, freshly initialised."""
        return Transformer(self)


@exportable
class TransformerState(NamedTuple):
    """seen [B] int64: valid tokens of the row (None: not causal, each segment starts at 0). layers: their states."""

    seen: Tensor | None
    layers: tuple[State, ...]


@with_signature(TransformerConfig)
class Transformer(nn.Module):
    """`logits, state = model(x, state=None, mask=None)`: a Transformer with the memory of its attention.

    x [B, T] integer token ids, or, with `features` F, vectors [B, T, F], to which a linear map is applied in place of
    the embedding; mask [B, T] bool, True = valid. A language model (head.classes = 0): logits [B, T, V], logits[:, i]
    predict the token after x[:, i]; of vectors, the V outputs of each. With head.mixture K, [B, T, 3K], the parameters
    of a mixture of K logistics over brightnesses 0 … V − 1, and with head.cutoffs [B, T, D], hidden states that an
    adaptive softmax scores (`likelihood`). A classifier: logits [B, classes]. The state is that of the attentions (a
    `TransformerState`; None if no attention has one). T is at least 1 and may differ from call to call.
    Cost: that of its attentions, plus O(T·D²) per layer.

    `Transformer(TransformerConfig(...))` or `Transformer(dim=64, ...)` with the configuration's fields.
    Raises InputError for impossible shapes, tokens outside the vocabulary, sequences longer than learned positions.
    """

    picks_positions = True
    head: nn.Module

    def __init__(self, config: TransformerConfig | None = None, **fields: Unpack[TransformerFields]) -> None:
        super().__init__()
        self.config = config = with_fields(config or TransformerConfig(), dict(fields), "Transformer")
        _check(config)
        self.embedding: nn.Embedding | nn.Linear
        if config.features:
            self.embedding = nn.Linear(config.features, config.dim)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.cls = nn.Parameter(torch.zeros(config.dim)) if self._prefix else None
        self.positions: LearnedPositions | SinusoidalPositions | None = None
        if config.positions == "learned":
            self.positions = LearnedPositions(config.max_length + self._prefix, config.dim)
        elif config.positions == "sinusoidal":
            self.positions = SinusoidalPositions()
        self.dropout = Dropout(config.dropout)
        self.blocks = module_list(self._block(i) for i in range(config.layers))
        self.final_norm = final_norm_of(config.norm, config.dim)
        self.head = self._head()
        init_weights(self)
        if config.norm == "rms":
            shrink_residuals(self.blocks)
        if isinstance(self.head, nn.Linear) and config.head.mixture:
            load_baseline("mixture of logistics").space_means(self.head)
        if self.cls is not None:
            nn.init.normal_(self.cls, std=config.dim**-0.5)
        if config.head.tied and not config.head.classes and isinstance(self.embedding, nn.Embedding):
            tie(self.head, self.embedding)
        # The model begins and ends a forward for all its caches; see memory/gated_cache.py.
        self._caches = caches(self)
        for cache in self._caches:
            cache.owned = True

    @property
    def _prefix(self) -> int:
        return int(bool(self.config.head.classes) and self.config.head.pool == "cls")

    def _block(self, number: int) -> Block:
        c = self.config
        rotary = {"rotary": c.rotary} if c.positions == "rotary" else {}
        settings = c.attention.of_layer(number)
        attention = settings.build(c.dim, c.num_heads, causal=c.causal, dropout=c.dropout, **rotary)
        if c.cache is not None:
            if not isinstance(attention, HeadAttention):
                raise InputError(
                    "model.cache: expected an attention of heads to which a gated cache can be added (softmax, linear, "
                    f"relative and others), found {c.attention.name!r}; use another attention, or cache=None"
                )
            # A causal cache as long as the sequence would be updated once, at its end, and never read.
            length = max(1, c.max_length // 8) if c.causal else c.max_length
            attention = gated(attention, c.cache, length, prefix=self._prefix)
        mlp = mlp_of(c.dim, c.mlp, c.activation, c.dropout) if c.mlp else None
        return Block(attention, mlp, c.dim, c.norm, c.dropout)

    def _head(self) -> nn.Module:
        c = self.config
        if c.head.mixture:
            return nn.Linear(c.dim, 3 * c.head.mixture)
        if not c.head.classes:
            if not isinstance(self.embedding, nn.Embedding):
                return nn.Linear(c.dim, c.vocab_size)
            return language_head(self.embedding, c.head.tied, c.head.cutoffs, c.head.div_value)
        if not c.head.hidden:
            return nn.Linear(c.dim, c.head.classes)
        hidden = nn.Linear(c.dim, c.head.hidden)
        return nn.Sequential(hidden, ACTIVATIONS[c.activation](), nn.Linear(c.head.hidden, c.head.classes))

    @property
    def likelihood(self) -> Likelihood | None:
        """Scores and samples the outputs of a mixture or an adaptive softmax; None if outputs are logits."""
        if not self.config.head.mixture:
            return likelihood_of_head(self.head)
        mixture: Likelihood = load_baseline("mixture of logistics")(self.config.vocab_size)
        return mixture

    @property
    def autoregressive(self) -> bool:
        """Whether logits[:, i] predict the token after x[:, i]: in a language model of tokens."""
        return not self.config.head.classes and not self.config.features

    @property
    def splits(self) -> Splits:
        """Where a sequence may be cut: that of the layers; a classifier's logits are always those of one segment."""
        found = combined_splits(block.attention.splits for block in self.blocks)
        return "segments" if found == "anywhere" and self.config.head.classes else found

    @property
    def state_kind(self) -> StateKind:
        """That of the layers."""
        return combined_state_kind(block.attention.state_kind for block in self.blocks)

    @property
    def rows_independent(self) -> bool:
        """Whether a row's output in training depends on that row alone: in every layer."""
        return all(block.attention.rows_independent for block in self.blocks)

    @property
    def state_gradient(self) -> bool:
        """Whether gradient flows through the incoming and outgoing state: in every layer."""
        return all(block.attention.state_gradient for block in self.blocks)

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> TransformerState | None:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        device = self.embedding.weight.device if device is None else device
        layers = tuple(block.attention.initial_state(batch_size, device, dtype) for block in self.blocks)
        return self._state(torch.zeros(batch_size, dtype=torch.int64, device=device), layers)

    def _state(self, seen: Tensor, layers: tuple[State, ...]) -> TransformerState | None:
        if all(layer is None for layer in layers):
            return None
        return TransformerState(seen if self.config.causal else None, layers)

    def forward(
        self,
        x: Tensor,
        state: TransformerState | None = None,
        mask: Tensor | None = None,
        only: Tensor | None = None,
    ) -> tuple[Tensor, TransformerState | None]:
        """See the class. only [B, T] bool, for a language model: its outputs at these positions alone, [n, V]."""
        if self.config.features:
            check_vectors(x, self.config.features, mask)
        else:
            check_token_ids(x, self.config.vocab_size, mask)
        began = self.training and begin_forward(self._caches)
        b = x.shape[0]  # len() would fix the number of rows of an exported program
        if state is not None:
            _check_state(state, b, len(self.blocks))
        seen = None if state is None else state.seen
        after = count_seen(x, seen, mask)
        y = self.embedding(zero_invalid(x, mask) if self.config.features else x)
        if (scale := self.config.embedding_scale) != 1:
            y = y * scale
        if self.cls is not None:
            y = torch.cat([self.cls.expand(b, 1, -1), y], 1)
            mask = None if mask is None else torch.cat([mask.new_ones(b, 1), mask], 1)
        y = self.dropout(y if self.positions is None else self.positions(y, seen, mask))
        layers: list[State] = []
        for i, block in enumerate(self.blocks):
            y, new = block(y, None if state is None else state.layers[i], mask)
            layers.append(new)
        y = self._pool(y, mask)
        logits = self.head(self.final_norm(y if only is None else y[only]))
        if began:
            end_forward(self._caches)
        return logits, self._state(after, tuple(layers))

    if TYPE_CHECKING:
        __call__ = forward

    def widened(self, state: TransformerState) -> TransformerState:
        """The same state with those of its layers `widened`."""
        layers = zip(self.blocks, state.layers, strict=True)
        return state._replace(layers=tuple(widened(block.attention, layer) for block, layer in layers))

    def branch(self, state: TransformerState | None, copies: int) -> TransformerState | None:
        """The state of `copies` rows for every row, next to each other; softmax attention shares their tokens' keys."""
        if state is None:
            return None
        seen = None if state.seen is None else state.seen.repeat_interleave(copies)
        attentions = [block.attention for block in self.blocks]
        layers = branch_layers(attentions, state.layers, leaves(state)[0].shape[0], copies)
        return TransformerState(seen, layers)

    def _pool(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, D] -> [B, D] for a classifier."""
        head = self.config.head
        if not head.classes:
            return y
        if head.pool == "cls":
            return y[:, 0]
        if head.pool == "mean":
            if mask is None:
                return y.mean(1)
            return zero_invalid(y, mask).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        if mask is None:
            return y[:, -1]
        last = (torch.arange(y.shape[1], device=y.device) * mask).amax(1)
        return y[torch.arange(y.shape[0], device=y.device), last]


def _check(c: TransformerConfig) -> None:
    check_fields(c, "model")
    check_fields(c.head, "model.head")
    check_fields(c.attention, "model.attention")
    check_head(c.head, c.vocab_size)
    check_heads(c.dim, c.num_heads)
    check_sizes(c, vocab_size=1, layers=1, mlp=0, max_length=1)
    check_dropout(c.dropout)
    if c.head.classes and c.head.pool == "cls" and c.causal:
        raise InputError(
            'head.pool: expected "last" or "mean" in a causal classifier, found "cls", whose class token is before all '
            "tokens and attends to none; change it"
        )
    if not c.head.classes and not c.causal:
        raise InputError(
            "causal: expected True in a language model, found False; set head.classes for a classifier "
            "(head=HeadConfig(classes=...) of mnemos.models in Python)"
        )
    if c.position == "rotary" and not c.attention.rotates:
        raise InputError(
            f"position: expected an attention that rotates, found {c.attention.name!r} with rotary positions; use "
            'position="auto"'
        )
    if c.features < 0 or (c.features and (c.head.mixture or c.head.tied or c.head.cutoffs or c.scale_embedding)):
        raise InputError(
            f"features: expected 0, or inputs of vectors without a mixture, a tied head, cutoffs and scale_embedding, "
            f"found {c.features} with {c.head} and scale_embedding {c.scale_embedding}; change one"
        )
    check_mode(c.attention, c.causal)


def check_mode(attention: AttentionConfig, causal: bool) -> None:
    """Raise InputError unless the attention can be built with this value of `causal`."""
    if causal not in attention.causal_modes:
        raise InputError(
            f"attention {attention.name!r}: expected causal={not causal}, its only mode, found causal={causal}; use "
            f"another attention, or a model with causal={not causal}"
        )


def _check_state(state: object, rows: int, layers: int) -> None:
    if not isinstance(state, TransformerState) or len(state.layers) != layers:
        found = f"one of {len(state.layers)} layers" if isinstance(state, TransformerState) else type(state).__name__
        raise InputError(
            f"expected the state that a model of {layers} layers returned, found {found}; start with state=None"
        )
    if (found_rows := leaves(state)[0].shape[0]) != rows:
        raise InputError(
            f"expected a state of {rows} rows, as the tokens have, found {found_rows}; use select or reset"
        )
