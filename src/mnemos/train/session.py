"""From a recipe's name to a finished, assessed run: what `mnemos train` and `mnemos eval` do."""

import functools
import json
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mnemos.atomic import write_json
from mnemos.config import ModelConfig, from_dict
from mnemos.data.task import Task
from mnemos.evaluate.controls import CONTROLS, controls
from mnemos.evaluate.explain import explain
from mnemos.evaluate.metrics import evaluate, told
from mnemos.evaluate.probe import probe
from mnemos.evaluate.write_attention import record_write_attention
from mnemos.measure.flops import task_flops
from mnemos.memory.gated_cache import GatedCache, caches, hold_caches
from mnemos.models.store import save
from mnemos.types import InputError, JSONObject

from . import checkpoint
from .checks import complete
from .loop import train
from .progress import Silent, progress
from .recipe import Recipe
from .sharding import load_model_state

OWN = "own"  # what a recipe calls a model and data that were given to mnemos.fit


def run_name(recipe: Recipe, verb: str = "") -> str:
    """A folder's name for a new run: what and when."""
    return "-".join(filter(None, (verb, recipe.name, datetime.now().strftime("%Y%m%d-%H%M%S"))))


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run folder. Raises InputError where there is none, or it does not fit this version."""
    path = folder / "recipe.json"
    if (folder / "comparison.json").is_file():
        runs = sorted(str(p.parent) for p in folder.glob("*/*/recipe.json"))
        raise InputError(f"{folder}: expected a run, found a comparison; name one of its runs, as {''.join(runs[:1])}")
    try:
        saved = json.loads(path.read_text())
        if isinstance(saved, dict) and (saved.get("model") or {}).get("is") == OWN:
            raise InputError("the model and the data were given to mnemos.fit; go on with fit(..., resume=True)")
        return from_dict(Recipe, saved)
    except FileNotFoundError:
        raise InputError(f"{folder}: expected a run, found no recipe.json in it; mnemos train makes one") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder}: expected a run's folder, cannot read recipe.json in it ({error})") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def run(recipe: Recipe | None, folder: str | Path, resume: bool = False, quiet: bool = False) -> JSONObject:
    """Train a recipe in a folder (`resume`: go on there with the recipe it has), assess it, and return the result.

    To what `train` writes in result.json it adds "flops" (a training forward of one sample of the longest length), for
    a model with gated caches "controls", and what the task says of its artifacts; the stored caches go to
    caches.safetensors, and the model to folder/model, where `mnemos.load` finds it. The data are opened once.
    """
    folder = Path(folder)
    if resume:
        recipe = read_recipe(folder)
    assert recipe is not None
    return train_and_assess(recipe, recipe.data.build(), folder, resume, quiet)


def train_and_assess(
    recipe: Recipe,
    task: Task,
    folder: Path,
    resume: bool = False,
    quiet: bool = False,
    model: nn.Module | None = None,
) -> JSONObject:
    """What `run` does, with data that are open; `model`: one that is there already, and is trained in place."""
    recipe = complete(recipe, task)

    @functools.cache
    def first() -> Any:
        return next(_batches(recipe, task, "valid", Silent()))

    # The probe runs the model, which several processes would have to do together.
    watch = (
        (lambda model, _: probe(model, first(), task) if caches(model) else None) if recipe.train.devices == 1 else None
    )
    result = train(recipe, folder, resume=resume, watch=watch, quiet=quiet, task=task, model=model)
    if not _alone():
        return result
    if "flops" not in result:
        result = assess(folder, result, recipe, task, model or trained_model(folder, recipe), quiet)
    if not quiet:
        _say(result, task, folder)
    return result


def _alone() -> bool:
    """Part from the other processes, if there are any; whether this is the one that goes on."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    first = torch.distributed.get_rank() == 0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return first


def assess(
    folder: Path, result: JSONObject, recipe: Recipe, task: Task, model: nn.Module, quiet: bool = True
) -> JSONObject:
    """Count the finished run's model and score it without its memory; writes and returns the fuller result."""
    model.train()
    with hold_caches(model):
        flops = task_flops(model, task, task.example(), recipe.train.rollout.segment_length)
    result = {**result, "flops": flops}
    model.eval()
    with progress(quiet, recipe.name, 0, 0) as voice:
        found = controls(model, partial(_batches, recipe, task, "test", voice), task)
    if found:
        from safetensors.torch import save_file

        stored = {name: m.cache.contiguous() for name, m in model.named_modules() if isinstance(m, GatedCache)}
        save_file(stored, str(folder / "caches.safetensors"))
        result["controls"] = found
    if isinstance(getattr(model, "config", None), ModelConfig):
        save(model, folder / "model")
    result |= task.artifacts(model, folder, "test")
    write_json(folder / "result.json", result)
    explain(model, task, folder)
    record_write_attention(model, task, folder)
    return result


def _batches(recipe: Recipe, task: Task, split: Literal["valid", "test"], voice: Silent) -> Iterator[Any]:
    """A split as the recipe's model reads it: whole batches, or rows in the segments of its rollouts."""
    batches = task.batches(split, recipe.train.batch_size)
    for batch in voice.scoring(split, task.size(split), batches, task.count):
        yield from task.segments(batch, recipe.train.rollout.segment_length)


def open_run(folder: Path) -> tuple[Recipe, Task, nn.Module]:
    """The recipe, the task and the trained model (in eval mode, on the CPU) of a run's newest good checkpoint."""
    recipe = read_recipe(folder)
    model = trained_model(folder, recipe)
    return recipe, recipe.data.build(), model


def trained_model(folder: Path, recipe: Recipe) -> nn.Module:
    """The model of a run's newest good checkpoint, in eval mode, on the CPU."""
    found = checkpoint.newest(folder / "checkpoints")
    if found is None:
        raise InputError(f"{folder}: expected a checkpoint, found none; train it first")
    model = recipe.model.build()
    load_model_state(model, found[1]["model"])
    return model.eval()


def evaluate_run(folder: str | Path, split: Literal["valid", "test"] = "test") -> JSONObject:
    """Score a run's model on a split, and again with its memory emptied, exchanged and shut off; prints it.

    Below the numbers stands what the task has to show, as some of what was heard beside what was said.
    """
    recipe, task, model = open_run(Path(folder))
    judge = task.metrics[0]
    with progress(False, recipe.name, 0, 0) as voice:
        batches = partial(_batches, recipe, task, split, voice)
        score = evaluate(model, batches(), task)
        scores = {"as trained": {k: v for k, v in score.items() if k != "count"}, **controls(model, batches, task)}
    print(f"{folder}: {recipe.name}, {split} split of {task.size(split)}")
    for name, found in scores.items():
        note = CONTROLS.get(name, "")
        print(f"  {name:11} loss {found['loss']:.4f}  {told(task, found)}  {note}".rstrip())
    for name, value in task.reference.items():
        print(f"  {name:11} {'':3}{judge.text(value)}")
    if judge.about:
        print(f"  {judge.name}: {judge.about}")
    for line in task.show(model, split):
        print(line)
    return scores


def _say(result: JSONObject, task: Task, folder: Path) -> None:
    test, judge = result["test"], task.metrics[0]
    line = f"test loss {test['loss']:.4f}" + "".join(
        f", {m.text(test[m.name])}" for m in task.metrics if m.name in test and m.name != "loss"
    )
    line += "".join(f" ({name} {value:.4f})" for name, value in task.reference.items())
    if "controls" in result:
        line += "; " + ", ".join(
            f"{name} {judge.text(score[judge.name])}" for name, score in result["controls"].items()
        )
    if result.get("epoch_seconds"):
        line += f"; {result['epoch_seconds']:.1f} s an epoch"
    print(f"{result['recipe']}: {line}\n{folder}")
