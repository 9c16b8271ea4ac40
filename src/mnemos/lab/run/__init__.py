"""A recipe is trained in a folder, and the trained model used. Read `loop.py` first, then `learner.py` and `run.py`."""
