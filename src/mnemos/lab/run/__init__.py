"""A recipe is trained in a folder, and the trained model used.

Four ideas: a recipe says everything (`recipe.py`); the loop makes updates of it that resume bit for bit (read `loop.py`
first, then `learner.py` and `run.py`); a folder keeps what it needs to go on, and says what the numbers depend on
(`folder.py`, `files.py`, `checkpoint.py`, `provenance.py`); and a trained model is scored, sampled and exported
(`trained.py`, `weights.py`, `export.py`). `fit.py` and `session.py` are the doors.
"""
