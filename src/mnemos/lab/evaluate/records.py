"""Dataclasses as JSON files. A file may lack fields that have a default, and have more, which are ignored."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mnemos.atomic import parse, read_text
from mnemos.config import from_dict
from mnemos.types import InputError, JSONObject

Record = TypeVar("Record")
OMITTED = {"omitted": True}  # metadata of a field that is not written where it is None
APART = {"apart": True}  # metadata of an array that another file holds


def to_json(value: object) -> Any:
    """A dataclass as JSON values: tuples and arrays become lists, NaN becomes null."""
    if dataclasses.is_dataclass(value):
        return {
            field.name: to_json(part)
            for field in dataclasses.fields(value)
            if not field.metadata.get("apart")
            and ((part := getattr(value, field.name)) is not None or not field.metadata.get("omitted"))
        }
    if isinstance(value, dict):
        return {name: to_json(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, (list, tuple)):
        return [to_json(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def read_object(path: Path, remedy: str) -> JSONObject:
    """The JSON object in a file. Raises InputError for anything else."""
    try:
        content = parse(read_text(path))
    except FileNotFoundError:
        raise InputError(f"{path}: expected a JSON file, found none; name a folder that a run wrote") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected JSON, found a damaged file ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {content!r:.40}; {remedy}")
    return content


def from_json(cls: type[Record], value: object, where: object, remedy: str, name: str = "") -> Record:
    """The dataclass that `to_json` wrote. Raises InputError, which names `where` and the field, for wrong types."""
    try:
        record: Record = from_dict(cls, value, name, record=True)
    except InputError as error:
        raise InputError(f"{where}: {str(error).removesuffix('; change it')}; {remedy}") from None
    return record


def number(value: object, where: object, name: str) -> float:
    """A measured number; NaN if it is absent or null. Raises InputError if it is not a number."""
    return from_json(float, value, where, "repair or delete it", name)


def flat(value: object, prefix: str = "") -> JSONObject:
    """Nested objects as dotted names: {"train": {"steps": 5}} becomes {"train.steps": 5}."""
    if not isinstance(value, dict):
        return {prefix: value}
    out: JSONObject = {}
    for key, part in value.items():
        out |= flat(part, f"{prefix}.{key}" if prefix else str(key))
    return out
