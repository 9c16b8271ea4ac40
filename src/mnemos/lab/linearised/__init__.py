"""A trained decoder with a state of constant size: its training (read `train` first), and what it recalls."""
