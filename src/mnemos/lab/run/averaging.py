"""Averages of a run's last checkpoints: of their weights, exact and the same for any interruption."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mnemos.atomic import write_json
from mnemos.config import to_dict
from mnemos.lab.evaluate.predict import PREPROCESSING
from mnemos.models.store import RUN_MODEL, save
from mnemos.types import InputError

from . import checkpoint
from .model_size import on_meta
from .recipe_files import MODEL_RECIPE, read_recipe
from .sharding import check_model_state, load_model_state
from .snapshots import weights


class Average(NamedTuple):
    """Weights and buffers by name, and the steps of the checkpoints that they are the mean of, newest first."""

    weights: dict[str, Tensor]
    steps: list[int]


def average(folder: Path, count: int, parameters: Collection[str], every: int = 1) -> Average:
    """The mean of the weights in the `count` newest checkpoints of a folder's schedule; of all, if there are fewer.

    every: steps between two checkpoints of the schedule (`checkpoint.scheduled`), so that an interrupted run has the
    average of an uninterrupted one.
    w = (w₁ + … + wₙ)/n, added up in float64 from the oldest to the newest, then rounded to the weights' type. Tensors
    that are not among `parameters` (running statistics, caches) are those of the newest checkpoint. Memory: the weights
    in float64, and one checkpoint. Raises InputError if there is none, if one is damaged, or if their weights differ.
    """
    steps = checkpoint.scheduled(folder, every)[:count]
    if not steps:
        raise InputError(f"{folder}: expected checkpoints to average, found none; train the run first")
    sums: dict[str, Tensor] = {}
    newest: dict[str, Tensor] = {}
    for step in reversed(steps):
        path = checkpoint.path_of(folder, step)
        newest = weights(path, checkpoint.read(path))
        for name, value in newest.items():
            if name not in parameters or not value.is_floating_point():
                continue
            before = sums.get(name)
            if before is not None and before.shape != value.shape:
                raise InputError(
                    f"{path}: expected {name} of shape {tuple(before.shape)}, as in earlier checkpoints, found "
                    f"{tuple(value.shape)}; average checkpoints of one run"
                )
            sums[name] = value.double() if before is None else before + value.double()
    mean = {name: (value / len(steps)).to(newest[name].dtype) for name, value in sums.items()}
    return Average({**newest, **mean}, steps)


def parameter_names(model: torch.nn.Module) -> set[str]:
    """The names of a model's parameters in its state, each name of a shared one."""
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def average_run(folder: str | Path, last: int, out: str | Path | None = None) -> Path:
    """Write the model with the averaged weights of a run's `last` checkpoints, for `mnemos.load`; returns its folder.

    out: by default RUN/averaged-LAST. The folder has the run's recipe, so `mnemos eval` and `mnemos score` take it. A
    model that reads files (`mnemos predict`, `mnemos translate`) still does. The run itself is unchanged. Raises
    InputError if the run has fewer checkpoints (`TrainConfig.keep`), and for a folder that is there already.
    """
    folder = Path(folder)
    recipe = read_recipe(folder)
    target = Path(out) if out is not None else folder / f"averaged-{last}"
    if last < 1:
        raise InputError(f"--last: expected at least 1 checkpoint, found {last}; raise it")
    if target.exists():
        raise InputError(f"{target}: expected a new folder for the averaged model, found one; name another with --out")
    every = recipe.train.checkpoint_every
    kept = len(checkpoint.scheduled(folder / "checkpoints", every))
    if kept < last:
        raise InputError(
            f"{folder}: expected {last} checkpoints, found {kept}; train with --train.keep {last}, or lower --last"
        )
    found = average(folder / "checkpoints", last, parameter_names(on_meta(recipe.model)), every)
    check_model_state(on_meta(recipe.model).state_dict(), found.weights)
    model = recipe.model.build()
    load_model_state(model, found.weights)
    known = folder / RUN_MODEL / PREPROCESSING
    about = known.read_bytes() if known.is_file() else None
    made = None if about is not None else recipe.data.build().preprocessing()
    save(model.eval(), target)
    write_json(target / MODEL_RECIPE, to_dict(recipe))
    if about is not None:
        (target / PREPROCESSING).write_bytes(about)
    elif made is not None:
        write_json(target / PREPROCESSING, to_dict(made))
    return target
