"""Small recipes to start from, at least one per task, as families of a few axes. `papers` has the others.

Sizes that the data determine (vocabulary, length, image, channels, classes, bands) are 0 in a recipe. A run fills them
in when it opens its data (`mnemos.lab.run.checks.complete`), so another folder or length needs no second setting.
In Python a recipe is built by its name: `mnemos.registry.load("recipe", "text-cached")()`.
"""
