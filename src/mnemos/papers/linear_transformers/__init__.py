"""Transformers are RNNs (linear transformers): recipes and claims."""
