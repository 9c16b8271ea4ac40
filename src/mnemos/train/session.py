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
from mnemos.data.batch import Batch, Task, pieces
from mnemos.data.pixels import PixelTask
from mnemos.evaluate.controls import CONTROLS, controls
from mnemos.evaluate.explain import explain
from mnemos.evaluate.generated_images import write_pictures
from mnemos.evaluate.metrics import bits, evaluate, perplexity, quality
from mnemos.evaluate.probe import probe
from mnemos.evaluate.transcriptions import transcriptions
from mnemos.evaluate.write_attention import record_write_attention
from mnemos.measure.flops import forward_flops
from mnemos.memory.gated_cache import GatedCache, caches, hold_caches
from mnemos.models.store import save
from mnemos.types import InputError

from . import checkpoint
from .checks import complete
from .loop import train
from .progress import Silent, progress
from .recipe import Recipe
from .sharding import load_model_state


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
        return from_dict(Recipe, json.loads(path.read_text()))
    except FileNotFoundError:
        raise InputError(f"{folder}: expected a run, found no recipe.json in it; mnemos train makes one") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: line {error.lineno}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{folder}: expected a run's folder, cannot read recipe.json in it ({error})") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def run(recipe: Recipe | None, folder: str | Path, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train a recipe in a folder (`resume`: go on there with the recipe it has), assess it, and return the result.

    To what `train` writes in result.json it adds "flops" (a training forward of one sample of the longest length)
    and, for a model with gated caches, "controls", for one that writes down speech, "transcriptions"; the stored caches
    go to caches.safetensors, and the model to folder/model, where `mnemos.load` finds it.
    """
    folder = Path(folder)
    if resume:
        recipe = read_recipe(folder)
    assert recipe is not None
    recipe = complete(recipe)

    @functools.cache
    def first() -> Batch:
        batches = recipe.data.build().batches("valid", recipe.train.batch_size)
        return next(pieces(batches, recipe.train.rollout.segment_length))

    # The probe runs the model, which several processes would have to do together.
    watch = (lambda model, _: probe(model, first()) if caches(model) else None) if recipe.train.devices == 1 else None
    result = train(recipe, folder, resume=resume, watch=watch, quiet=quiet)
    if not _alone():
        return result
    if "flops" not in result:
        result = assess(folder, result, quiet)
    if not quiet:
        _say(result, folder)
    return result


def _alone() -> bool:
    """Part from the other processes, if there are any; whether this is the one that goes on."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    first = torch.distributed.get_rank() == 0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return first


def assess(folder: Path, result: dict[str, Any], quiet: bool = True) -> dict[str, Any]:
    """Count the finished run's model and score it without its memory; writes and returns the fuller result."""
    recipe, task, model = open_run(folder)
    sample = task.sample()
    model.train()
    with hold_caches(model):
        result = {**result, "flops": forward_flops(model, sample, segment=recipe.train.rollout.segment_length)}
    with progress(quiet, recipe.name, 0, 0) as voice:
        found = controls(model, partial(_batches, recipe, task, "test", voice))
    if found:
        from safetensors.torch import save_file

        stored = {name: m.cache.contiguous() for name, m in model.named_modules() if isinstance(m, GatedCache)}
        save_file(stored, str(folder / "caches.safetensors"))
        result["controls"] = found
    if heard := _transcriptions(model, task, recipe, "test"):
        result["transcriptions"] = heard
    if isinstance(getattr(model, "config", None), ModelConfig):
        save(model.eval(), folder / "model")
    write_json(folder / "result.json", result)
    explain(model, task, folder)
    record_write_attention(model, task, folder)
    if isinstance(task, PixelTask):
        write_pictures(model, task, folder)
    return result


def _batches(recipe: Recipe, task: Task, split: Literal["valid", "test"], voice: Silent) -> Iterator[Batch]:
    """A split as the recipe's model reads it: whole batches, or rows in the pieces of its rollouts."""
    batches = voice.scoring(split, task.size(split), task.batches(split, recipe.train.batch_size))
    return pieces(batches, recipe.train.rollout.segment_length)


def _transcriptions(model: nn.Module, task: Task, recipe: Recipe, split: Literal["valid", "test"]) -> list[Any]:
    names = getattr(task, "names", [])
    return transcriptions(model, task.batches(split, recipe.train.batch_size), names)


def open_run(folder: Path) -> tuple[Recipe, Task, nn.Module]:
    """The recipe, the task and the trained model (in eval mode, on the CPU) of a run's newest good checkpoint."""
    recipe = read_recipe(folder)
    found = checkpoint.newest(folder / "checkpoints")
    if found is None:
        raise InputError(f"{folder}: expected a checkpoint, found none; train it first")
    model = recipe.model.build()
    load_model_state(model, found[1]["model"])
    return recipe, recipe.data.build(), model.eval()


def evaluate_run(folder: str | Path, split: Literal["valid", "test"] = "test") -> dict[str, Any]:
    """Score a run's model on a split, and again with its memory emptied, exchanged and shut off; prints it.

    Of speech: the token error rate, which is 1 − accuracy, and some of what was heard beside what was said.
    """
    recipe, task, model = open_run(Path(folder))
    with progress(False, recipe.name, 0, 0) as voice:
        batches = partial(_batches, recipe, task, split, voice)
        score = evaluate(model, batches())
        scores = {"as trained": {k: v for k, v in score.items() if k != "count"}, **controls(model, batches)}
    print(f"{folder}: {recipe.name}, {split} split of {task.size(split)}")
    for name, found in scores.items():
        note = CONTROLS.get(name, "")
        unit = (
            f"  {bits(found['loss']):.4f} bits, perplexity {perplexity(found['loss']):.3f}"
            if task.kind == "language"
            else ""
        )
        top5 = f"  top-5 {found['top5']:.4f}" if "top5" in found else ""
        print(f"  {name:11} loss {found['loss']:.4f}{unit}  {quality(found)}{top5}  {note}".rstrip())
    if task.majority is not None:
        print(f"  {'majority':11} {'':11}  accuracy {task.majority:.4f}  always the commonest class")
    if task.kind == "transcription":
        print("  (insertions, deletions and substitutions a token that was said: 1 − accuracy; it may be above 1)")
    for one in _transcriptions(model, task, recipe, split):
        print(f"  said   {one['said']}\n  heard  {one['heard'] or '(nothing)'}")
    return scores


def _say(result: dict[str, Any], folder: Path) -> None:
    test = result["test"]
    line = f"test loss {test['loss']:.4f}, {quality(test)}"
    if "top5" in test:
        line += f", top-5 {test['top5']:.4f}"
    if result.get("majority") is not None:
        line += f" (majority class {result['majority']:.4f})"
    if "controls" in result:
        line += "; " + ", ".join(f"{name} {score['accuracy']:.4f}" for name, score in result["controls"].items())
    if result.get("epoch_seconds"):
        line += f"; {result['epoch_seconds']:.1f} s an epoch"
    print(f"{result['recipe']}: {line}\n{folder}")
