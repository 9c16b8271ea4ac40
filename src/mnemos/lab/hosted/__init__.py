"""Models of Transformers and timm by name: what `--model hf:NAME` and `--model timm:NAME` choose.

`hub` turns a name into settings and weights, and a fault of either into one line. `decoder` and `encoder` make of them
models that are read in segments, between which a gated cache goes on; `model` is what such models share.
"""
