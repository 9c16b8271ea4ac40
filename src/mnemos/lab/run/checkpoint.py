"""The checkpoints of a run: their names in its folder, which is the newest, and which are kept.

Each is one file of `mnemos.tree_file`, whose functions this module has too; `write` fails as a run does.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mnemos import tree_file
from mnemos.lab.errors import TrainingFailed
from mnemos.tree_file import decode as decode
from mnemos.tree_file import digest as digest
from mnemos.tree_file import encode as encode
from mnemos.tree_file import read as read
from mnemos.types import InputError

_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_BEST = re.compile(r"best-(\d{8,})\.safetensors")  # beside them: the weights of the best evaluations
_AVERAGED = re.compile(r"averaged-(\d{8,})\.safetensors")  # and those averaged at the end of the run


def write(path: Path, value: object) -> None:
    """Write a checkpoint atomically. Raises TrainingFailed if it cannot be written; the old file is then unchanged."""
    try:
        tree_file.write(path, value)
    except InputError as error:
        raise TrainingFailed(f"{error}, then resume the run") from error


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint after `step` updates."""
    return folder / f"step-{step:08d}.safetensors"


def best_path(folder: Path, step: int) -> Path:
    """The path of the weights whose evaluation after `step` updates was the best so far."""
    return folder / f"best-{step:08d}.safetensors"


def averaged_path(folder: Path, step: int) -> Path:
    """The path of the averaged weights of a run that ended after `step` updates."""
    return folder / f"averaged-{step:08d}.safetensors"


def averaged_steps(folder: Path) -> list[int]:
    """The ends of the run whose averaged weights are in a folder, newest first."""
    return _numbers(folder, _AVERAGED)


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    return _numbers(folder, _NAME)


def scheduled(folder: Path, every: int) -> list[int]:
    """The steps of the checkpoints of the schedule, newest first: every `every` steps, and the newest of the folder.

    A checkpoint that an interruption saved between them is left out, unless it is the newest.
    """
    return _scheduled(steps(folder), every)


def _scheduled(found: list[int], every: int) -> list[int]:
    return [step for step in found if step == found[0] or step % every == 0]


def best_steps(folder: Path) -> list[int]:
    """The steps of the best evaluations whose weights are in a folder, newest first: each was better than the last."""
    return _numbers(folder, _BEST)


def _numbers(folder: Path, name: re.Pattern[str]) -> list[int]:
    found = (name.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest(folder: Path) -> tuple[int, Any, list[str]] | None:
    """Read the newest intact checkpoint: (step, value, one line per damaged checkpoint that was skipped).

    Returns None if the folder has no checkpoints. Raises InputError if it has some and all are damaged.
    """
    skipped: list[str] = []
    found = steps(folder)
    for step in found:
        try:
            value = read(path_of(folder, step))
        except InputError as error:
            skipped.append(str(error).rpartition("; ")[0])
            continue
        return step, value, [f"{line}; continuing from {path_of(folder, step).name}" for line in skipped]
    if found:
        raise InputError(
            f"{skipped[0]}; all {len(found)} checkpoints of the folder are damaged: start a new run in another folder"
        )
    return None


def prune(folder: Path, step: int, keep: int, every: int = 1) -> None:
    """Delete all checkpoints except the `keep` newest up to `step`. The checkpoint of `step` must be on disk already.

    every: steps between two checkpoints of the schedule. The `keep` newest `scheduled` ones are kept too, so that an
    interruption takes none from an average. Checkpoints of later steps are deleted too: they were damaged, and the run
    was resumed from an earlier one.
    """
    found = steps(folder)
    known = [s for s in found if s <= step]
    for old in set(found) - set(known[:keep]) - set(_scheduled(known, every)[:keep]):
        path_of(folder, old).unlink(missing_ok=True)


def prune_best(folder: Path) -> None:
    """Delete the best weights that neither the run nor a checkpoint of the folder refers to.

    The run refers to the newest. A checkpoint refers to the newest of an earlier step, as an evaluation follows the
    checkpoint of its step, so that a run that is resumed there finds the best weights of that time.
    """
    found = best_steps(folder)
    kept = {found[0], *(next((best for best in found if best < step), 0) for step in steps(folder))} if found else set()
    for old in set(found) - kept:
        best_path(folder, old).unlink(missing_ok=True)


def weights(path: Path, saved: Any) -> dict[str, Tensor]:
    """The weights in a checkpoint, or in a file of best weights. Raises InputError if there are none."""
    found = saved.get("model") if isinstance(saved, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(
            f"{path}: expected a checkpoint that mnemos train wrote, found none with the weights of a model; use an "
            "earlier checkpoint"
        )
    return found


def of_parameters(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a training of some parameters by one optimiser writes of both."""
    return {
        "parameters": {name: value.detach() for name, value in parameters.items()},
        "optimizer": {str(i): dict(one) for i, one in optimizer.state_dict()["state"].items()},
    }


@torch.no_grad()
def into_parameters(
    saved: Mapping[str, Any], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Give parameters and optimiser what `of_parameters` has of them."""
    for name, value in parameters.items():
        value.copy_(saved["parameters"][name])
    own = optimizer.state_dict()
    own["state"] = {int(i): one for i, one in saved["optimizer"].items()}
    optimizer.load_state_dict(own)
