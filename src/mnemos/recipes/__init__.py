"""Small recipes to start from, at least one per task. Each trains in minutes on two cores. `papers` has the others.

Sizes that the data determine (vocabulary, length, image, channels, classes, bands) are 0 in a recipe. A run fills them
in when it opens its data (`mnemos.train.checks.complete`), so another folder or length needs no second setting.
"""
