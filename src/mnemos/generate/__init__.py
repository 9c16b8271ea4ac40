"""Decoding: streams of tokens, sampling, search, speculation, and the fused step."""
