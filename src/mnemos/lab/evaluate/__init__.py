"""What a trained model scores, and what its memory holds and is worth.

`scores` evaluates a model on a split, `controls` does so with its memory changed, and `predict` asks it about new
files. What reports draw is measured once: `explain` after training (with `branches`: the two branches of cached layers
as images), `gates` in training; `recorded` describes the files, which `records` writes and reads. `write_attention`
measures the slots of a Memformer for figures of its paper.
"""
