"""A trained decoder with a state of constant size: its training in two stages, and what it predicts and recalls.

Each stage is a task and a recipe of the loop in `lab/run`. Read `train.py` first: from a folder to a trained decoder.
`stages.py` has the tasks, attention transfer and the next token; `text_batches.py` their text; `assess.py` the
measurements; `settings.py` the options of `mnemos linearise`.
"""
