"""Read the controls of a state from explain.json: how a finished model scores with its memory changed."""

import math
from typing import Any

import numpy as np

from mnemos.lab.evaluate.records import number
from mnemos.types import InputError, JSONObject

from .results import ControlledMemory, StateControls

KINDS = ("emptied", "exchanged", "frozen")
_REMEDY = "delete explain.json to make the report without it"


def read_state_controls(found: object, where: str) -> StateControls | None:
    """The entry "memory" of explain.json; None for a run of before it was recorded. Raises InputError otherwise."""
    if found is None:
        return None
    where = f"{where}, memory"
    entry = _object(found, where, "its content")
    if isinstance(entry.get("left"), str):
        return StateControls(entry["left"])
    if not isinstance(entry.get("metric"), str):
        raise InputError(f'{where}: expected "metric" to be a name, found {entry.get("metric")!r}; {_REMEDY}')
    segments = _numbers(entry.get("segments"), where, "segments")
    carried, course = _scored(entry.get("carried"), where, "carried", len(segments))
    about = {name: number(entry.get(name), where, name) for name in ("rows", "targets", "cut")}
    for name in ("rows", "targets"):
        if not math.isfinite(about[name]):
            raise InputError(f'{where}: expected "{name}" to be a number, found {entry.get(name)!r}; {_REMEDY}')
    memories = entry.get("memories")
    if not isinstance(memories, list) or not memories:
        raise InputError(f'{where}: expected "memories" to be a list, found {str(memories)[:40]!r}; {_REMEDY}')
    return StateControls(
        None,
        entry["metric"],
        about,
        segments,
        carried,
        course,
        tuple(_memory(one, where, len(segments)) for one in memories),
    )


def _memory(entry: object, where: str, count: int) -> ControlledMemory:
    found = _object(entry, where, "memories")
    if not isinstance(found.get("name"), str):
        raise InputError(f'{where}: expected a memory with a "name", found {found.get("name")!r}; {_REMEDY}')
    where = f"{where}, {found['name']}"
    left = {kind: str(found[kind]["left"]) for kind in KINDS if "left" in _object(found.get(kind), where, kind)}
    scored = {kind: _scored(found[kind], where, kind, count) for kind in KINDS if kind not in left}
    scores = {kind: one for kind, (one, _) in scored.items()}
    return ControlledMemory(found["name"], scores, {kind: course for kind, (_, course) in scored.items()}, left)


def _scored(entry: object, where: str, name: str, count: int) -> tuple[dict[str, float], np.ndarray]:
    found = _object(entry, where, name)
    scores = _object(found.get("scores"), where, f"{name}.scores")
    course = _numbers(found.get("by_segment"), where, f"{name}.by_segment")
    if len(course) != count:
        raise InputError(f'{where}: expected {count} numbers in "{name}.by_segment", found {len(course)}; {_REMEDY}')
    return {key: number(value, where, f"{name}.scores.{key}") for key, value in scores.items()}, course


def _object(value: Any, where: str, name: str) -> JSONObject:
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected "{name}" to be an object, found {str(value)[:40]!r}; {_REMEDY}')
    return value


def _numbers(value: Any, where: str, name: str) -> np.ndarray:
    if not isinstance(value, list) or not value:
        raise InputError(f'{where}: expected "{name}" to be a list of numbers, found {str(value)[:40]!r}; {_REMEDY}')
    return np.array([number(one, where, name) for one in value])
