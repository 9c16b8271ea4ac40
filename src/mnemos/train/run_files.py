"""The JSON files of a run folder, read with checks: a damaged or hand-made file is one line of error."""

import json
from collections.abc import Mapping
from pathlib import Path

from mnemos.types import InputError, JSONObject

Fields = Mapping[str, type | tuple[type, ...]]
WRITTEN: Fields = {"resumed": list, "threads": int, "versions": dict}  # of run.json, what its own run reads
# Of result.json, what a comparison reads.
COMPARED: Fields = {"metric": str, "metrics": dict, "seconds": (int, float), "peak_bytes": (int, float)}


def read_about(folder: Path, fields: Fields | None = None) -> JSONObject:
    """The content of a run's run.json. Raises InputError if it is missing, damaged or has not these fields."""
    path = folder / "run.json"
    about = read_object(path, fields)
    resumed = about.get("resumed") or []
    if not isinstance(resumed, list) or not all(isinstance(entry, dict) for entry in resumed):
        raise _damaged(path, f"{resumed!r:.40} as its 'resumed'")
    for part in (about, *resumed):
        for name in ("data", "weights", "versions"):
            if not isinstance(part.get(name) or {}, dict):
                raise _damaged(path, f"{part[name]!r:.40} as its {name!r}")
    return about


def read_result(folder: Path, fields: Fields | None = None) -> JSONObject:
    """The content of a run's result.json. Raises InputError if it is missing, damaged or has not these fields."""
    return read_object(folder / "result.json", {"test": dict, **(fields or {})})


def read_object(path: Path, fields: Fields | None = None) -> JSONObject:
    """A JSON object with these fields, each of the given type. Raises InputError if the file is missing or another."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(
            f"{path}: expected this file of a run, found none; start a new run in another folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"a damaged file ({error})") from None
    if not isinstance(found, dict):
        raise _damaged(path, f"{found!r:.40}")
    for name, kind in (fields or {}).items():
        if not isinstance(found.get(name), kind):
            raise _damaged(path, f"{found[name]!r:.40} as its {name!r}" if name in found else f"no {name!r} in it")
    return found


def _damaged(path: Path, found: str) -> InputError:
    return InputError(f"{path}: expected JSON as a run writes it, found {found}; start a new run in another folder")
