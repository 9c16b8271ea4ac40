"""Read explain.json and explain.safetensors: the analysis of a finished model's caches."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mnemos.json_text import parse
from mnemos.lab.evaluate.records import number
from mnemos.types import InputError, JSONObject

from .read_memory import read_state_controls
from .results import Cached, Explained

_REMEDY = "delete both explain files to make the report without them"
_COST = ("rows", "tokens", "slots", "width", "cache_width", "heads", "parameters", "training_macs", "inference_macs")
_MAPS = ("weight", "memory_own", "self_own")
_SLOTS: tuple[str, ...] = (
    "compared",
    "tokens",
    "images",
    "cosine",
    "chance",
    "raw_cosine",
    "raw_chance",
    "distance",
    "place",
)
_SLOTS += ("distinct", "distinct_images")


def read_explained(folder: Path) -> Explained | None:
    """The content of the two files in a run folder; None if there are none. Raises InputError if they are malformed."""
    path = folder / "explain.json"
    if not path.is_file():
        return None
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: expected JSON, found {error.msg}; {_REMEDY}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a JSON file, found {error}; {_REMEDY}") from None
    arrays = _arrays(folder / "explain.safetensors")
    where = str(path)
    pictures = _part(found, where, "pictures")
    count = 0
    if pictures is not None:
        count = len(_list(pictures.get("label"), f"{where}, pictures", "label"))
        _list(pictures.get("guess"), f"{where}, pictures", "guess", count)
        _list(pictures.get("names"), f"{where}, pictures", "names")
    layers = _list(found.get("layers"), where, "layers") if found.get("layers") != [] else []
    return Explained(
        layers=tuple(_layer(entry, f"{where}, layer {i}", i, count, arrays, path) for i, entry in enumerate(layers)),
        pictures=_array(arrays, "pictures", (count, 0, 0, 0), path) if count else None,
        about=pictures or {},
        left=found.get("left"),
        middle=found.get("middle") if isinstance(found.get("middle"), int) else None,
        memory=read_state_controls(found.get("memory"), where),
        sizes={k: number(v, where, f"sizes.{k}") for k, v in (_part(found, where, "sizes") or {}).items()},
    )


def _layer(entry: object, where: str, index: int, count: int, arrays: dict[str, np.ndarray], path: Path) -> Cached:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise InputError(f'{where}: expected an object with a "name", found {str(entry)[:40]!r}; {_REMEDY}')
    share = [number(s, where, "share") for s in _list(entry.get("share"), where, "share")]
    maps, slots, cost = (_part(entry, where, name) for name in ("maps", "slots", "cost"))
    drawn: JSONObject = {}
    if maps is not None and "left" not in maps:
        drawn["self_map"] = _array(arrays, f"self.{index}", (count, 0, 0), path)
        drawn["memory_map"] = _array(arrays, f"memory.{index}", drawn["self_map"].shape, path)
        inside = f"{where}, maps"
        maps = {**maps, **{key: number(maps.get(key), inside, key) for key in _MAPS}}
        each = _list(maps.get("correlation"), inside, "correlation", count)
        maps["correlation"] = [number(value, inside, "correlation") for value in each]
    if slots is not None and "left" not in slots:
        inside = f"{where}, slots"
        shown = _list(slots.get("shown"), inside, "shown")
        nearest = _list(slots.get("nearest"), inside, "nearest", len(shown))
        slots = {**slots, **{key: number(slots.get(key), inside, key) for key in _SLOTS}}
        drawn["patches"] = _array(arrays, f"patches.{index}", (len(shown), len(nearest[0]), 0, 0, 0), path)
    if cost is not None:
        cost = {key: number(cost.get(key), f"{where}, cost", key) for key in _COST}
        if not all(math.isfinite(value) for value in cost.values()):
            raise InputError(f'{where}: expected "cost" to give {", ".join(_COST)}; {_REMEDY}')
    return Cached(entry["name"], tuple(share), cost, maps, slots, entry.get("inference"), **drawn)


def _part(found: object, where: str, name: str) -> JSONObject | None:
    if not isinstance(found, dict):
        raise InputError(f"{where}: expected a JSON object, found {type(found).__name__}; {_REMEDY}")
    part = found.get(name)
    if part is not None and not isinstance(part, dict):
        raise InputError(f'{where}: expected "{name}" to be an object or null, found {str(part)[:40]!r}; {_REMEDY}')
    return part


def _list(value: object, where: str, name: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or not value or (length is not None and len(value) != length):
        what = "a list" if length is None else f"a list of {length}"
        raise InputError(f'{where}: expected "{name}" to be {what}, found {str(value)[:40]!r}; {_REMEDY}')
    return value


def _arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        return {}
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"{path}: expected safetensors, found {error}; {_REMEDY}") from None


def _array(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """The array `name`, checked against a shape where 0 means any size."""
    path = path.with_suffix(".safetensors")
    found = arrays.get(name)
    if found is None:
        raise InputError(f"{path}: expected {name!r} in it, found none; {_REMEDY}")
    fits = found.ndim == len(shape) and all(n in (0, m) and m for n, m in zip(shape, found.shape, strict=True))
    if fits and found.dtype == np.uint8:
        fits = found.shape[-1] in (1, 3)
    if not fits:
        raise InputError(
            f"{path}: expected {name!r} of shape {list(shape)} (0: any), found {list(found.shape)}; {_REMEDY}"
        )
    return found
