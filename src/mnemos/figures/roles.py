"""Which variant of a comparison is whose baseline, read from the recipes and never from names."""

import json
import math
from typing import Literal

from mnemos.config import from_dict, to_dict
from mnemos.memory.grc import GRC
from mnemos.types import InputError, JSONObject

from .results import Comparison, Row

EQUAL = 0.05  # variants whose parameters differ by less than this share count as of equal size
Memory = Literal["written", "unwritten", "other", "none"]
Role = Literal["unwritten", "equal", "smaller", "larger", "memory"]


def memory(comparison: Comparison, name: str) -> Memory:
    """The memory of a variant: a gated cache ("written", or never: "unwritten"), another one, or none.

    Where no run folder gives a recipe: "written" for what was evaluated with its cache emptied or reports gates.
    """
    runs = comparison.runs.get(name)
    if not runs:
        return "written" if name in comparison.with_memory() else "none"
    model = runs[0].recipe.get("model")
    found = _gated(model)
    if found:
        return "written" if any(cache.get("write", True) for cache in found) else "unwritten"
    if not isinstance(model, dict):
        return "none"
    slots = model.get("memory")
    return "other" if model.get("cache") or (isinstance(slots, dict) and slots.get("slots")) else "none"


def role(comparison: Comparison, row: Row, other: Row) -> Role:
    """What `other` is to `row`, whose cache is written.

    unwritten: the same recipe with a cache that is never written, as `GRC.unwritten` makes it. memory: another variant
    with a memory (or the never-written baseline of another variant). equal, smaller, larger: no memory, and the number
    of parameters compared with those of `row`; one that is not known counts as larger.
    """
    kind = memory(comparison, other.name)
    if kind == "unwritten":
        baseline = _recipe(comparison, row.name, unwritten=True)
        return "unwritten" if baseline and baseline == _recipe(comparison, other.name) else "memory"
    if kind != "none":
        return "memory"
    if not (math.isfinite(row.parameters) and math.isfinite(other.parameters)) or row.parameters <= 0:
        return "larger"
    share = other.parameters / row.parameters - 1
    return "equal" if abs(share) <= EQUAL else "smaller" if share < 0 else "larger"


def _gated(value: object) -> list[JSONObject]:
    """Every configuration of a gated cache (`mnemos.GRC`) within a recipe's JSON; it has a preset and a length."""
    if isinstance(value, dict):
        if {"preset", "length"} <= set(value):
            return [value]
        return [cache for part in value.values() for cache in _gated(part)]
    return [cache for part in value for cache in _gated(part)] if isinstance(value, list) else []


def _recipe(comparison: Comparison, name: str, unwritten: bool = False) -> str | None:
    """A variant's recipe without its name and seed, with every switch of its gated caches set.

    unwritten: the recipe whose caches are never written (`GRC.unwritten`). None without a recipe, or with one whose
    caches this version cannot read.
    """
    runs = comparison.runs.get(name)
    if not runs:
        return None
    recipe = json.loads(json.dumps(runs[0].recipe))
    for field in ("name", "about"):
        recipe.pop(field, None)
    if isinstance(recipe.get("train"), dict):
        recipe["train"].pop("seed", None)
    for found in _gated(recipe.get("model")):
        try:
            cache: GRC = from_dict(GRC, found)
        except InputError:
            return None
        found.clear()
        found |= to_dict((cache.unwritten() if unwritten else cache).resolved())
    return json.dumps(recipe, sort_keys=True)
