"""Models that transcribe speech by CTC (Linear transformers, §4.3): a Transformer with any attention, and an LSTM.

The bidirectional LSTM is the recurrent baseline.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mnemos.attention.softmax import SoftmaxConfig
from mnemos.config import AttentionConfig, ModelConfig, check_mode, default_config
from mnemos.lab.speech.ctc import Transcriber
from mnemos.models.shared import checked_config, init_weights
from mnemos.models.transformer import MLP, Block, Ungated, dropout_of, module_list
from mnemos.ops.dense_layer import Linear
from mnemos.ops.positions import sinusoids
from mnemos.registry import register


@register
@dataclass(frozen=True)
class SpeechConfig(ModelConfig):
    """Speech by CTC with any attention, with the sizes of the paper by default."""

    name: ClassVar[str] = "speech"
    inputs: ClassVar[str] = "frames"
    vocab_size: int = 10  # tokens, not counting the blank
    bands: int = 40  # numbers per frame
    stack: int = 1  # consecutive frames that are read as one: attention costs 1/stack or less
    dim: int = 192
    layers: int = 9
    num_heads: int = 6
    mlp: int = 768  # hidden width of the MLP
    activation: Ungated = "gelu"
    dropout: float = 0.0
    attention: AttentionConfig = field(default_factory=SoftmaxConfig)  # or the name of one

    def __post_init__(self) -> None:
        if isinstance(self.attention, str):  # the name of an attention
            object.__setattr__(self, "attention", default_config("attention", self.attention, "attention"))

    def build(self) -> "SpeechRecogniser":
        return SpeechRecogniser(self)


class SpeechRecogniser(Transcriber):
    """A `Transcriber`: blocks of bidirectional attention between two linear maps.

    Positions are sinusoids, so T has no limit. `SpeechRecogniser(SpeechConfig(...))` or `SpeechRecogniser(dim=64, ...)`
    with the configuration's fields. Raises InputError for impossible sizes.
    """

    def __init__(self, config: SpeechConfig | None = None, **fields: Any) -> None:
        super().__init__()
        least = {"vocab_size": 1, "bands": 1, "stack": 1, "layers": 1, "mlp": 1}
        self.config = c = checked_config(self, config or SpeechConfig(), fields, **least)
        check_mode(c.attention, causal=False)
        self.entry = Linear(c.stack * c.bands, c.dim)
        self.dropout = dropout_of(c.dropout)
        self.blocks = module_list(
            Block(
                c.attention.of_layer(i).build(c.dim, c.num_heads, causal=False, dropout=c.dropout),
                MLP(c.dim, c.mlp, c.activation, c.dropout),
                c.dim,
                dropout=c.dropout,
            )
            for i in range(c.layers)
        )
        self.final_norm = nn.LayerNorm(c.dim)
        self.head = Linear(c.dim, c.vocab_size + 1)
        init_weights(self)

    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y: Tensor = self.entry(x)
        y = self.dropout(y + sinusoids(torch.arange(y.shape[1], device=y.device), y.shape[2]).to(y.dtype))
        for block in self.blocks:
            y, _ = block(y, None, mask)
        return self.final_norm(y)

    @property
    def rows_independent(self) -> bool:
        return all(block.attention.rows_independent for block in self.blocks)


@register
@dataclass(frozen=True)
class BiLSTMConfig(ModelConfig):
    """A bidirectional LSTM for speech, with the sizes of the paper by default."""

    name: ClassVar[str] = "bilstm"
    inputs: ClassVar[str] = "frames"
    vocab_size: int = 10  # tokens, not counting the blank
    bands: int = 40  # numbers per frame
    stack: int = 1  # consecutive frames that are read as one
    dim: int = 320  # of the hidden state, per direction
    layers: int = 3
    dropout: float = 0.0  # between layers

    def build(self) -> "BiLSTM":
        return BiLSTM(self)


class BiLSTM(Transcriber):
    """A `Transcriber`: an LSTM that reads frames in both directions, and a linear map.

    The backward direction starts at a row's last valid frame and reads no padding. Cost: O(T·width²), sequential over
    frames. Raises InputError for impossible sizes.
    """

    def __init__(self, config: BiLSTMConfig) -> None:
        super().__init__()
        self.config = c = checked_config(self, config, {}, vocab_size=1, bands=1, stack=1, dim=1, layers=1)
        dropout = c.dropout if c.layers > 1 else 0.0  # torch warns about dropout in a single layer
        self.lstm = nn.LSTM(c.stack * c.bands, c.dim, c.layers, dropout=dropout, bidirectional=True)
        self.head = Linear(2 * c.dim, c.vocab_size + 1)

    def encode(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, _ = x.shape
        # Packing needs lengths of at least 1, on the CPU.
        lengths = torch.full((b,), t) if mask is None else mask.sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=t)[0]
