"""Read write_attention.json: what the slots of a finished model attend to when they are written."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from mnemos.json_text import parse
from mnemos.lab.evaluate.records import number
from mnemos.types import InputError, JSONObject

from .results import SlotExample, WriteAttention

KINDS = ("holds", "mixes", "overwrites")
_REMEDY = "delete it to make the report without it"


def read_write_attention(folder: Path) -> WriteAttention | None:
    """The content of the file in a run folder; None if there is none. Raises InputError if it is malformed."""
    path = folder / "write_attention.json"
    if not path.is_file():
        return None
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected a JSON file, found {error}; {_REMEDY}") from None
    where = str(path)
    found = _object(found, where, "its content")
    shares = _object(found.get("shares"), where, "shares")
    shown = _object(found.get("shown"), where, "shown")
    by_kind = _object(found.get("kinds"), where, "kinds")
    middle = _object(found.get("middle"), where, "middle")
    for kind in KINDS:
        _given(middle.get(kind), where, f"middle.{kind}")
        _given(_object(by_kind.get(kind), where, f"kinds.{kind}").get("slots"), where, f"kinds.{kind}.slots")
        for name in ("bias", "least", "most"):
            number(by_kind[kind].get(name), where, f"kinds.{kind}.{name}")
    for name in ("documents", "segment", "slots", "radius"):
        _given(found.get(name), where, name)
    _numbers(found.get("thresholds"), where, "thresholds", 2)
    for name in ("place", "of", "first"):
        _given(shown.get(name), where, f"shown.{name}")
    counts = _numbers(found.get("counts"), where, "counts")
    examples = shown.get("examples")
    if not isinstance(examples, list) or not examples:
        raise InputError(f'{where}: expected "shown.examples" to be a list, found {str(examples)[:40]!r}; {_REMEDY}')
    examples_read = tuple(_slot_example(_object(one, where, "an example"), where) for one in examples)
    tokens = len(examples_read[0].weights)
    if any(len(one.weights) != tokens for one in examples_read) or not 0 < shown["first"] <= tokens:
        raise InputError(f'{where}: expected "first" of as many "weights" in every example, found others; {_REMEDY}')
    return WriteAttention(
        shares={kind: _numbers(shares.get(kind), where, f"shares.{kind}", len(counts)) for kind in KINDS},
        examples=examples_read,
        words=_words(shown.get("words"), where, tokens),
        first=int(shown["first"]),
        about=found,
    )


def _slot_example(one: JSONObject, where: str) -> SlotExample:
    if one.get("kind") not in KINDS:
        raise InputError(
            f'{where}: expected "kind" to be one of {", ".join(KINDS)}, found {one.get("kind")!r}; {_REMEDY}'
        )
    slot, itself, bias = (_given(one.get(name), where, name) for name in ("slot", "itself", "bias"))
    return SlotExample(int(slot), one["kind"], itself, bias, _numbers(one.get("weights"), where, "weights"))


def _words(value: Any, where: str, tokens: int) -> tuple[tuple[str, int], ...] | None:
    if value is None:
        return None
    fits = isinstance(value, list) and all(
        isinstance(word, list) and len(word) == 2 and isinstance(word[0], str) and isinstance(word[1], int)
        for word in value
    )
    if not fits or sum(length for _, length in value) != tokens:
        raise InputError(f'{where}: expected "words" of {tokens} tokens, found {str(value)[:40]!r}; {_REMEDY}')
    return tuple((text, length) for text, length in value)


def _object(value: object, where: str, name: str) -> JSONObject:
    if not isinstance(value, dict):
        raise InputError(f'{where}: expected "{name}" to be an object, found {str(value)[:40]!r}; {_REMEDY}')
    return value


def _given(value: object, where: str, name: str) -> float:
    found = number(value, where, name)
    if not math.isfinite(found):
        raise InputError(f'{where}: expected "{name}" to be a number, found {value!r}; {_REMEDY}')
    return found


def _numbers(value: object, where: str, name: str, length: int | None = None) -> np.ndarray:
    if not isinstance(value, list) or not value or (length is not None and len(value) != length):
        what = "a list of numbers" if length is None else f"a list of {length} numbers"
        raise InputError(f'{where}: expected "{name}" to be {what}, found {str(value)[:40]!r}; {_REMEDY}')
    return np.array([_given(one, where, name) for one in value])
