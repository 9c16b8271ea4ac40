"""The work of `mnemos train` and `mnemos eval`: train a recipe, measure the trained model, evaluate a finished run."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mnemos.atomic import write_json
from mnemos.config import ModelConfig, to_dict
from mnemos.lab.evaluate.controls import CONTROLS, control_names, controls, legend
from mnemos.lab.evaluate.explain import explain
from mnemos.lab.evaluate.predict import PREPROCESSING
from mnemos.lab.evaluate.probe import probe
from mnemos.lab.evaluate.scores import evaluate, metrics_text
from mnemos.lab.evaluate.state_controls import control_lines, state_controls
from mnemos.lab.evaluate.write_attention import record_write_attention
from mnemos.lab.measure.flops import task_flops, task_state_bytes
from mnemos.lab.tasks.batch import row_count
from mnemos.lab.tasks.no_learning import no_better
from mnemos.lab.tasks.task import Task
from mnemos.memory.gated_cache import GatedCache, caches, hold_caches
from mnemos.models.store import RUN_MODEL, load, save
from mnemos.types import InputError, JSONObject

from .checks import complete
from .continuing import final_weights
from .files import Result
from .loop import train
from .model_size import on_meta
from .other_data import open_data
from .progress import NoProgress, progress
from .recipe import Recipe
from .recipe_files import is_model, read_recipe, recipe_of_model
from .scored_batches import scored_batches
from .sharding import check_model_state, load_model_state

_CARRIED = {
    "as trained": "memory reset at the beginning of each document",
    "carried": "memory carried from document to document, over the whole split",
}


def run_name(recipe: Recipe, verb: str = "") -> str:
    """The folder name of a new run: [verb-]recipe-date-time."""
    return "-".join(filter(None, (verb, recipe.name, datetime.now().strftime("%Y%m%d-%H%M%S"))))


def run(
    recipe: Recipe | None,
    folder: str | Path,
    resume: bool = False,
    quiet: bool = False,
    steps: int | None = None,
    accept_changed_data: bool = False,
) -> JSONObject:
    """Train a recipe in a folder, measure the trained model (`assess`), and return the result.

    resume: continue the folder's run with its own recipe (`recipe` is ignored); steps: the number of steps up to which
    it is trained (`continuing.extend`), by default its own number; accept_changed_data: see `train`.

    To the result of `train`, with "update_flops", this adds "flops" (of a training forward of one sample of the
    greatest length), "state_bytes" (of the state of one stream after that sample), "controls" (for models with gated
    caches) and the entries of `Task.artifacts`. The model is saved in folder/model, for `mnemos.load`, and the stored
    caches in caches.safetensors. The data are opened once.
    """
    folder = Path(folder)
    if resume:
        recipe = read_recipe(folder)
    assert recipe is not None
    if steps is not None:
        recipe = replace(recipe, train=replace(recipe.train, steps=steps))
    longer = steps is not None
    return train_and_assess(
        recipe, recipe.data.build(), folder, resume, quiet, None, longer, accept_changed_data
    ).to_json()


def train_and_assess(
    recipe: Recipe,
    task: Task,
    folder: Path,
    resume: bool = False,
    quiet: bool = False,
    model: nn.Module | None = None,
    longer: bool = False,
    accept_changed_data: bool = False,
) -> Result:
    """`run` with an open task. model: a model to train instead of building the recipe's. The others: see `train`."""
    recipe = complete(recipe, task)

    @functools.cache
    def first() -> object:
        return next(_batches(recipe, task, "valid", NoProgress()))

    # The probe runs the model on one process; with several processes all would have to run it together.
    alone = recipe.train.processes == 1
    on_evaluation = (lambda model, _: probe(model, first(), task) if caches(model) else None) if alone else None
    finished = resume and not longer and Result.exists(folder)
    # A user's own data are read for updates alone.
    counted = model is None
    result = train(recipe, folder, resume, on_evaluation, quiet, task, model, longer, accept_changed_data, counted)
    if not _leave_process_group():
        return result
    if not result.assessed:
        result = assess(folder, result, recipe, task, model or trained_model(folder, recipe), quiet)
    if not quiet:
        if recipe.train.test_rows and task.has_test:
            rows = f"{result.scored_rows['test']:,} rows"
            print(f"{recipe.name}: {rows} of the test split were scored; mnemos eval scores all")
        if finished:
            steps = recipe.train.steps
            print(f"{recipe.name}: this run had finished its {steps:,} steps; --train.steps N trains it for longer")
        _print_summary(result, task, folder)
    return result


def _leave_process_group() -> bool:
    """Leave the process group, if there is one. Returns whether this is the first process, which does the rest."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    first = torch.distributed.get_rank() == 0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return first


def assess(folder: Path, result: Result, recipe: Recipe, task: Task, model: nn.Module, quiet: bool = True) -> Result:
    """Measure a finished run's model: FLOPs, bytes of its state, controls of its caches, artifacts, explanations.

    Adds them to result.json and returns the complete result; the model is saved in folder/model.
    """
    split: Literal["valid", "test"] = "test" if task.has_test else "valid"
    model.train()
    with hold_caches(model):
        flops = task_flops(model, task, task.example(), recipe.train.rollout.segment_length)
    model.eval()
    state = task_state_bytes(model, task, task.example(), recipe.train.rollout.segment_length)
    names = control_names(model)
    left = iter(names)
    with progress(quiet, recipe.name, 0, 0) as display:

        def batches() -> Iterator[object]:
            name = next(left)
            number = f"control {names.index(name) + 1} of {len(names)}"
            display.message(f"{recipe.name}: {number}: scoring the {split} split with the caches {name}")
            return _batches(recipe, task, split, display)

        found = controls(model, batches, task)
    if found:
        from safetensors.torch import save_file

        modules = [(name, m) for name, m in model.named_modules() if isinstance(m, GatedCache)]
        # A cache per stream is part of the state, and one that is never written holds nothing: neither is stored.
        stored = {name: m.cache.contiguous() for name, m in modules if m.grc.scope == "shared" and m.grc.write}
        if stored:
            save_file(stored, str(folder / "caches.safetensors"))
    if isinstance(getattr(model, "config", None), ModelConfig):
        save(model, folder / RUN_MODEL)
        if (about := task.preprocessing()) is not None:
            write_json(folder / RUN_MODEL / PREPROCESSING, to_dict(about))
    with progress(quiet, recipe.name, 0, 0) as display:
        artifacts = task.scored_artifacts(model, folder, split, scored_batches(task, split, recipe.train, display))
        if names or getattr(model, "state_kind", None):
            display.message(f"{recipe.name}: measuring what the memory holds, for the report")
    result = replace(result, flops=flops, state_bytes=state, controls=found, artifacts=artifacts)
    result.write(folder)
    explain(model, task, folder, recipe.train.rollout.segment_length)
    record_write_attention(model, task, folder)
    return result


def _batches(recipe: Recipe, task: Task, split: Literal["valid", "test"], display: NoProgress) -> Iterator[object]:
    """The batches of a split that the recipe scores, in the segments of its rollout."""
    for batch in scored_batches(task, split, recipe.train, display):
        yield from task.segments(batch, recipe.train.rollout.segment_length)


def open_run(
    folder: Path, fields: Sequence[str] = (), split: Literal["valid", "test"] = "test"
) -> tuple[Recipe, Task, nn.Module]:
    """(recipe, task, model) of a run, or of the folder of its model (`recipe_files.is_model`).

    The model is in eval mode, on the CPU (`trained_model`).

    fields: settings that replace the run's, as on the command line, to score `split` (`open_data`).
    """
    recipe = recipe_of_model(folder)
    if fields:
        recipe, task = open_data(folder, recipe, fields, split)
    else:
        task = recipe.data.build()
    return recipe, task, trained_model(folder, recipe)


def trained_model(folder: Path, recipe: Recipe) -> nn.Module:
    """The model of a run's best checkpoint, if it keeps that, or of its newest intact one; in eval mode, on the CPU.

    folder: the run's, or that of a saved model, which is loaded.
    """
    if is_model(folder):
        saved: nn.Module = load(folder)
        return saved
    weights = final_weights(folder)
    check_model_state(on_meta(recipe.model).state_dict(), weights)  # before memory is used for the model
    model = recipe.model.build()
    load_model_state(model, weights)
    return model.eval()


def evaluate_run(
    folder: str | Path, split: Literal["valid", "test"] = "test", fields: Sequence[str] = (), rows: int = 0
) -> JSONObject:
    """Evaluate a run's model on a split, as trained and with each control of its caches; print and return the scores.

    The controls of its state (`state_controls`) are printed below them.
    rows: the least number of rows that are scored, in whole batches, as `TrainConfig.test_rows` chooses them; 0: all,
    also those that the run left out.

    fields: settings of the data that replace the run's, to score other data: ["--data.path", FOLDER], and settings of
    the model that say how far it reads (`Config.at_evaluation`), such as ["--model.attention.memory", "640"]. Data
    without splits of their own are scored whole. A line says what is scored. Raises InputError for other settings, and
    for data that do not fit the model.

    Returns {"as trained": scores, "carried": scores, "emptied": scores, …} (`evaluate.controls`); "carried" for data
    of several documents and a model with a state, which is then not reset between documents (`Task.carried`). The
    task's own lines (`Task.show`, for example transcriptions) are printed below the scores.
    """
    if rows < 0:
        raise InputError(f"--rows: expected at least 1, or 0 for all, found {rows}; change it")
    recipe, task, model = open_run(Path(folder), fields, split)
    recipe = replace(recipe, train=replace(recipe.train, valid_rows=rows, test_rows=rows))
    metric = task.metrics[0]
    for line in task.about if fields else ():
        print(line)
    with progress(False, recipe.name, 0, 0) as display:
        batches = partial(_batches, recipe, task, split, display)
        score = evaluate(model, batches(), task)
        scores = {"as trained": {k: v for k, v in score.items() if k != "count"}}
        whole = None
        if getattr(model, "state_kind", "none") != "none":
            whole = task.carried(split, recipe.train.batch_size)
        if whole is not None:
            shown = display.evaluation(split, task.size(split), _first(whole, rows), task.count)
            scores["carried"] = {k: v for k, v in evaluate(model, shown, task).items() if k != "count"}
        scores |= controls(model, batches, task)
    what = "all" if task.whole else f"{split} split of"
    part = f"{score['count']:,.0f} targets of " if rows else ""
    print(f"{folder}: {recipe.name}, {part}{what} {task.size(split):,} targets")
    for name, found in scores.items():
        note = CONTROLS.get(name, _CARRIED.get(name, "") if whole is not None else "")
        print(f"  {name:11} loss {found['loss']:.4f}  {metrics_text(task, found)}  {note}".rstrip())
    for line in control_lines(state_controls(model, task, split, recipe.train.rollout.segment_length), task):
        print(line)
    for name, value in task.reference.items() if split == "test" else ():  # it is that of the test split
        print(f"  {name:11} {'':3}{metric.text(value)}")
    if metric.about:
        print(f"  {metric.name}: {metric.about}")
    for line in task.show(model, split):
        print(line)
    return scores


def _first(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """The first batches that together have at least `rows` rows; 0: all."""
    done = 0
    for batch in batches:
        yield batch
        done += row_count(batch)
        if rows and done >= rows:
            return


def _print_summary(result: Result, task: Task, folder: Path) -> None:
    metric = task.metrics[0]
    line = f"{result.split} loss {result.score('loss'):.4f}" + "".join(
        f", {m.text(result.score(m.name))}"
        for m in task.metrics
        if m.form and m.name in result.scores and m.name != "loss"
    )
    line += "".join(f" ({name} {value:.4f})" for name, value in task.reference.items())
    said = []
    if result.before:
        scores = (metric.text(scores[metric.name]) for scores in (result.before, result.valid))
        said.append("on the validation split {} before training, {} after".format(*scores))
    if result.controls:
        line += "; caches " + ", ".join(
            f"{name} {metric.text(score[metric.name])}" for name, score in result.controls.items()
        )
        said.append(f"caches {legend(result.controls)}")
    if result.best_step:
        line += f"; weights of step {result.best_step:,}, the best on the validation split"
    if steps := result.averaged_steps:
        line += f"; weights averaged over the checkpoints of {len(steps)} steps, {steps[-1]:,} to {steps[0]:,}"
    if result.stopped_early:
        line += f"; stopped early after {result.steps:,} steps"
    if result.epoch_seconds:
        line += f"; {result.epoch_seconds:.1f} s per epoch"
    score = result.score(metric.name)
    said += no_better({result.recipe: score}, task.reference, metric.name, metric.higher_is_better)
    print("\n".join([f"{result.recipe}: {line}", *said, str(folder)]))
