"""Recipes to start from, one or more for every task: minutes on two cores. Those of papers' claims are in `papers`.

A size that the data decide (vocabulary, length, image, channels, classes, bands) is 0 in a recipe. A run fills it in
when it opens its data (`mnemos.train.checks.complete`), so another folder or another length needs no second setting.
"""
