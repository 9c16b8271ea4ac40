"""What one does with a trained model: open it, score it on its data or on others, and let it write."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from mnemos.config import to_dict
from mnemos.errors import say
from mnemos.generate.sampling import checked_settings
from mnemos.lab.evaluate.controls import CONTROLS, control_lines, controls, state_controls
from mnemos.lab.evaluate.predict import has_preprocessing, read_preprocessing
from mnemos.lab.evaluate.scores import evaluate, metrics_text
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.task import HeldOut, Sampling, Task
from mnemos.ops import dense_layer
from mnemos.types import JSON, InputError, JSONObject

from .checks import check_task
from .files import PLACES, Provenance, Result
from .progress import progress
from .provenance import data_read
from .recipe import Recipe
from .recipe_fields import with_fields
from .recipe_files import recipe_of_model
from .scored_batches import control_segments, scored_segments
from .weights import trained_model


def open_run(folder: Path, fields: Sequence[str] = (), split: HeldOut = "test") -> tuple[Recipe, Task, nn.Module]:
    """(recipe, task, model) of a run, or of the folder of its model; the model is in eval mode, on the CPU.

    fields: settings that replace the run's, as on the command line, to score `split` (`open_data`).
    """
    recipe = recipe_of_model(folder)
    recipe, task = open_data(folder, recipe, fields, split) if fields else (recipe, recipe.data.build())
    return recipe, task, trained_model(folder, recipe)


def evaluate_run(
    folder: str | Path, split: HeldOut = "test", fields: Sequence[str] = (), rows: int | None = None
) -> JSONObject:
    """Evaluate a run's model on a split, as trained and with each control of its memory; print and return the scores.

    rows: the least number of rows that are scored, in whole batches; 0: all; None: as many as the run scored, or all of
    other data. fields: settings of the data that replace the run's, ["--data.path", FOLDER], and settings of the model
    that say how far it reads (`Config.at_evaluation`). Raises InputError for other settings, and for data that do not
    fit.

    Returns {"as trained": scores, "emptied": scores, …} (`evaluate.controls`).
    """
    if rows is not None and rows < 0:
        raise InputError(f"--rows: expected at least 1, or 0 for all, found {rows}; change it")
    recipe, task, model = open_run(Path(folder), fields, split)
    hint = ""
    if rows is None:
        other = any(word.startswith("--data.") for word in fields)
        rows = 0 if other else max(0, recipe.train.valid_rows if split == "valid" else recipe.train.test_rows)
        hint = "; --rows 0 scores all" if rows else ""
    recipe = replace(recipe, train=replace(recipe.train, valid_rows=rows, test_rows=rows))
    metric = task.metrics[0]
    for line in task.about if fields else ():
        say(line)
    recorded = Provenance.exists(Path(folder))  # not in the folder of a model alone
    chosen = dense_layer.Choice.from_json(Provenance.read(Path(folder)).dense) if recorded else dense_layer.choice()
    dense = dense_layer.using(chosen)  # the sums are those of the run, bit for bit
    with dense, progress(False, recipe.name, 0, 0) as display:
        batches = partial(scored_segments, task, split, recipe.train, display)
        score = evaluate(model, batches(), task)
        scores = {"as trained": {k: v for k, v in score.items() if k != "count"}}
        scores |= controls(model, batches, task)
    what = "all" if task.whole else f"{split} split of"
    part = f"{score['count']:,.0f} targets of " if rows else ""
    say(f"{folder}: {recipe.name}, {part}{what} {task.size(split):,} targets{hint}")
    for name, found in scores.items():
        say(f"  {name:11} loss {found['loss']:.4f}  {metrics_text(task, found)}  {CONTROLS.get(name, '')}".rstrip())
    length, segments = recipe.train.rollout.segment_length, control_segments(recipe.train)
    for line in control_lines(state_controls(model, task, split, length, segments), task):
        say(line)
    for name, value in task.reference.items() if split == "test" else ():  # it is that of the test split
        say(f"  {name:11} {'':3}{metric.text(value)}")
    if metric.about:
        say(f"  {metric.name}: {metric.about}")
    for line in task.show(model, split):
        say(line)
    return scores


def open_data(folder: Path, recipe: Recipe, fields: Sequence[str], split: HeldOut) -> tuple[Recipe, Task]:
    """(recipe, task) of a run with other settings of its data and model: `fields` as on the command line.

    The run's own data, here or elsewhere, keep its splits, because its model was trained on the rest; others are opened
    to score `split` (`DataConfig.build_to_score`). `Task.about` names files that the run has read too, and what of the
    model was changed. Raises InputError for other settings than `Config.at_evaluation`, and for data that do not fit.
    """
    # --- settings: of the data, and those of the model that change no weight ---
    allowed = ("--data.", "--model.")
    if wrong := next((word for word in fields if word.startswith("--") and not word.startswith(allowed)), None):
        raise InputError(
            f"{folder}: expected settings of the data or the model, --data.FIELD value or --model.FIELD value, found "
            f"{wrong}; leave it out"
        )
    other = with_fields(recipe, fields, f"mnemos eval {folder}")
    before, after = dict(_settings("model", recipe.model)), dict(_settings("model", other.model))
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    may = [name for name, (_, at_evaluation) in before.items() if at_evaluation]
    if wrong := next((name for name in changed if name not in may), None):
        raise InputError(
            f"{folder}: expected settings of the model that an evaluation may change "
            f"({', '.join(f'--{name}' for name in may) or 'none'}), found --{wrong.removesuffix('.is')}; train a run "
            "with it"
        )

    # --- the data: the run's own, or others ---
    known = Provenance.read(folder).latest("data") or {} if Provenance.exists(folder) else {}
    own_places = _places(to_dict(other.data)) == _places(to_dict(recipe.data))
    files: JSONObject = {}
    with contextlib.suppress(InputError):  # without a training split, which only `build_to_score` does not need
        files = {} if own_places else data_read(other.data)
    if own_places or (known.get("sha256") and known["sha256"] == files.get("sha256")):
        task = other.data.build()
    else:
        trained_with: Preprocessing | None = None
        if has_preprocessing(folder):
            trained_with = read_preprocessing(folder)
        elif not Result.exists(folder):  # a run that is not finished
            trained_with = recipe.data.build().preprocessing()
        task = other.data.build_to_score(split, trained_with)
        read = {one["sha256"] for one in known.get("files") or ()}
        if shared := [one["name"] for one in files.get("files") or () if one["sha256"] in read]:
            more = f" and {len(shared) - 1} more are" if shared[1:] else " is"
            line = f"warning: {shared[0]}{more} among the files that the run has read, so its model may have been "
            task.about = (*task.about, f"{line}trained on them")
    about = task.preprocessing()
    difference = read_preprocessing(folder).difference(about) if about is not None and has_preprocessing(folder) else ""
    if difference:  # such as classes of other names
        raise InputError(f"{folder}: {difference}")
    try:
        check_task(other, task)
    except InputError as error:
        problem = str(error).rpartition("; ")[0]
        raise InputError(f"{folder}: expected data that fit the run's model: {problem}; choose other data") from None
    lines = (f"changed: {name} {after[name][0]} instead of {before[name][0]}" for name in changed)
    task.about = (*task.about, *lines)
    return other, task


def _settings(name: str, config: Any, may_change: bool = False) -> Iterator[tuple[str, tuple[object, bool]]]:
    """(path, (value, whether an evaluation may change it)) of every setting of a configuration."""
    if not dataclasses.is_dataclass(config):
        yield name, (config, may_change)
        return
    yield f"{name}.is", (type(config).__name__, False)
    for field in dataclasses.fields(config):
        known = field.name in getattr(config, "at_evaluation", ())
        yield from _settings(f"{name}.{field.name}", getattr(config, field.name), known)


def _places(data: JSON) -> list[Path | None]:
    """Where data are, from the JSON of their settings; None for data in their default place."""
    if not isinstance(data, dict):
        return []
    own = [Path(str(data[name])).resolve() if data[name] else None for name in PLACES if name in data]
    return [*own, *(place for part in data.values() for place in _places(part))]


def sample_run(folder: Path, sampling: Sampling) -> Path | None:
    """Print what a run's model generates, or write images to RUN/sampled. Returns this folder, or None for text.

    Raises InputError for a run whose model generates nothing, and for options that the task does not have.
    """
    for option, number in (("--count", sampling.count), ("--length", sampling.length)):
        if number is not None and number < 1:
            raise InputError(f"{option}: expected at least 1, found {number}; raise it")
    try:
        checked_settings(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    except InputError as error:
        raise InputError(f"--{str(error).replace('_', '-', 1)}") from None
    _, task, model = open_run(folder)
    try:
        for option, text in (("--prompt", sampling.prompt), ("--stop", sampling.stop)):
            if text is not None and not task.writes_text:
                about = "because this task's models continue no text"
                raise InputError(f"{option}: expected none, {about}, found {text!r:.60}; leave it out")
        return folder / "sampled" if task.sample_outputs(model, sampling, folder / "sampled") else None
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
