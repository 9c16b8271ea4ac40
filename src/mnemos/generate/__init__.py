"""Decoding: streams of tokens, sampling, and the fused step."""
