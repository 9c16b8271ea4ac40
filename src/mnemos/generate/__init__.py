"""Decoding: streams of tokens, sampling, search, and the fused step.

Read `stream.py` first: a model's state after a prompt, and one step per token from there; `sampling.py` draws a token.
`fused.py` is that step in one call of a kernel. `beam.py` searches for the best continuations by many such steps, and
`prefix.py` keeps the states of beginnings that many prompts share. `mnemos` itself lists the public names; this
package lists none.
"""
