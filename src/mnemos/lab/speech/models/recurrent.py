"""The recurrent baseline of Linear transformers, §4.3: a bidirectional LSTM trained by CTC."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mnemos.config import ModelConfig, check_fields
from mnemos.registry import register
from mnemos.types import InputError, check_stateful

from .ctc import Stack, Transcriber, check_frames, check_sizes


@register
@dataclass(frozen=True)
class BiLSTMConfig(ModelConfig):
    """The sizes of a `BiLSTM`; the paper's by default."""

    name: ClassVar[str] = "bilstm"
    inputs: ClassVar[str] = "frames"
    vocab_size: int = 10  # tokens, not counting the blank
    bands: int = 40  # numbers per frame
    stack: int = 1  # consecutive frames that are read as one
    dim: int = 320  # of the hidden state, per direction
    layers: int = 3
    dropout: float = 0.0  # between layers

    def build(self) -> "BiLSTM":
        """The model, freshly initialised."""
        return BiLSTM(self)


class BiLSTM(Transcriber):
    """`logits, None = model(x, state=None, mask=None)`: an LSTM that reads frames in both directions, and a linear map.

    x, mask and logits as for `SpeechRecogniser`. The backward direction starts at a row's last valid frame and reads no
    padding. Cost: O(T·width²), sequential over frames. `score` and `transcribe`: see `Transcriber`.
    Raises InputError for impossible sizes and shapes.
    """

    def __init__(self, config: BiLSTMConfig) -> None:
        super().__init__()
        self.config = c = config
        check_fields(c, "model")
        check_sizes(c, ("vocab_size", "bands", "stack", "dim", "layers"))
        if not 0 <= c.dropout < 1:
            raise InputError(f"dropout: expected at least 0 and below 1, found {c.dropout}; use 0 for none")
        self.stack = Stack(c.stack)
        dropout = c.dropout if c.layers > 1 else 0.0  # torch warns about dropout in a single layer
        self.lstm = nn.LSTM(c.stack * c.bands, c.dim, c.layers, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(2 * c.dim, c.vocab_size + 1)

    def forward(self, x: Tensor, state: None = None, mask: Tensor | None = None) -> tuple[Tensor, None]:
        """See the class."""
        check_frames(x, mask, self.config.bands)
        check_stateful(self.state_kind, state)
        x, mask = self.stack(x, mask)
        b, t, _ = x.shape
        # Packing needs lengths of at least 1, on the CPU.
        lengths = torch.full((b,), t) if mask is None else mask.sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=t)
        return self.head(y), None

    if TYPE_CHECKING:
        __call__ = forward
