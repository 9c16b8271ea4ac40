"""The recipes of `mnemos compare`, with each combination of the values of its option --vary."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import replace

from mnemos.errors import InputError
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.recipe_fields import with_fields
from mnemos.lab.run.recipe_files import find_recipe

MOST = 64  # recipes: a table of more rows is not read, and a mistyped list of values would train for days


def variants(names: Sequence[str], words: Sequence[str], vary: Sequence[tuple[str, str]]) -> list[Recipe]:
    """Each recipe with each combination of values, named for them: short-listops-cached-length-8-dim-64.

    names: as of `find_recipe`. words: settings of all recipes. vary: pairs of a field and its values, such as
    ("model.cache.length", "8,32"); the values of the last field change fastest. Raises InputError for a field that is
    given twice, for more than `MOST` recipes, and as `with_fields` does.
    """
    fields = [field for field, _ in vary]
    if twice := next((field for field in fields if fields.count(field) > 1), None):
        raise InputError(f"--vary: expected each field once, found {twice} twice; give its values in one list")
    axes = [[(field, value) for value in values.split(",")] for field, values in vary]
    count = len(names) * math.prod(map(len, axes))
    if count > MOST:
        product = " × ".join(str(n) for n in (len(names), *map(len, axes)))
        raise InputError(f"--vary: expected at most {MOST} recipes, found {product} = {count}; give fewer values")
    recipes = []
    for name in names:
        for chosen in itertools.product(*axes):
            more = [word for field, value in chosen for word in (f"--{field}", value)]
            recipe = with_fields(find_recipe(name), [*words, *more], f"mnemos compare {name}")
            parts = [(field.split(".")[-1], re.sub(r"[^\w.+-]", "_", value)) for field, value in chosen]
            recipes.append(replace(recipe, name="-".join([recipe.name, *itertools.chain.from_iterable(parts)])))
    return recipes
