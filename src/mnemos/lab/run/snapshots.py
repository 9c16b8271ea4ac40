"""The content of a checkpoint, checked before it is used: a checksum says that bytes are intact, not what they are."""

from pathlib import Path
from typing import Any

from torch import Tensor

from mnemos.types import InputError, JSONObject

from .fingerprint import FIELD

_PARTS = {
    "recipe": dict,
    "counters": dict,
    "tally": dict,
    "plateau": dict,
    "model": dict,
    "optimiser": dict,
    "scaler": dict,
    "states": list,
    "generators": list,
}
_FIELDS = {
    "counters": {"step", "tokens", "seconds", "peak_bytes"},
    "tally": {"updates", "loss", "auxiliary", "auxiliaries", "sums"},
    "plateau": {"factor", "best", "since"},
}
_VALUE = (int, float, list, type(None))
_OPTIONAL = {"best": dict, FIELD: dict}  # checkpoints of earlier versions have none


def check_snapshot(path: Path, saved: Any, step: int) -> None:
    """Raise InputError if a checkpoint is not a `Learner.snapshot` after `step` updates.

    The parts that the model and the optimiser read are checked by `Learner.restore`.
    """
    weights(path, saved)
    for name, kind in (_PARTS | _OPTIONAL).items():
        if not isinstance(saved.get(name, {} if name in _OPTIONAL else None), kind):
            raise _wrong(path, f"{saved[name]!r:.40} as its {name!r}" if name in saved else f"no {name!r} in it")
    for name, names in _FIELDS.items():
        values = saved[name]
        if set(values) != names or not all(isinstance(value, _VALUE) for value in values.values()):
            raise _wrong(path, f"{values!r:.60} as its {name!r}")
    if saved["counters"]["step"] != step:
        raise _wrong(path, f"one of update {saved['counters']['step']!r:.40}")
    if step and not saved["optimiser"]:
        raise _wrong(path, "none with the state of an optimiser")


def weights(path: Path, saved: Any) -> dict[str, Tensor]:
    """The weights in a checkpoint, or in a file of best weights. Raises InputError if there are none."""
    if not isinstance(saved, dict):
        raise _wrong(path, f"a {type(saved).__name__}")
    found: JSONObject = saved.get("model")  # type: ignore[assignment]
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise _wrong(path, "none with the weights of a model")
    return found


def _wrong(path: Path, found: str) -> InputError:
    return InputError(
        f"{path}: expected a checkpoint that mnemos train wrote, found {found}; use an earlier checkpoint"
    )
