"""A trained decoder as an RNN: its training in two stages, and what it predicts and recalls."""
