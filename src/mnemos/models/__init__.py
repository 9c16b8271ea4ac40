"""Whole models: model(x, state) -> (logits, state)."""

from .lstm import LSTM, LSTMConfig, LSTMState
from .transformer import HeadConfig, Transformer, TransformerConfig, TransformerState

__all__ = ["LSTM", "HeadConfig", "LSTMConfig", "LSTMState", "Transformer", "TransformerConfig", "TransformerState"]
