"""Small recipes to start from, at least one per task. `papers` has the others.

Sizes that the data determine (vocabulary, length, image, channels, classes, bands) are 0 in a recipe. A run fills them
in when it opens its data (`mnemos.lab.run.checks.complete`), so another folder or length needs no second setting.
In Python a recipe is built by its name: `mnemos.registry.load("recipe", "text-cached")()`.
"""

from typing import NoReturn

from mnemos import registry


def __getattr__(name: str) -> NoReturn:
    how = f"mnemos.registry.load('recipe', {registry.default_name(name)!r})() builds the recipe of that name"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {how}")
