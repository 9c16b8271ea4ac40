"""Read `metrics.jsonl`: one JSON object per line, of kind "train", "valid" or "gates"."""

import math
from pathlib import Path

import numpy as np

from mnemos.json_text import parse
from mnemos.types import InputError, JSONObject

from .results import Columns, GateCurves

# Measured by the trainer itself; every other number in a line is a metric of the task.
OWN = ("loss", "auxiliary_loss", "lr", "grad_norm", "seconds", "tokens")
GATES = ("update.mean", "update.saturated", "reset.mean", "reset.saturated", "cache.rms", "cache.rank", "cache.max")


def read_metrics(path: Path) -> tuple[Columns, Columns, GateCurves | None]:
    """The training, validation and gate records of a run, by step.

    A resumed run repeats the steps since its last checkpoint: of two lines with one kind and step the later counts.
    Lines of other kinds are ignored, and so is an incomplete last line, because the run may be writing or may have
    been killed. Raises InputError naming file and line.
    """
    found: dict[str, dict[int, tuple[str, JSONObject]]] = {"train": {}, "valid": {}, "gates": {}}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected the metrics of a run, found {error}; is this a run folder?") from None
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse(line)
        except ValueError as error:
            if 1 < number == len(lines):
                continue
            raise InputError(f"{where}: expected one JSON object, found {error}; repair or delete the line") from None
        if not isinstance(record, dict):
            raise InputError(f"{where}: expected one JSON object, found {line[:40]!r}; repair or delete the line")
        kind = record.get("kind")
        if isinstance(kind, str) and kind in found:
            found[kind][_step(record, where)] = where, record
    return _columns(found["train"]), _columns(found["valid"]), _gates(found["gates"])


def _step(record: JSONObject, where: str) -> int:
    step = record.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        raise InputError(
            f'{where}: expected "step" to be a count of updates, found {step!r}; repair or delete the line'
        )
    return step


def number(value: object, where: str, name: str) -> float:
    """A measured number; NaN if it is absent or null. Raises InputError if it is not a number."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f'{where}: expected "{name}" to be a number, found {value!r}; repair or delete it')
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        raise InputError(f'{where}: expected "{name}" to be a number, found one too large; delete it') from None


def _columns(records: dict[int, tuple[str, JSONObject]]) -> Columns:
    """One column per quantity in any line, and one for each quantity in OWN."""
    ordered = [records[step] for step in sorted(records)]
    names = dict.fromkeys([*OWN, *(n for _, r in ordered for n in r if n not in ("kind", "step"))])
    columns = {n: np.array([number(r.get(n), where, n) for where, r in ordered]) for n in names}
    return {"step": np.array(sorted(records), dtype=np.int64), **columns}


def _gates(records: dict[int, tuple[str, JSONObject]]) -> GateCurves | None:
    steps = sorted(records)
    rows = [_layers(*records[step]) for step in steps]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    if not names:
        return None
    heads = max(len(layer["mix"]) for row in rows for layer in row.values())
    mix = np.full((len(steps), len(names), heads), math.nan)
    values = {key: np.full((len(steps), len(names)), math.nan) for key in GATES}
    for s, row in enumerate(rows):
        for name, layer in row.items():
            place = names.index(name)
            mix[s, place, : len(layer["mix"])] = layer["mix"]
            for key in GATES:
                values[key][s, place] = layer[key]
    return GateCurves(np.array(steps, dtype=np.int64), names, mix, values)


def _layers(where: str, record: JSONObject) -> dict[str, JSONObject]:
    """One gates line, checked: layer name -> its "mix" (a list) and each of GATES (a number)."""
    layers = record.get("layers")
    if not isinstance(layers, list):
        raise InputError(f'{where}: expected "layers" to be a list, found {layers!r}; repair or delete the line')
    checked = {}
    for layer in layers:
        if not isinstance(layer, dict) or not isinstance(layer.get("name"), str):
            raise InputError(f'{where}: expected every layer to have a "name", found {layer!r}; delete the line')
        mix = layer.get("mix") or []
        if not isinstance(mix, list):
            raise InputError(
                f'{where}: expected "mix" to be a list with σ(λ) of each head, found {mix!r}; repair or delete the line'
            )
        entry: JSONObject = {"mix": [number(m, where, "mix") for m in mix]}
        for key in GATES:
            group, name = key.split(".")
            part = layer.get(group) or {}
            if not isinstance(part, dict):
                raise InputError(f'{where}: expected "{group}" to be an object, found {part!r}; delete the line')
            entry[key] = number(part.get(name), where, key)
        checked[layer["name"]] = entry
    return checked
