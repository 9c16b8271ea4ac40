"""Whole models: logits, state = model(x, state)."""

from .armt import ARMT, ARMTConfig
from .lstm import LSTM, LSTMConfig, LSTMState
from .memformer import Memformer, MemformerConfig, MemformerState
from .memory_tokens import RMT, MemoryTransformer, MemoryTransformerConfig, RMTConfig
from .segments import SegmentState
from .transformer import HeadConfig, Transformer, TransformerConfig, TransformerState

__all__ = [
    "ARMT",
    "LSTM",
    "RMT",
    "ARMTConfig",
    "HeadConfig",
    "LSTMConfig",
    "LSTMState",
    "Memformer",
    "MemformerConfig",
    "MemformerState",
    "MemoryTransformer",
    "MemoryTransformerConfig",
    "RMTConfig",
    "SegmentState",
    "Transformer",
    "TransformerConfig",
    "TransformerState",
]
