"""Small recipes to start from, at least one per task. Sizes that the data determine are 0: a run fills them in."""
