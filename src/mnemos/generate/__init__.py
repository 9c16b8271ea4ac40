"""Decoding: streams of tokens, sampling, search, and the fused step."""
