"""Attention layers: (x, state) -> (y, state), one file each."""
