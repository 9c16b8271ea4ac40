"""Families of recipes: one function with a few named axes, and a recipe for each combination of their values."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from mnemos import registry
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig
from mnemos.models.transformer import TransformerConfig
from mnemos.types import InputError

ByValues = Callable[..., Recipe]
_Config = TypeVar("_Config")


def family(names: str, **axes: Iterable[str]) -> Callable[[Callable[..., Recipe | None]], ByValues]:
    """Register a recipe for each combination of the values of some axes: decorate a function of these values.

        @family("listops-128-{attention}-{memory}", attention=_ATTENTIONS, memory=("", "cached"))
        def listops_128(attention: str, memory: str) -> Recipe:
            \"""Long ListOps in 64 to 128 symbols: what `mnemos list` says of the family.\"""

    names: the pattern of the recipes' names; an empty value leaves no dash. axes: the values of each; of a mapping its
    keys. The function returns the recipe with its `about`, or None for a combination that is no recipe, and must not
    build data or a model. The decorated function returns the named recipe of some values; an axis that is left out has
    its first one. Raises InputError for a name that is taken.
    """
    axis_values = {axis: tuple(values) for axis, values in axes.items()}

    def decorate(function: Callable[..., Recipe | None]) -> ByValues:
        def build(values: dict[str, str]) -> Recipe | None:
            recipe = function(**values)
            name = "-".join(part for part in names.format(**values).split("-") if part)
            return recipe and replace(recipe, name=name)

        @functools.wraps(function)
        def by_values(*args: str, **kwargs: str) -> Recipe:
            passed = inspect.signature(function).bind_partial(*args, **kwargs).arguments
            values = {axis: passed.get(axis, every[0]) for axis, every in axis_values.items()}
            recipe = build(values) if all(values[axis] in every for axis, every in axis_values.items()) else None
            if recipe is None:
                raise InputError(f"{function.__name__}: expected values of a recipe, found {passed}; see mnemos list")
            return recipe

        for combination in itertools.product(*axis_values.values()):
            values = dict(zip(axis_values, combination, strict=True))
            recipe = build(values)
            if recipe is None:
                continue
            member = functools.partial(by_values, **values)
            # Registered as defined where the family is.
            functools.update_wrapper(member, by_values, ("__module__", "__name__", "__qualname__"), ())
            member.__doc__ = recipe.about
            registry.add("recipe", recipe.name, member)
        return by_values

    return decorate


def altered(config: _Config, **fields: Any) -> _Config:
    """A configuration with other fields; a dictionary holds the changed fields of a part.

    altered(recipe, name="small", model={"dim": 32, "memory": {"slots": 8}}, train={"steps": 100})
    """
    parts = {
        name: altered(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    old: Any = config
    new: _Config = replace(old, **parts)
    return new


def variant(recipe: Recipe, about: str, **fields: Any) -> Recipe:
    """The recipe with another `about`, and with other fields of its model."""
    return altered(recipe, about=about, model=fields)


def transformer(**fields: Any) -> TransformerConfig:
    """`TransformerConfig.classic` whose vocabulary and length come from the data."""
    return TransformerConfig.classic(vocab_size=0, max_length=0, **fields)


def cosine(lr: float, warmup: float, floor: float = 0.0, **fields: Any) -> OptimConfig:
    """AdamW with a warm-up and half a cosine down to a share `floor` of `lr`; fields: others of `OptimConfig`."""
    return OptimConfig(lr=lr, schedule=ScheduleConfig("cosine", warmup=warmup, floor=floor), **fields)


def about_lines(text: str) -> dict[str, str]:
    """What recipes say of themselves, `VALUE: ABOUT` a line; the value of the recipe without one is `-`."""
    rows = (line.partition(": ") for line in text.strip().splitlines())
    return {"" if value == "-" else value: about for value, _, about in rows}
