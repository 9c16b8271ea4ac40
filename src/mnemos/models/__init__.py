"""Whole models: logits, state = model(x, state)."""

from .lstm import LSTM, LSTMConfig, LSTMState
from .memformer import Memformer, MemformerConfig, MemformerState
from .transformer import HeadConfig, Transformer, TransformerConfig, TransformerState

__all__ = [
    "LSTM",
    "HeadConfig",
    "LSTMConfig",
    "LSTMState",
    "Memformer",
    "MemformerConfig",
    "MemformerState",
    "Transformer",
    "TransformerConfig",
    "TransformerState",
]
