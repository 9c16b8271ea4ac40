"""Linear transformers ("Transformers are RNNs"): recipes and claims."""
