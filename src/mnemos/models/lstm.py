"""The recurrent baseline among language models: an LSTM whose state is passed in and returned."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mnemos._compat import exportable
from mnemos.config import ModelConfig
from mnemos.ops.precision import full_precision
from mnemos.registry import register
from mnemos.types import Device, InputError, check_token_ids

from .shared import LanguageModel, checked_config, init_weights, language_head
from .transformer import dropout_of

# Under autocast torch calls oneDNN's LSTM in bfloat16, which fails on processors without AVX-512.
_BFLOAT16_LSTM = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


@register
@dataclass(frozen=True)
class LSTMConfig(ModelConfig):
    """An LSTM, with the sizes of the papers' language models by default."""

    name: ClassVar[str] = "lstm"
    classes: ClassVar[int] = 0  # it predicts the next token only
    vocab_size: int = 256
    dim: int = 512  # of embeddings and hidden states
    layers: int = 4
    dropout: float = 0.0  # before, between and after the layers
    tied: bool = False  # share the embedding's weights with the head
    cutoffs: tuple[int, ...] = ()  # tied: adaptive softmax with clusters from these tokens on; (): one softmax

    def build(self) -> "LSTM":
        return LSTM(self)


@exportable
class LSTMState(NamedTuple):
    """h and c [B, layers, width]: outputs and cell states of the layers after the last valid token of each row."""

    h: Tensor
    c: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "hidden state"


class LSTM(LanguageModel):
    """`logits, state = model(x, state=None, mask=None)`: an embedding, layers of `torch.nn.LSTM`, and a linear map.

    x [B, T] int64 token ids; mask [B, T] bool, True = valid; logits [B, T, V], logits[:, i] predict the token after
    x[:, i]. With cut-offs the outputs are hidden states [B, T, D] for `likelihood`. An invalid token does not change
    the state, and its outputs have no meaning. The state (`LSTMState`) carries gradient. T is at least 1 and may differ
    from call to call. Cost: O(T·layers·width²), sequential over tokens, and a state of 2·layers·width numbers per row.
    `LSTM(LSTMConfig(...))` or `LSTM(dim=64, ...)` with the configuration's fields.
    Raises InputError for impossible sizes and shapes, and tokens outside the vocabulary.
    """

    def __init__(self, config: LSTMConfig | None = None, **fields: Any) -> None:
        super().__init__()
        self.config = c = checked_config(self, config or LSTMConfig(), fields, vocab_size=1, dim=1, layers=1)
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.dropout = dropout_of(c.dropout)
        between = c.dropout if c.layers > 1 else 0.0  # torch warns about dropout in a single layer
        self.lstm = nn.LSTM(c.dim, c.dim, c.layers, batch_first=True, dropout=between)
        self.head = language_head(self.embedding, c.tied, c.cutoffs)
        init_weights(self, tied=c.tied)

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> LSTMState:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        c, weight = self.config, self.embedding.weight
        device = weight.device if device is None else device
        h = torch.zeros(batch_size, c.layers, c.dim, device=device, dtype=dtype or weight.dtype)
        return LSTMState(h, h.clone())

    def forward(
        self, x: Tensor, state: LSTMState | None = None, mask: Tensor | None = None, only: Tensor | None = None
    ) -> tuple[Tensor, LSTMState]:
        """See the class. only [B, T] bool: the logits at these positions alone, [n, V]."""
        check_token_ids(x, self.config.vocab_size, mask)
        state = self.initial_state(x.shape[0]) if state is None else state
        wanted = (x.shape[0], self.config.layers, self.config.dim)
        if not isinstance(state, LSTMState) or state.h.shape != wanted or state.c.shape != wanted:
            other = tuple(state.h.shape) if isinstance(state, LSTMState) else type(state).__name__
            raise InputError(
                f"expected the state that this LSTM returned, of shape {wanted}, found {other}; start with state=None"
            )
        y = self.dropout(self.embedding(x))
        before = tuple(part.to(y.dtype).transpose(0, 1).contiguous() for part in state)
        if mask is None:
            with nullcontext() if _BFLOAT16_LSTM else full_precision("cpu"):
                y, after = self.lstm(y, before)
        else:
            # The valid tokens of each row are moved together, read, and their outputs moved back.
            count, order = mask.sum(1), torch.argsort(~mask, stable=True, dim=1)
            y = y.gather(1, order[..., None].expand_as(y))
            # Packing needs lengths of at least 1, on the CPU.
            packed = pack_padded_sequence(y, count.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False)
            read, after = self.lstm(packed, before)
            y, _ = pad_packed_sequence(read, batch_first=True, total_length=mask.shape[1])
            some = (count > 0)[None, :, None]
            after = tuple(torch.where(some, new, old) for new, old in zip(after, before, strict=True))
            y = y.gather(1, order.argsort(1)[..., None].expand_as(y))
        y = self.dropout(y)
        return self.head(y if only is None else y[only]), LSTMState(*(part.transpose(0, 1) for part in after))

    if TYPE_CHECKING:
        __call__ = forward
