"""Whole models: model(x, state) -> (logits, state)."""
