"""What the variants of a comparison are to each other: with which memory, and whose baseline."""

import math
from typing import Literal

from mnemos.config import AttentionConfig, from_dict
from mnemos.memory.written import SEGMENT_MEMORIES
from mnemos.types import InputError, JSONObject

from .results import Comparison, Row

EQUAL = 0.05  # variants whose parameters differ by less than this share count as of equal size
Memory = Literal["written", "unwritten", "other", "none"]
Role = Literal["unwritten", "equal", "smaller", "larger", "memory"]


def memory(comparison: Comparison, name: str) -> Memory:
    """The memory of a variant: a gated cache or slots ("written", or never: "unwritten"), another one, or none.

    Another one: an attention-based cache, the sums or segments of a causal attention, or the state of an LSTM.
    Where no run folder gives a recipe: "written" for what was evaluated with its cache emptied or reports gates.
    """
    runs = comparison.runs.get(name)
    if not runs:
        return "written" if name in comparison.with_memory() else "none"
    model = runs[0].recipe.get("model")
    found = writable(model)
    if found:
        return "written" if any(one.get("write", True) for one in found) else "unwritten"
    return "other" if isinstance(model, dict) and (model.get("cache") or _remembers(model)) else "none"


def _remembers(model: JSONObject) -> bool:
    """Whether the model itself is recurrent, or reads with a causal attention that keeps a memory."""
    if model.get("is") == "lstm":
        return True
    try:
        attention = from_dict(AttentionConfig, model.get("attention"))
    except InputError:  # no attention, or one that is not installed
        return False
    return bool(attention.remembers and model.get("causal", True))


def noun(comparison: Comparison, name: str) -> str:
    """What the memory of a variant is called: "a cache", or the plural of a memory of segments, such as "slots"."""
    runs = comparison.runs.get(name)
    found = writable(runs[0].recipe.get("model")) if runs else []
    kind = _segment_memory(found[0]) if found else None
    return SEGMENT_MEMORIES[kind].noun if kind else "a cache"


def role(comparison: Comparison, row: Row, other: Row) -> Role:
    """What `other` is to `row`, whose cache is written.

    unwritten: its never-written baseline (`Row.baseline_of`). memory: another variant with a memory (or the
    never-written baseline of another variant). equal, smaller, larger: no memory, and the number of parameters compared
    with those of `row`; one that is not known counts as larger.
    """
    if row.name in (other.baseline_of or ()):
        return "unwritten"
    if memory(comparison, other.name) != "none":
        return "memory"
    if not (math.isfinite(row.parameters) and math.isfinite(other.parameters)) or row.parameters <= 0:
        return "larger"
    share = other.parameters / row.parameters - 1
    return "equal" if abs(share) <= EQUAL else "smaller" if share < 0 else "larger"


def writable(value: object) -> list[JSONObject]:
    """Every configuration of a gated cache (`mnemos.GRC`), of slots or of memory tokens within a recipe's JSON.

    A gated cache has a preset and a length; a memory of 0 slots or tokens is none.
    """
    if isinstance(value, dict):
        kind = _segment_memory(value)
        if {"preset", "length"} <= set(value) or (kind and value[SEGMENT_MEMORIES[kind].size]):
            return [value]
        return [one for part in value.values() for one in writable(part)]
    return [one for part in value for one in writable(part)] if isinstance(value, list) else []


def _segment_memory(value: JSONObject) -> type | None:
    """The class of the configuration that a part of a recipe's JSON is, if it is one with a switch `write`."""
    return next((cls for cls, kind in SEGMENT_MEMORIES.items() if kind.names <= set(value)), None)
