"""Memformer: A Memory-Augmented Transformer for Sequence Modeling (arXiv 2010.06891)."""
