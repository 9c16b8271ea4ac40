"""Families of recipes: one function with a few named axes, and a recipe for each combination of their values."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from mnemos import registry
from mnemos.lab.run.recipe import Recipe
from mnemos.types import InputError

Made = Callable[..., Recipe]
_Config = TypeVar("_Config")


def family(names: str, **axes: Iterable[str]) -> Callable[[Callable[..., Recipe | None]], Made]:
    """Register a recipe for each combination of the values of some axes: decorate a function of these values.

        @family("listops-128-{attention}-{memory}", attention=_ATTENTIONS, memory=("", "cached"))
        def listops_128(attention: str, memory: str) -> Recipe:
            \"""Long ListOps in 64 to 128 symbols: what `mnemos list` says of the family.\"""

    names: the pattern of the recipes' names; an empty value leaves no dash. axes: the values of each axis; of a mapping
    these are its keys, so that a row of it is a recipe.
    The function returns the recipe with its `about`, or None for a combination that is no recipe. It is called for
    every combination when its module is imported, and must not build data or a model. The decorated function returns
    the named recipe of some values; an axis that is left out has its first one. Raises InputError for a recipe without
    `about`, and for a name that is taken, also by another combination.
    """
    values = {axis: tuple(each) for axis, each in axes.items()}

    def decorate(function: Callable[..., Recipe | None]) -> Made:
        def named(chosen: dict[str, str]) -> Recipe | None:
            recipe = function(**chosen)
            name = "-".join(part for part in names.format(**chosen).split("-") if part)
            return recipe and replace(recipe, name=name)

        @functools.wraps(function)
        def made(*args: str, **kwargs: str) -> Recipe:
            given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
            chosen = {axis: given.get(axis, each[0]) for axis, each in values.items()}
            recipe = named(chosen) if all(chosen[axis] in each for axis, each in values.items()) else None
            if recipe is None:
                raise InputError(f"{function.__name__}: expected values of a recipe, found {given}; see mnemos list")
            return recipe

        taken: set[str] = set()
        for each in itertools.product(*values.values()):
            chosen = dict(zip(values, each, strict=True))
            recipe = named(chosen)
            if recipe is None:
                continue
            if recipe.name in taken:
                raise InputError(
                    f"recipe {recipe.name!r}: expected one combination of values with this name, found another, "
                    f"{chosen}; name every axis in {names!r}"
                )
            taken.add(recipe.name)
            registry.add("recipe", recipe.name, _member(made, recipe, chosen))
        return made

    return decorate


def _member(made: Made, recipe: Recipe, chosen: dict[str, str]) -> Made:
    """The function of one recipe of a family, registered as defined where the family is."""
    if not recipe.about:
        raise InputError(f"recipe {recipe.name!r}: expected an `about` for `mnemos list`, found none; add one")
    member = functools.partial(made, **chosen)
    functools.update_wrapper(member, made, ("__module__", "__name__", "__qualname__"), ())
    member.__doc__ = recipe.about
    return member


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
