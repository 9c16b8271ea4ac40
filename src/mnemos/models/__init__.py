"""Whole models: model(x, state) -> (logits, state)."""

from .memformer import Memformer, MemformerConfig, MemformerState
from .transformer import HeadConfig, Transformer, TransformerConfig, TransformerState

__all__ = [
    "HeadConfig",
    "Memformer",
    "MemformerConfig",
    "MemformerState",
    "Transformer",
    "TransformerConfig",
    "TransformerState",
]
