"""Whole models: logits, state = model(x, state)."""

from .armt import ARMT, ARMTConfig
from .encoder_decoder import EncoderDecoder, EncoderDecoderConfig, EncoderDecoderState, Pair
from .lstm import LSTM, LSTMConfig, LSTMState
from .marian import from_marian
from .memformer import Memformer, MemformerConfig, MemformerState
from .memory_tokens import RMT, MemoryTransformer, MemoryTransformerConfig, RMTConfig
from .segments import SegmentState
from .transformer import HeadConfig, Transformer, TransformerConfig, TransformerState

__all__ = [
    "ARMT",
    "LSTM",
    "RMT",
    "ARMTConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "EncoderDecoderState",
    "HeadConfig",
    "LSTMConfig",
    "LSTMState",
    "Memformer",
    "MemformerConfig",
    "MemformerState",
    "MemoryTransformer",
    "MemoryTransformerConfig",
    "Pair",
    "RMTConfig",
    "SegmentState",
    "Transformer",
    "TransformerConfig",
    "TransformerState",
    "from_marian",
]
