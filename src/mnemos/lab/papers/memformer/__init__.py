"""Memformer: A Memory-Augmented Transformer for Sequence Modeling (Wu et al.)."""
