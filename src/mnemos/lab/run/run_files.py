"""The JSON files of a run folder, read with checks: a damaged or hand-made file is one line of error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mnemos.json_text import parse
from mnemos.types import InputError, JSONObject

Fields = Mapping[str, type | tuple[type, ...]]
WRITTEN: Fields = {"resumed": list, "threads": int, "versions": dict}  # of run.json, what its own run reads
FINISHED: Fields = {"recipe": str}  # of result.json, what resuming a finished run prints beside the scores
# Of result.json, what a comparison reads. Results of before "metrics" are among them.
COMPARED: Fields = {"metric": str, "seconds": (int, float), "peak_bytes": (int, float)}
_COSTS = (
    *("steps", "parameters", "flops", "state_bytes", "seconds", "peak_bytes", "tokens", "epoch_seconds", "best_step"),
    *("majority", "update_flops"),
)
_NUMBER = (int, float, type(None))


def read_about(folder: Path, fields: Fields | None = None) -> JSONObject:
    """The content of a run's run.json. Raises InputError if it is missing, damaged or has not these fields."""
    path = folder / "run.json"
    return checked_about(path, read_object(path, fields))


def checked_about(path: Path, about: JSONObject) -> JSONObject:
    """The content of a run.json. Raises InputError if the parts that are read from every run have other types."""
    resumed = about.get("resumed") or []
    if not isinstance(resumed, list) or not all(isinstance(entry, dict) for entry in resumed):
        raise _damaged(path, f"{resumed!r:.40} as its 'resumed'")
    for part in (about, *resumed):
        for name in ("data", "weights", "versions"):
            if not isinstance(part.get(name) or {}, dict):
                raise _damaged(path, f"{part[name]!r:.40} as its {name!r}")
        data = part.get("data") or {}
        files, count = data.get("files") or [], data.get("count") or 0
        if not (isinstance(files, list) and all(isinstance(one, dict) for one in files) and isinstance(count, int)):
            raise _damaged(path, f"{data!r:.60} as its 'data'")
    return about


def read_result(folder: Path, fields: Fields | None = None) -> JSONObject:
    """The content of a run's result.json. Raises InputError if it is missing, damaged or has not these fields.

    Costs and scores that it has are numbers; a score may be null.
    """
    path = folder / "result.json"
    found = read_object(path, fields)
    split, scores = final_scores(found)
    if not isinstance(scores, dict):
        raise _damaged(path, f"{scores!r:.40} as its {split!r}" if split in found else f"no {split!r} in it")
    if "loss" not in scores:
        raise _damaged(path, f"no 'loss' in its {split!r}")
    controls = found.get("controls") or {}
    if not isinstance(controls, dict):
        raise _damaged(path, f"{controls!r:.40} as its 'controls'")
    costs = {name: found[name] for name in _COSTS if name in found}
    parts = {name: found.get(name) or {} for name in ("valid", "scored_rows", "reference")} | controls
    for part, numbers in {"costs": costs, **parts, split: scores}.items():
        if not isinstance(numbers, dict) or not all(isinstance(value, _NUMBER) for value in numbers.values()):
            raise _damaged(path, f"{numbers!r:.60} as its {part!r}")
    along = found.get("along", {"values": []})
    points = along.get("values") if isinstance(along, dict) else None
    if not isinstance(points, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(value, (int, float)) for value in pair)
        for pair in points
    ):
        raise _damaged(path, f"{along!r:.60} as its 'along'")
    return found


def final_scores(result: JSONObject) -> tuple[str, Any]:
    """The split that a run is judged by, with its scores: "test" or, of data without a test split, "valid"."""
    split = "test" if "test" in result or "valid" not in result else "valid"
    return split, result.get(split)


def read_object(path: Path, fields: Fields | None = None) -> JSONObject:
    """A JSON object with these fields, each of the given type. Raises InputError if the file is missing or another."""
    try:
        found = parse(path.read_text())
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected this file of a run, found none; start a new run in another folder"
        ) from None
    except ValueError as error:
        raise _damaged(path, f"a damaged file ({error})") from None
    if not isinstance(found, dict):
        raise _damaged(path, f"{found!r:.40}")
    for name, kind in (fields or {}).items():
        if not isinstance(found.get(name), kind):
            raise _damaged(path, f"{found[name]!r:.40} as its {name!r}" if name in found else f"no {name!r} in it")
    return found


def _damaged(path: Path, found: str) -> InputError:
    return InputError(f"{path}: expected JSON as a run writes it, found {found}; start a new run in another folder")
