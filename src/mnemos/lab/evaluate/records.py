"""Dataclasses as JSON files: the class that writes a file of results reads it, and says what is wrong with a file.

A field that a file may lack has a default; fields that the class does not know are ignored. A missing number is null in
JSON and NaN in Python.
"""

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mnemos.atomic import parse, read_text
from mnemos.types import InputError, JSONObject

Record = TypeVar("Record")
OMITTED = {"omitted": True}  # metadata of a field that is not written where it is None
_MOST = 2**63  # of an integer, as charts and arrays have them
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
    """The JSON object in a file. Raises InputError, with file and line, for anything else."""
    try:
        found = parse(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: expected JSON, found {error.msg}; {remedy}") from None
    except FileNotFoundError:
        raise InputError(f"{path}: expected a JSON file, found none; name a folder that a run wrote") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a JSON file, found {error}; {remedy}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}, line 1: expected a JSON object, found {type(found).__name__}; {remedy}")
    return found


def from_json(cls: type[Record], value: object, where: object, remedy: str, name: str = "") -> Record:
    """The dataclass that `to_json` wrote. Raises InputError, which names `where` and the field, for wrong types."""
    try:
        record: Record = _read(cls, value, name)
    except _WrongError as wrong:
        name, expected, found = wrong.args
        at = f' "{name}" to be' if name else ""
        raise InputError(f"{where}: expected{at} {expected}, found {str(found)[:40]!r}; {remedy}") from None
    return record


def number(value: object, where: object, name: str) -> float:
    """A measured number; NaN if it is absent or null. Raises InputError if it is not a number."""
    return from_json(float, value, where, "repair or delete it", name)


class _WrongError(Exception):
    """(field, what was expected there, what was found)."""


def _read(cls: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if cls is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, value, name)
    if origin is typing.Literal:
        return _checked(value in arguments, value, name, f"one of {', '.join(map(str, arguments))}")
    if origin is tuple:
        _checked(isinstance(value, list), value, name, "a list")
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        _checked(len(kinds) == len(value), value, name, f"a list of {len(kinds)}")
        return tuple(_read(kind, one, f"{name}[{i}]") for i, (kind, one) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        _checked(isinstance(value, dict), value, name, "an object")
        return {key: _read(arguments[1], one, f"{name}.{key}") for key, one in value.items()}
    if dataclasses.is_dataclass(cls):
        return _read_dataclass(cls, value, name)
    if cls is float:
        return _read_number(value, name)
    if cls is np.ndarray:
        _checked(isinstance(value, list), value, name, "a list of numbers")
        return np.array([_read_number(one, f"{name}[{i}]") for i, one in enumerate(value)])
    if cls is int and isinstance(value, int):
        _checked(abs(value) < _MOST, "one too large", name, "an integer")
    fits = isinstance(value, cls) and (cls is bool or not isinstance(value, bool))
    return _checked(fits, value, name, {int: "an integer", str: "a text", bool: "true or false"}.get(cls, "an object"))


def _read_union(kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    """The value as the first of the types; of several dataclasses, as the first whose required fields are there."""
    if value is None and type(None) in kinds:
        return None
    others = [kind for kind in kinds if kind is not type(None)]
    return _read(next((kind for kind in others if _has_required(kind, value)), others[0]), value, name)


def _has_required(cls: Any, value: Any) -> bool:
    """Whether a value has the required fields of a dataclass."""
    if not (dataclasses.is_dataclass(cls) and isinstance(value, dict)):
        return False
    return all(field.name in value or _has_default(field) for field in dataclasses.fields(cls))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _read_dataclass(cls: Any, value: Any, name: str) -> Any:
    _checked(isinstance(value, dict), value, name, "an object")
    hints = typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        inside = f"{name}.{field.name}" if name else field.name
        if field.name in value:
            found[field.name] = _read(hints[field.name], value[field.name], inside)
        else:
            _checked(_has_default(field), "none", inside, "given")
    return cls(**found)


def _read_number(value: Any, name: str) -> float:
    if value is None:
        return math.nan
    _checked(isinstance(value, (int, float)) and not isinstance(value, bool), value, name, "a number")
    _checked(isinstance(value, float) or abs(value) < _MOST, "one too large", name, "a number")
    return value


def _checked(fits: bool, value: Any, name: str, expected: str) -> Any:
    if not fits:
        raise _WrongError(name, expected, value)
    return value
