"""A Transformer that writes down speech: any attention of ours over frames, and CTC (Linear transformers, §4.3)."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig, check_fields, unknown_field
from mnemos.registry import register
from mnemos.types import InputError, Output, check_heads

from .blocks import MLP, Activation, Block, init_weights, sinusoids
from .ctc import Stack, Transcriber, check_frames, check_sizes


@register
@dataclass(frozen=True)
class SpeechConfig(ModelConfig):
    """The size and the parts of a `SpeechRecogniser`; the paper's by default."""

    name: ClassVar[str] = "speech"
    inputs: ClassVar[str] = "frames"
    vocab_size: int = 10  # tokens that can be said; the blank comes on top
    bands: int = 40  # numbers a frame
    stack: int = 1  # frames side by side that are read as one: attention costs 1/stack or less
    dim: int = 192
    layers: int = 9
    num_heads: int = 6
    mlp: int = 768  # hidden width of the MLP
    activation: Activation = "gelu"
    dropout: float = 0.0
    attention: AttentionConfig = dataclasses.field(default_factory=SoftmaxConfig)

    def build(self) -> "SpeechRecogniser":
        """The model, freshly initialised."""
        return SpeechRecogniser(self)


class SpeechRecogniser(Transcriber):
    """`logits, None = model(x, state=None, mask=None)`: blocks of attention, not causal, between two linear maps.

    x [B, T, bands] floats; mask [B, T] bool, True = valid, a row's valid frames first; logits [B, ⌈T/stack⌉,
    vocab_size + 1], the last class the blank; those of padding mean nothing. Positions are sinusoids: T has no limit.
    Every row is heard as a whole, so there is no state. `score` and `transcribe`: see `Transcriber`.

    `SpeechRecogniser(SpeechConfig(...))` or `SpeechRecogniser(dim=64, ...)` with the configuration's fields.
    Raises InputError for impossible sizes and shapes.
    """

    def __init__(self, config: SpeechConfig | None = None, **fields: Any) -> None:
        super().__init__()
        for name in fields:
            if name not in (known := {f.name for f in dataclasses.fields(SpeechConfig)}):
                raise InputError(unknown_field(name, known, "SpeechRecogniser"))
        self.config = c = dataclasses.replace(config or SpeechConfig(), **fields)
        check_fields(c, "model")
        check_sizes(c, ("vocab_size", "bands", "stack", "layers", "mlp"))
        check_heads(c.dim, c.num_heads)
        if not 0 <= c.dropout < 1:
            raise InputError(f"dropout must be at least 0 and below 1, found {c.dropout}")
        self.stack = Stack(c.stack)
        self.entry = nn.Linear(c.stack * c.bands, c.dim)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(
            Block(
                c.attention.build(c.dim, c.num_heads, causal=False, dropout=c.dropout),
                MLP(c.dim, c.mlp, c.activation, c.dropout),
                c.dim,
                dropout=c.dropout,
            )
            for _ in range(c.layers)
        )
        self.final_norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size + 1)
        init_weights(self)

    def forward(self, x: Tensor, state: None = None, mask: Tensor | None = None) -> Output:
        """See the class."""
        check_frames(x, mask, self.config.bands)
        x, mask = self.stack(x, mask)
        y = self.entry(x)
        y = self.dropout(y + sinusoids(y.shape[1], y.shape[2], None, y.device).to(y.dtype))
        for block in self.blocks:
            y, _ = block(y, None, mask)
        return self.head(self.final_norm(y)), None
