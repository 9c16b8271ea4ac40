"""Whole models: model(x, state) -> (logits, state)."""

from .transformer import HeadConfig, Transformer, TransformerConfig, TransformerState

__all__ = ["HeadConfig", "Transformer", "TransformerConfig", "TransformerState"]
