"""The checkpoints of a run: files by name (step-00000100.safetensors, best-…, averaged-…), which of them are kept, and
the tensors of a model that may be sharded. Each is one file of `mnemos.tree_file`, whose functions this module has too.
"""

import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mnemos import tree_file
from mnemos.lab.errors import TrainingFailed
from mnemos.tree_file import decode as decode
from mnemos.tree_file import digest as digest
from mnemos.tree_file import encode as encode
from mnemos.tree_file import read as read
from mnemos.types import InputError

Kind = Literal["step", "best", "averaged"]


def write(path: Path, value: object) -> None:
    """Write a checkpoint atomically. Raises TrainingFailed if it cannot be written; the old file is then unchanged."""
    try:
        tree_file.write(path, value)
    except InputError as error:
        raise TrainingFailed(f"{error}, then resume the run") from error


def path_of(folder: Path, step: int, kind: Kind = "step") -> Path:
    """The path of the checkpoint after `step` updates."""
    return folder / f"{kind}-{step:08d}.safetensors"


def steps(folder: Path, kind: Kind = "step") -> list[int]:
    """The steps of the checkpoints of a kind in a folder, newest first."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = (re.fullmatch(rf"{kind}-(\d{{8,}})\.safetensors", name) for name in names)
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def scheduled(steps: list[int], every: int) -> list[int]:
    """Those of some steps, newest first, that are multiples of `every`, and the newest of all, also of a stop."""
    return [step for step in steps if step == steps[0] or step % every == 0]


def newest(folder: Path) -> tuple[int, Any, list[str]] | None:
    """Read the newest intact checkpoint: (step, value, a line for each damaged one that was skipped); None without any.

    Raises InputError if there are some and all are damaged.
    """
    problems: list[str] = []
    for step in steps(folder):
        try:
            value = read(path_of(folder, step))
        except InputError as error:
            problems.append(str(error).rpartition("; ")[0])
        else:
            return step, value, [f"{line}; continuing from {path_of(folder, step).name}" for line in problems]
    if problems:
        raise InputError(
            f"{problems[0]}; all {len(problems)} checkpoints are damaged: start a new run in another folder"
        )
    return None


def prune(folder: Path, step: int, keep: int, every: int = 1, constant: int | None = None) -> None:
    """Delete all checkpoints except the `keep` newest up to `step`, whose own must be on disk already.

    every: steps between two of the schedule; the `keep` newest `scheduled` ones are kept too, so that an interruption
    takes none from an average. constant: the newest up to this step is kept too (`ScheduleConfig.last_constant`). Those
    of later steps were damaged, and the run was resumed from an earlier one: they go.
    """
    every_step = steps(folder)
    known = [s for s in every_step if s <= step]
    before_fall = [s for s in known if constant is not None and s <= constant]
    for old in {*every_step} - {*known[:keep], *scheduled(known, every)[:keep], *before_fall[:1]}:
        path_of(folder, old).unlink(missing_ok=True)


def prune_best(folder: Path) -> None:
    """Delete the best weights that neither the run nor a checkpoint of the folder refers to.

    The run refers to the newest; a checkpoint to the newest of an earlier step, as an evaluation follows the checkpoint
    of its step, or at the run's end to those of its own step.
    """
    bests, known = steps(folder, "best"), steps(folder)
    referred = {*bests[:1], *known, *(next((best for best in bests if best < step), 0) for step in known)}
    for old in {*bests} - referred:
        path_of(folder, old, "best").unlink(missing_ok=True)


def full(tensor: Tensor) -> Tensor:
    """The unsharded tensor, detached, on the CPU. Collective if it is sharded: every process must call."""
    whole = getattr(tensor, "full_tensor", None)  # a DTensor; builds of torch without distributed have none
    return (tensor if whole is None else whole()).detach().cpu()


def place(value: Tensor, like: Tensor) -> Tensor:
    """`value` sharded like `like`; a value of another shape, such as a step count, is returned unchanged."""
    if hasattr(like, "full_tensor") and value.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor

        mesh: Any = like.device_mesh  # type: ignore[attr-defined]
        return distribute_tensor(value.to(like.device), mesh, like.placements)  # type: ignore[attr-defined]
    return value


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, unsharded and on the CPU. Collective if parameters are sharded."""
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def load_model_state(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Load what `model_state` returned. Raises InputError with the first tensor that not both have in one shape."""
    own = model.state_dict()
    for name in [*own, *saved]:
        if name not in saved or name not in own:
            where = "have no" if name not in saved else "have a"
            raise InputError(f"expected this model's weights, found some that {where} {name!r}; use the run's recipe")
        if own[name].shape != saved[name].shape:
            shapes = f"{name!r} of shape {tuple(own[name].shape)}, found {tuple(saved[name].shape)}"
            raise InputError(f"expected this model's weights, {shapes}; use the run's recipe")
    with torch.no_grad():
        model.load_state_dict({name: place(value, own[name]) for name, value in saved.items()})
