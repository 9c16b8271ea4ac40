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
        content = parse(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: expected JSON, found {error.msg}; {remedy}") from None
    except FileNotFoundError:
        raise InputError(f"{path}: expected a JSON file, found none; name a folder that a run wrote") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a JSON file, found {error}; {remedy}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}, line 1: expected a JSON object, found {type(content).__name__}; {remedy}")
    return content


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


# What JSON has for a type, and its name in errors; for a dataclass and a dict it is an object.
_WRITTEN: dict[Any, tuple[Any, str]] = {
    int: (int, "an integer"),
    float: ((int, float), "a number"),
    str: (str, "a text"),
    bool: (bool, "true or false"),
    tuple: (list, "a list"),
    list: (list, "a list"),
    np.ndarray: (list, "a list of numbers"),
}


def _read(cls: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if cls is Any or (value is None and type(None) in (cls, *arguments)):
        return value
    if value is None and cls is float:
        return math.nan
    if origin in (typing.Union, types.UnionType):
        # Of several dataclasses, the first whose required fields are there.
        options = [option for option in arguments if option is not type(None)]
        return _read(next((one for one in options if _has_required(one, value)), options[0]), value, name)
    if origin is typing.Literal:
        if value not in arguments:
            raise _WrongError(name, f"one of {', '.join(map(str, arguments))}", value)
        return value

    # --- a value of one type: what JSON has for it, and its parts ---
    base = origin or cls
    written, words = _WRITTEN.get(base, (dict, "an object"))
    if not isinstance(value, written) or (isinstance(value, bool) and base is not bool):
        raise _WrongError(name, words, value)
    if isinstance(value, int) and abs(value) >= 2**63:  # charts and arrays have 64 bits
        raise _WrongError(name, words, "one too large")
    if base is tuple:
        of = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(of) != len(value):
            raise _WrongError(name, f"a list of {len(of)}", value)
        return tuple(_read(one, part, f"{name}[{i}]") for i, (one, part) in enumerate(zip(of, value, strict=True)))
    if base is list:
        return [_read(arguments[0], one, f"{name}[{i}]") for i, one in enumerate(value)]
    if base is np.ndarray:
        return np.array([_read(float, one, f"{name}[{i}]") for i, one in enumerate(value)])
    if base is dict:
        return {key: _read(arguments[1], one, f"{name}.{key}") for key, one in value.items()}
    if not dataclasses.is_dataclass(base):
        return value
    hints, parts = typing.get_type_hints(base), {}
    for field in dataclasses.fields(base):
        inside = f"{name}.{field.name}" if name else field.name
        if field.name in value:
            parts[field.name] = _read(hints[field.name], value[field.name], inside)
        elif _is_required(field):
            raise _WrongError(inside, "given", "none")
    return cls(**parts)


def _has_required(cls: Any, value: Any) -> bool:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) and isinstance(value, dict) else None
    return fields is not None and all(field.name in value for field in fields if _is_required(field))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
