"""mnemos: memory for transformers. One idea under all of them: `y, state = layer(x, state)`."""
