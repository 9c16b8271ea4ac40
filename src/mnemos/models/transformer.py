"""The plain Transformer: any attention, with or without a gated cache, as a language model or a classifier.

From top to bottom: what a block is made of (MLP, norms, positions), the settings, and the model, whose `forward` is the
whole computation. What it shares with the other models of this room is in shared.py.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.attention.cross import CrossAttention, KeysValues
from mnemos.attention.gated import gated
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig, check_fields, check_mode, default_config, with_signature
from mnemos.memory.gated_cache import GRC, begin_forward, end_forward
from mnemos.modes import reads_without_waiting
from mnemos.ops.dense_layer import Linear
from mnemos.ops.dropout import Dropout
from mnemos.ops.padding import zero_invalid
from mnemos.ops.positions import Rotary, count_seen, positions, sinusoids
from mnemos.registry import load_baseline, register
from mnemos.types import (
    Attention,
    Device,
    HeadAttention,
    InputError,
    Likelihood,
    Output,
    Splits,
    State,
    check_token_ids,
    check_vectors,
)

from .shared import AttentionModel, check_state, checked_config, init_weights, language_head

Norm = Literal["rms", "pre", "post"]
Ungated = Literal["gelu", "relu", "silu"]
Activation = Literal["swiglu"] | Ungated
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "swiglu": nn.SiLU}
TABLE = 4096  # the position up to which a table of sinusoids serves a stream; beyond it they are computed
M = TypeVar("M", bound=nn.Module)


def module_list(modules: Iterable[M]) -> Sequence[M]:
    """An `nn.ModuleList`, typed by what it holds: torch's own type forgets it."""
    return cast(Sequence[M], nn.ModuleList(modules))


class MLP(nn.Module):
    """W₂·φ(W₁·x) for each token, [.., D] -> [.., D]."""

    def __init__(self, dim: int, hidden: int, activation: Ungated = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        self.expand, self.contract = Linear(dim, hidden), Linear(hidden, dim)
        self.activation: nn.Module = ACTIVATIONS[activation]()
        self.dropout = dropout_of(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(self.dropout(self.activation(self.expand(x))))

    if TYPE_CHECKING:
        __call__ = forward


class GatedMLP(nn.Module):
    """W₃·(SiLU(W₁·x) ⊙ W₂·x) for each token, [.., D] -> [.., D], without biases (SwiGLU, Shazeer 2020).

    Cost: 6·D·hidden FLOPs for a token, where an `MLP` of this width has 4·D·hidden.
    """

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.expand = Linear(dim, hidden, bias=False), Linear(dim, hidden, bias=False)
        self.contract = Linear(hidden, dim, bias=False)
        self.dropout = dropout_of(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            hidden = nn.functional.silu(self.gate(x)) * self.expand(x)
        else:
            hidden = nn.functional.silu(self.gate(x)).mul_(self.expand(x))
        return self.contract(self.dropout(hidden))

    if TYPE_CHECKING:
        __call__ = forward


def dropout_of(rate: float) -> nn.Module:
    """Dropout, or nothing at all where no value is dropped."""
    return Dropout(rate) if rate else nn.Identity()


def norm_of(norm: Norm, dim: int) -> nn.RMSNorm | nn.LayerNorm:
    """The norm of a block: RMSNorm ("rms", eps 1e-6) or LayerNorm."""
    return nn.RMSNorm(dim, eps=1e-6) if norm == "rms" else nn.LayerNorm(dim)


def final_norm_of(norm: Norm, dim: int) -> nn.Module:
    """The norm after the last block; none where each block ends with one ("post")."""
    return nn.Identity() if norm == "post" else norm_of(norm, dim)


class Block(nn.Module):
    """Self-attention, an attention to each of several sources, MLP: each with a residual and a norm.

    The norm is before each ("rms", "pre"), or after the sum ("post"). x [B, T, D], state of the self-attention, mask
    [B, T] -> y [B, T, D], state. reads: the number of sources. A call takes the keys and values [G, N, H, D/H] of each
    source, and the `visible` of its `CrossAttention`; every one of the G rows of a source serves B/G rows of x, which
    are next to each other. bias: of the self-attention's scores, if it is softmax. mlp None: no MLP.
    """

    attention: Attention

    def __init__(
        self,
        attention: Attention,
        mlp: MLP | GatedMLP | None,
        dim: int,
        norm: Norm = "pre",
        dropout: float = 0.0,
        reads: int = 0,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.reads = module_list(CrossAttention(dim, attention.num_heads, dropout) for _ in range(reads))
        self.mlp = mlp
        self.attention_norm, self.mlp_norm = norm_of(norm, dim), norm_of(norm, dim) if mlp else nn.Identity()
        self.read_norms = module_list(norm_of(norm, dim) for _ in range(reads))
        self.norm, self.dropout = norm, dropout_of(dropout)

    def keys_values(self, sources: Iterable[Tensor]) -> tuple[KeysValues, ...]:
        """The keys and values of sources [G, N, D], for `forward`."""
        return tuple(read.keys_values(source) for read, source in zip(self.reads, sources, strict=True))

    def forward(
        self,
        x: Tensor,
        state: State = None,
        mask: Tensor | None = None,
        sources: Sequence[KeysValues] = (),
        visible: Sequence[Tensor | None] = (),
        bias: Tensor | None = None,
    ) -> Output:
        post, biases = self.norm == "post", () if bias is None else (bias,)
        y, state = self.attention(x if post else self.attention_norm(x), state, mask, *biases)
        x = x + self.dropout(y)
        x = self.attention_norm(x) if post else x
        for i, source in enumerate(sources):
            # The rows of x that share a row of the source are joined to one row of queries [G, B/G·T, D], so that its
            # keys and values are not copied.
            joint_shape = source[0].shape[0], -1, x.shape[-1]
            norm = self.read_norms[i]
            y = self.reads[i]((x if post else norm(x)).reshape(joint_shape), source, visible[i]).reshape(x.shape)
            x = x + self.dropout(y)
            x = norm(x) if post else x
        if self.mlp is not None:
            x = x + self.dropout(self.mlp(x if post else self.mlp_norm(x)))
            x = self.mlp_norm(x) if post else x
        return x, state

    if TYPE_CHECKING:
        __call__ = forward


def blocks_of(c: Any, attentions: Iterable[Attention], reads: int = 0) -> Sequence[Block]:
    """Blocks around attentions, with the sizes of a model's configuration: dim, mlp, activation, norm and dropout."""
    blocks = []
    for attention in attentions:
        mlp: MLP | GatedMLP | None = None
        if c.mlp and c.activation == "swiglu":
            mlp = GatedMLP(c.dim, c.mlp, c.dropout)
        elif c.mlp:
            mlp = MLP(c.dim, c.mlp, c.activation, c.dropout)
        blocks.append(Block(attention, mlp, c.dim, c.norm, c.dropout, reads))
    return module_list(blocks)


def attentions_of(
    c: Any, attention: AttentionConfig, layers: int, causal: bool, length: int = 0, prefix: int = 0, **more: Any
) -> Iterator[Attention]:
    """The self-attentions of a model's layers, with a gated cache around each if its configuration has one.

    length: of a cache of length "auto"; 0: without caches. prefix: tokens in front, which no cache reads.
    """
    for number in range(layers):
        layer = attention.of_layer(number).build(c.dim, c.num_heads, causal=causal, dropout=c.dropout, **more)
        if length and c.cache is not None:
            if not isinstance(layer, HeadAttention):
                raise InputError(
                    "model.cache: expected an attention of heads to which a gated cache can be added (softmax, linear, "
                    f"relative and others), found {attention.name!r}; use another attention, or cache=None"
                )
            layer = gated(layer, c.cache, length, prefix=prefix)
        yield layer


class LearnedPositions(nn.Embedding):
    """y [B, T, D] plus learned positions from `seen` [B] on (None: 0). Raises InputError beyond the last position.

    mask [B, T] bool: positions count valid tokens.

    In a compiled graph and on other devices than a CPU, where reading `seen` would cost a wait, the look-up raises its
    own error.
    """

    def forward(self, y: Tensor, seen: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        limit, numbers = self.num_embeddings, positions(y.shape[1], seen, mask, y.device)
        if numbers.numel() and reads_without_waiting(numbers) and (last := int(numbers.max())) >= limit:
            raise InputError(
                f"learned positions: expected at most {limit} tokens, found {last + 1}; raise max_length or use "
                'position="sinusoidal"'
            )
        return y + super().forward(numbers)

    if TYPE_CHECKING:
        __call__ = forward


class SinusoidalPositions(nn.Module):
    """y [B, T, D] plus sinusoids of the positions from `seen` [B] on (None: 0). Positions have no limit.

    mask [B, T] bool: positions count valid tokens.

    They come from a table, which is kept between calls and grows as it is needed: to the length of a call without
    `seen`, and to `TABLE` for a stream. Later positions of a stream are computed in every call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._table: Tensor | None = None

    def forward(self, y: Tensor, seen: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        t, dim, end = y.shape[1], y.shape[2], y.shape[1]
        if seen is not None and seen.numel() and reads_without_waiting(seen):
            end += int(seen.max())
        elif seen is not None:
            end = TABLE + 1  # unknown without waiting for the device, so the table is not used
        if torch.compiler.is_compiling() or (end > TABLE and seen is not None):
            return y + sinusoids(positions(t, seen, mask, y.device), dim).to(y.dtype)
        table = self._table
        if table is None or len(table) < end or table.device != y.device or table.dtype != y.dtype:
            # Twice as long as needed: a stream of single tokens then rarely makes it anew.
            longest = end if seen is None else min(TABLE, 2 * end)
            table = self._table = sinusoids(torch.arange(longest, device=y.device), dim).to(y.dtype)
        return y + (table[:t] if seen is None and mask is None else table[positions(t, seen, mask, y.device)])


def positions_of(position: str, limit: int, dim: int) -> LearnedPositions | SinusoidalPositions | None:
    """The module that adds positions to embeddings, or None. limit: the number of learned positions."""
    if position == "learned":
        return LearnedPositions(limit, dim)
    return SinusoidalPositions() if position == "sinusoidal" else None


@dataclass(frozen=True)
class HeadConfig:
    """What the model predicts: the next token (classes = 0), or one of `classes` for the whole sequence."""

    classes: int = 0
    hidden: int = 0  # width of a hidden layer before the classes; 0: none
    pool: Literal["cls", "mean", "last"] = "cls"  # a learned token in front, the mean or the last of the valid tokens
    tied: bool = False  # language: share the embedding's weights
    cutoffs: tuple[int, ...] = ()  # tied: adaptive softmax with clusters from these tokens on; (): one softmax
    mixture: int = 0  # for brightnesses: the number of discretised logistics instead of logits; 0: logits


@register
@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """A Transformer with any attention, with caches or without.

    The defaults are those of Llama and Mistral; `classic` has older ones.

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
        scale_embedding: tokens' embeddings times √D, so that sinusoids are not larger than new embeddings. With the
            norm "rms" and sinusoids they always are.
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

        `fields` are those of the class, and override the block's. Raises TypeError for unknown ones.
        """
        return cls(**{"norm": "pre", "activation": "gelu", "position": "sinusoidal", "mlp": 512, **fields})

    @property
    def resolved_position(self) -> Literal["rotary", "sinusoidal", "learned", "none"]:
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
        scaled = self.scale_embedding or (
            self.norm == "rms" and self.resolved_position == "sinusoidal" and not self.features
        )
        return self.dim**0.5 if scaled else 1.0

    def build(self) -> "Transformer":
        return Transformer(self)


@exportable
class TransformerState(NamedTuple):
    """seen [B] int64: valid tokens of the row (None: not causal, each segment starts at 0). layers: of attentions."""

    seen: Tensor | None
    layers: tuple[State, ...]


@with_signature(TransformerConfig)
class Transformer(AttentionModel):
    """`logits, state = model(x, state=None, mask=None)`: a Transformer with the memory of its attention.

    x [B, T] int64 token ids, or, with `features` F, vectors [B, T, F], to which a linear map is applied in place of the
    embedding; mask [B, T] bool, True = valid. A language model (head.classes = 0): logits [B, T, V], logits[:, i]
    predict the token after x[:, i]; of vectors, the V outputs of each. With head.mixture K, [B, T, 3K], the parameters
    of a mixture of K logistics over brightnesses 0 … V − 1, and with head.cutoffs [B, T, D], hidden states that an
    adaptive softmax scores (`likelihood`). A classifier: logits [B, classes]. The state is that of the attentions (a
    `TransformerState`; None if no attention has one). T is at least 1 and may differ from call to call.
    Cost: that of its attentions, plus O(T·D²) per layer.

    `Transformer(TransformerConfig(...))` or `Transformer(dim=64, ...)` with the configuration's fields.
    Raises InputError for impossible shapes, tokens outside the vocabulary, sequences longer than learned positions.
    """

    picks_positions = True  # `forward` takes `only`
    head: nn.Module

    def __init__(self, config: TransformerConfig | None = None, **fields: Any) -> None:
        super().__init__()
        least = {"vocab_size": 1, "layers": 1, "mlp": 0, "max_length": 1}
        self.config = c = checked_config(self, config or TransformerConfig(), fields, **least)
        _check(c)
        # --- from tokens or vectors to hidden states ---
        self.embedding: nn.Embedding | nn.Linear
        self.embedding = Linear(c.features, c.dim) if c.features else nn.Embedding(c.vocab_size, c.dim)
        prefix = int(bool(c.head.classes) and c.head.pool == "cls")  # a learned token in front
        self.cls = nn.Parameter(torch.zeros(c.dim)) if prefix else None
        self.positions = positions_of(c.resolved_position, c.max_length + prefix, c.dim)
        self.scale = c.embedding_scale
        self.dropout = dropout_of(c.dropout)
        # --- blocks ---
        # A causal cache as long as the sequence would be updated once, at its end, and never read.
        length = max(1, c.max_length // 8) if c.causal else c.max_length
        rotary = {"rotary": c.rotary} if c.resolved_position == "rotary" else {}
        attentions = attentions_of(c, c.attention, c.layers, c.causal, length, prefix, **rotary)
        self.blocks = blocks_of(c, attentions)
        # --- from hidden states to outputs ---
        self.final_norm = final_norm_of(c.norm, c.dim)
        if c.head.mixture:
            self.head = Linear(c.dim, 3 * c.head.mixture)
        elif c.head.classes and c.head.hidden:
            hidden = Linear(c.dim, c.head.hidden)
            self.head = nn.Sequential(hidden, ACTIVATIONS[c.activation](), Linear(c.head.hidden, c.head.classes))
        elif c.head.classes or not isinstance(self.embedding, nn.Embedding):  # a classifier, or inputs of vectors
            self.head = Linear(c.dim, c.head.classes or c.vocab_size)
        else:
            self.head = language_head(self.embedding, c.head.tied, c.head.cutoffs)
        # --- first values ---
        init_weights(self, [self.blocks] if c.norm == "rms" else [], tied=c.head.tied and not c.head.classes)
        if c.head.mixture:
            load_baseline("mixture of logistics").space_means(self.head)
        if self.cls is not None:
            nn.init.normal_(self.cls, std=c.dim**-0.5)
        self.own_caches()

    @property
    def likelihood(self) -> Likelihood | None:
        """Scores and samples the outputs of a mixture or an adaptive softmax; None if outputs are logits."""
        if self.config.head.mixture:
            mixture: Likelihood = load_baseline("mixture of logistics")(self.config.vocab_size)
            return mixture
        head: Any = self.head
        return head if hasattr(head, "log_prob") else None

    @property
    def autoregressive(self) -> bool:
        """Whether logits[:, i] predict the token after x[:, i]: in a language model of tokens."""
        return not self.config.head.classes and not self.config.features

    @property
    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]

    @property
    def splits(self) -> Splits:
        """Where a sequence may be cut: where its layers allow it; a classifier's logits are always of one segment."""
        splits = super().splits
        return "segments" if splits == "anywhere" and self.config.head.classes else splits

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> TransformerState | None:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        device = self.embedding.weight.device if device is None else device
        seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return self._state(seen, self.layers_of_new_rows(batch_size, device, dtype))

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
        c = self.config
        if c.features:
            check_vectors(x, c.features, mask)
        else:
            check_token_ids(x, c.vocab_size, mask)
        b = x.shape[0]  # len() would fix the number of rows of an exported program
        if state is not None:
            check_state(state, TransformerState, len(self.blocks), b)
        must_end = self.training and begin_forward(self._caches)
        # --- embeddings and positions ---
        seen = None if state is None else state.seen
        seen_after = count_seen(x, seen, mask)  # before the class token is added, which is no token of the row
        y = self.embedding(zero_invalid(x, mask) if c.features else x)
        if self.scale != 1:
            y = y * self.scale
        if self.cls is not None:
            y = torch.cat([self.cls.expand(b, 1, -1), y], 1)
            mask = None if mask is None else torch.cat([mask.new_ones(b, 1), mask], 1)
        y = self.dropout(y if self.positions is None else self.positions(y, seen, mask))
        # --- blocks, each with the state of its attention ---
        layers: list[State] = []
        for i, block in enumerate(self.blocks):
            y, layer_state = block(y, None if state is None else state.layers[i], mask)
            layers.append(layer_state)
        # --- outputs: of every token, of some, or one of the whole sequence ---
        if only is not None:
            y = y[only]
        elif c.head.classes and c.head.pool == "cls":
            y = y[:, 0]
        elif c.head.classes and c.head.pool == "mean":
            y = y.mean(1) if mask is None else zero_invalid(y, mask).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        elif c.head.classes and mask is None:
            y = y[:, -1]
        elif c.head.classes and mask is not None:
            last = (torch.arange(y.shape[1], device=y.device) * mask).amax(1)
            y = y[torch.arange(b, device=y.device), last]
        logits = self.head(self.final_norm(y))
        if must_end:
            end_forward(self._caches)
        return logits, self._state(seen_after, tuple(layers))

    if TYPE_CHECKING:
        __call__ = forward


def _check(c: TransformerConfig) -> None:
    check_fields(c.head, "model.head")
    check_fields(c.attention, "model.attention")
    head = c.head
    if head.classes < 0 or head.hidden < 0:
        raise InputError(
            f"expected head.classes and head.hidden of at least 0, found {head.classes} and {head.hidden}; use 0 for "
            "none"
        )
    if head.mixture < 0 or (head.mixture and (head.classes or head.tied or c.vocab_size < 2)):
        raise InputError(
            f"head.mixture: expected a language model of two or more brightnesses with an untied head, found mixture "
            f"{head.mixture}, classes {head.classes}, tied {head.tied}, vocab_size {c.vocab_size}; change one"
        )
    if (head.classes or head.mixture) and head.cutoffs:
        raise InputError(
            f"head.cutoffs: expected none but in a language model of tokens, found {head.cutoffs} with classes "
            f"{head.classes}, mixture {head.mixture}; leave cutoffs out"
        )
    if head.classes and head.pool == "cls" and c.causal:
        raise InputError(
            'head.pool: expected "last" or "mean" in a causal classifier, found "cls", whose class token is before all '
            "tokens and attends to none; change it"
        )
    if not head.classes and not c.causal:
        raise InputError(
            "causal: expected True in a language model, found False; set head.classes for a classifier "
            "(head=HeadConfig(classes=...) of mnemos.models in Python)"
        )
    if c.position == "rotary" and not c.attention.rotates:
        raise InputError(
            f"position: expected an attention that rotates, found {c.attention.name!r} with rotary positions; use "
            'position="auto"'
        )
    if c.features < 0 or (c.features and (head.mixture or head.tied or head.cutoffs or c.scale_embedding)):
        raise InputError(
            f"features: expected 0, or inputs of vectors without a mixture, a tied head, cutoffs and scale_embedding, "
            f"found {c.features} with {head} and scale_embedding {c.scale_embedding}; change one"
        )
    check_mode(c.attention, c.causal)
