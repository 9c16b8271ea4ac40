"""The small Memformer of figures 6, 7 and 8, trained on the text in --data or on the standard library's source."""

from dataclasses import replace
from typing import Any

from mnemos.lab.recipes.text_recipes import text_memformer
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.tasks.text import TextConfig

from ..reproduce import Options


def small(options: Options, steps: int) -> Recipe:
    """The recipe text-memformer with the paper's preset, LayerNorm, GELU and the rate 1e-3, on the options' text.

    `steps`: the updates, where the options say no number. Only 1 % of the documents is held out: for such small models
    a small test split is sufficient.
    """
    recipe = text_memformer()
    model: Any = recipe.model
    data: Any = recipe.data
    assert isinstance(data, TextConfig)
    data = replace(data, path=None if options.data is None else str(options.data), held_out=0.01)
    count = options.steps or steps
    train = replace(recipe.train, steps=count, eval_every=max(1, count // 4))
    optim = replace(recipe.optim, lr=1e-3, schedule=replace(recipe.optim.schedule, warmup=100))
    model = replace(model, preset="paper", norm="pre", activation="gelu", mlp=256)
    return replace(recipe, model=model, data=data, optim=optim, train=train)


def source(options: Options) -> str:
    """A description of the text, for titles."""
    return "the standard library's source" if options.data is None else f"the text in {options.data}"
