"""The weights of a run: those that it ended with, those that another run starts from, and averages of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from mnemos import registry
from mnemos.atomic import check_output_folder, write_json
from mnemos.config import to_dict
from mnemos.lab.evaluate.predict import PREPROCESSING, has_preprocessing, read_preprocessing
from mnemos.lab.hosted.hub import is_source
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.models.store import load, save
from mnemos.types import InputError, JSONObject

from . import checkpoint
from .checkpoint import load_model_state, place
from .recipe import Recipe
from .recipe_files import MODEL_RECIPE, is_model, read_recipe

_INNER = "inner"
_LEAST = 0.5  # share of the parameters that a run must give to another model


def final_weights(folder: Path) -> dict[str, Tensor]:
    """A run's weights and buffers on the CPU: averaged or best ones if it keeps these, else the newest."""
    return final_checkpoint(folder)[1]


def final_checkpoint(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Which checkpoint of a run has its `final_weights`, such as "the checkpoint of update 40", and these weights."""
    folder = folder / "checkpoints"
    last = next(iter(checkpoint.steps(folder)), 0)
    if last in checkpoint.steps(folder, "averaged"):
        path, about = checkpoint.path_of(folder, last, "averaged"), f"the averaged weights of update {last:,}"
    elif best := next(iter(checkpoint.steps(folder, "best")), 0):
        path, about = checkpoint.path_of(folder, best, "best"), f"the best checkpoint, of update {best:,}"
    elif (newest := checkpoint.newest(folder)) is not None:
        step, value, _ = newest
        return f"the checkpoint of update {step:,}", value["model"]
    else:
        raise InputError(f"{folder.parent}: expected a checkpoint, found none; train the run first")
    return about, checkpoint.read(path)["model"]


def trained_model(folder: Path, recipe: Recipe) -> nn.Module:
    """The model with a run's `final_weights`, or that of a saved model's folder; in eval mode, on the CPU."""
    if is_model(folder):
        saved: nn.Module = load(folder)
        return saved
    model = recipe.model.build()
    load_model_state(model, final_weights(folder))
    return model.eval()


@dataclass(frozen=True)
class Start:
    """The weights of a run that fit another model, by name. about: one line on what fits and what does not.

    source: what run.json records, {"run": the folder, "sha256": of all tensors of the run's model, "tensors": how many
    fit}.
    """

    weights: dict[str, Tensor]
    about: str
    source: JSONObject

    @classmethod
    def of(cls, source: str, model: nn.Module, about: Preprocessing | None = None) -> "Start":
        """The tensors of a run, or of a host model (`hub.is_source`), with name and shape of one of the model's.

        The attention inside a cache gets the weights of the run's attention, and the reverse. model: may be on the meta
        device; `weights_from` lets it start in part from another kind of model: the run's weights by its own names, and
        the name of that part ("": all). about: the preprocessing of the data of the model that starts. Raises
        InputError without a checkpoint, if less than half of the parameters would be loaded, and if a run read its data
        as other tokens.
        """
        folder = Path(source)
        if is_source(source):
            if (pretrained := getattr(model, "pretrained", None)) is None:
                raise InputError(
                    f"train.init_from: expected the folder of a run, found {source!r}, which is another kind of model; "
                    f"use --model {source}"
                )
            saved = pretrained(source)
        elif folder.is_dir():
            saved = final_weights(folder)
            problem = None
            if about is not None and has_preprocessing(folder):
                problem = read_preprocessing(folder).start_problem(about)
            if problem is not None:
                raise InputError(f"train.init_from: {problem}")
        else:
            found = registry.missing_folder(folder)
            raise InputError(f"train.init_from: {folder}: expected the folder of a run, found {found}")

        # --- by name and shape ---
        sha256, part, own = checkpoint.digest(saved, ""), "", model.state_dict()
        if (renames := getattr(model, "weights_from", None)) is not None:  # a model around another kind of model
            saved, part = renames(saved)
        fitting = {
            name: saved[other]
            for name, other in _sources(list(own), list(saved)).items()
            if other in saved and saved[other].shape == own[name].shape
        }
        below = f"{part}." if part else ""
        wanted = [name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(below)]
        loaded = [name for name in wanted if name in fitting]
        if not fitting or sum(own[n].numel() for n in loaded) < _LEAST * sum(own[n].numel() for n in wanted):
            raise InputError(
                f"train.init_from: expected a run of a similar model, found that {source} has {len(loaded)} of the "
                f"{len(wanted)} parameters{f' of {part}' if part else ''} with their names and shapes; use the run's "
                "recipe, with other data or training"
            )
        new = [name for name in own if name not in fitting]
        names = ", ".join(new[:2]) + (f" and {len(new) - 2} more" if len(new) > 2 else "")
        lacks = f"; {len(new)} of the {len(own)} tensors, which it does not have, are new: {names}" if new else ""
        return cls(
            fitting,
            f"starts with the weights of {source}{lacks}",
            {"run": source, "sha256": sha256, "tensors": len(fitting)},
        )

    def load(self, model: nn.Module) -> None:
        own = model.state_dict()
        with torch.no_grad():
            model.load_state_dict({name: place(value, own[name]) for name, value in self.weights.items()}, strict=False)


def _sources(own: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """For each name of a model, the name of a saved tensor with the same role; "" if there is none."""
    cached, was_cached = (
        {name.split(f".{_INNER}.")[0] for name in names if f".{_INNER}." in name} for names in (own, saved)
    )
    sources = {}
    for name in own:
        layer = next((layer for layer in cached ^ was_cached if name.startswith(f"{layer}.")), None)
        part = name.removeprefix(f"{layer}.")
        if layer is None:
            sources[name] = name
        elif layer in was_cached:
            sources[name] = f"{layer}.{_INNER}.{part}"
        else:
            attention, _, rest = part.partition(".")
            sources[name] = f"{layer}.{rest}" if attention == _INNER else ""
    return sources


def average(folder: Path, count: int, model: nn.Module, every: int) -> tuple[dict[str, Tensor], list[int]]:
    """The mean of the weights in a model's `count` newest checkpoints (in all, if there are fewer), and their steps.

    every: steps between two of the schedule (`checkpoint.scheduled`). Added up in float64 from the oldest to the
    newest, then rounded to the weights' type. What is no parameter (running statistics, caches) is that of the newest.
    Memory: the weights in float64, and one checkpoint. Raises InputError if one is damaged.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # each name of a shared one
    steps = checkpoint.scheduled(checkpoint.steps(folder), every)[:count]
    sums: dict[str, Tensor] = {}
    newest: dict[str, Tensor] = {}
    for step in reversed(steps):
        newest = checkpoint.read(checkpoint.path_of(folder, step))["model"]
        for name, value in newest.items():
            if name in parameters and value.is_floating_point():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
    return newest | {name: (value / len(steps)).to(newest[name].dtype) for name, value in sums.items()}, steps


def average_run(folder: Path, last: int, out: Path | None = None) -> Path:
    """Write a model with the `average` of a run's `last` checkpoints to a new folder, by default RUN/averaged-LAST.

    The folder has the run's recipe and preprocessing, for `mnemos eval`, `predict` and `translate`; the run itself is
    unchanged. Raises InputError if the run has fewer checkpoints (`TrainConfig.keep`), and for a folder that is there.
    """
    recipe, target = read_recipe(folder), out or folder / f"averaged-{last}"
    if last < 1:
        raise InputError(f"--last: expected at least 1 checkpoint, found {last}; raise it")
    check_output_folder(target)
    if target.exists():
        raise InputError(f"{target}: expected a new folder for the averaged model, found one; name another with --out")
    every = recipe.train.checkpoint_every
    count = len(checkpoint.scheduled(checkpoint.steps(folder / "checkpoints"), every))
    if count < last:
        raise InputError(
            f"{folder}: expected {last} checkpoints, found {count}; train with --train.keep {last}, or lower --last"
        )
    model = recipe.model.build()
    load_model_state(model, average(folder / "checkpoints", last, model, every)[0])
    save(model.eval(), target)
    write_json(target / MODEL_RECIPE, to_dict(recipe))
    about = read_preprocessing(folder) if has_preprocessing(folder) else recipe.data.build().preprocessing()
    if about is not None:
        write_json(target / PREPROCESSING, to_dict(about))
    return target
