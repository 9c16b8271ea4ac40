"""Open the folder of a run, on the first of its processes: a new one, or one to continue."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mnemos.errors import TrainingFailed, one_line
from mnemos.types import JSON, InputError, JSONObject

from . import checkpoint, devices
from .continuing import extend
from .files import Provenance, Result
from .fingerprint import FIELD, check_data
from .provenance import data_read
from .recipe import Recipe, as_json, as_written
from .run import RunFolder
from .snapshots import check_snapshot

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_SHARED_SECONDS = 10.0  # that a network file system may need


@dataclass(frozen=True)
class Opening:
    """How a run's folder is opened.

    resume: continue its run; otherwise start a new one. longer: the recipe has more steps than the run's. The other:
    continue although the data have changed.
    """

    resume: bool = False
    longer: bool = False
    accept_changed_data: bool = False


def open_run_folder(
    fabric: Fabric, recipe: Recipe, folder: Path, opening: Opening, weights: JSONObject | None
) -> tuple[RunFolder | None, JSONObject | None, Result | None]:
    """Open the run's folder: (run, on the first process only; checkpoint to continue from; result if finished).

    Raises InputError for a folder that does not fit, and TrainingFailed if the system refuses, on every process.
    """
    run, saved, problem, refused, step, result = None, None, None, None, 0, None
    if fabric.is_global_zero:
        try:
            if opening.resume and not opening.accept_changed_data and not _complete(folder, opening):
                # Before anything in the folder changes; the checkpoint's own record is compared later.
                check_data(str(folder), Provenance.read(folder).latest("data"), data_read(recipe.data))
            if opening.longer:
                extend(folder, recipe.train.steps)
            if opening.resume:
                run = RunFolder.resume(folder, recipe)
                result = run.result
                if result is None:
                    step, saved = _prepare(run, recipe, weights, opening.accept_changed_data)
            else:
                run = RunFolder.start(folder, recipe, devices.device_name(fabric.device), weights)
        except InputError as error:
            problem = str(error)
        except (OSError, TrainingFailed) as error:
            refused = one_line(error) or str(error)
        if run is not None and (problem or refused):
            run.close()
    # Every process raises the first one's error; otherwise the others would wait for it without end.
    problem, refused, step, result = fabric.broadcast((problem, refused, step, result))
    if problem is not None:
        raise InputError(problem)
    if refused is not None:
        raise TrainingFailed(refused)
    if recipe.train.num_nodes > 1 and devices.any_of(fabric, not _visible(folder / "recipe.json")):
        if run is not None:
            run.close()
        raise InputError(
            f"{folder}: expected a folder that every machine sees, because each reads the run's checkpoints from it, "
            "found a machine without it; name a folder on a shared disk with --out"
        )
    if step and saved is None:
        saved = checkpoint.read(checkpoint.path_of(folder / "checkpoints", step))
    return run, saved, result


def _complete(folder: Path, opening: Opening) -> bool:
    """Whether there is nothing left to do that reads data, or nothing to resume."""
    if not Provenance.exists(folder):
        return True
    return Result.exists(folder) and not opening.longer and Result.read(folder).assessed


def _visible(path: Path) -> bool:
    """Whether a file exists. A network file system may show it to other machines some seconds after it was written."""
    deadline = time.monotonic() + _SHARED_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _but_steps(recipe: JSON) -> JSON:
    """A recipe's JSON without the number of steps, which may be raised when a run is resumed."""
    train = recipe.get("train") if isinstance(recipe, dict) else None
    if not isinstance(recipe, dict) or not isinstance(train, dict):
        return recipe
    return {**recipe, "train": {name: value for name, value in train.items() if name != "steps"}}


def _prepare(
    run: RunFolder, recipe: Recipe, weights: JSONObject | None, accept_changed_data: bool
) -> tuple[int, JSONObject | None]:
    """Read the checkpoint to continue from and remove later lines of metrics.jsonl: (step, checkpoint)."""
    found = checkpoint.newest(run.checkpoints)
    step, saved, notes = found or (0, None, ["no checkpoint yet: the run starts again from its first update"])
    if saved is not None:
        check_snapshot(checkpoint.path_of(run.checkpoints, step), saved, step)
    if saved is not None and _but_steps(as_written(saved["recipe"])) != _but_steps(as_json(recipe)):
        raise InputError(
            f"{checkpoint.path_of(run.checkpoints, step)}: expected a checkpoint of this run's recipe, found one of "
            "another recipe; remove it"
        )
    if recipe.train.keep_best:
        run.return_to_best(saved.get("best", {}).get("step", 0) if saved else 0)
    notes += run.resumed(step, recipe.data, weights, saved.get(FIELD) if saved else None, accept_changed_data)
    notes += run.trim(step)
    for note in notes:
        print(note, file=sys.stderr)
    return step, saved
