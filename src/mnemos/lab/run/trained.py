"""What one does with a trained model: open it, score it on its data or on others, and let it write."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mnemos.config import to_dict
from mnemos.errors import say
from mnemos.lab.evaluate.controls import CONTROLS, control_lines, controls, state_controls
from mnemos.lab.evaluate.predict import has_preprocessing, read_preprocessing
from mnemos.lab.evaluate.scores import evaluate, metrics_text
from mnemos.lab.tasks.batch import row_count
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.task import DataConfig, HeldOut, Sampling, Task
from mnemos.ops import dense_layer
from mnemos.types import JSON, InputError, JSONObject

from .checks import check_task, on_meta
from .files import PLACES, Provenance, Result
from .progress import progress
from .provenance import data_read
from .recipe import Recipe
from .recipe_fields import with_fields
from .recipe_files import is_model, recipe_of_model
from .scored_batches import scored_segments
from .sharding import check_model_state
from .weights import trained_model

_CARRIED = {
    "as trained": "memory reset at the beginning of each document",
    "carried": "memory carried from document to document",
}


def open_run(folder: Path, fields: Sequence[str] = (), split: HeldOut = "test") -> tuple[Recipe, Task, nn.Module]:
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


def evaluate_run(folder: str | Path, split: HeldOut = "test", fields: Sequence[str] = (), rows: int = 0) -> JSONObject:
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
        say(line)
    recorded = Provenance.exists(Path(folder))  # not in the folder of a model alone
    chosen = dense_layer.Choice.from_json(Provenance.read(Path(folder)).dense) if recorded else dense_layer.choice()
    dense = dense_layer.using(chosen)  # the sums are those of the run, bit for bit
    with dense, progress(False, recipe.name, 0, 0) as display:
        batches = partial(scored_segments, task, split, recipe.train, display)
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
    say(f"{folder}: {recipe.name}, {part}{what} {task.size(split):,} targets")
    for name, found in scores.items():
        note = CONTROLS.get(name, _CARRIED.get(name, "") if whole is not None else "")
        say(f"  {name:11} loss {found['loss']:.4f}  {metrics_text(task, found)}  {note}".rstrip())
    for line in control_lines(state_controls(model, task, split, recipe.train.rollout.segment_length), task):
        say(line)
    for name, value in task.reference.items() if split == "test" else ():  # it is that of the test split
        say(f"  {name:11} {'':3}{metric.text(value)}")
    if metric.about:
        say(f"  {metric.name}: {metric.about}")
    for line in task.show(model, split):
        say(line)
    return scores


def _first(batches: Iterable[Any], rows: int) -> Iterator[Any]:
    """The first batches that together have at least `rows` rows; 0: all."""
    done = 0
    for batch in batches:
        yield batch
        done += row_count(batch)
        if rows and done >= rows:
            return


def open_data(folder: Path, recipe: Recipe, fields: Sequence[str], split: HeldOut) -> tuple[Recipe, Task]:
    """(recipe, task) of a run with other settings of its data and model: `fields` as on the command line.

    The run's own data, in their place or elsewhere with the same files, keep the run's splits, because its model was
    trained on the rest. Other data are opened to score `split` (`DataConfig.build_to_score`); `Task.about` then has a
    line for the files that the run has read too. Settings of the model may change that say how far
    it reads (`Config.at_evaluation`); `Task.about` names them. Raises InputError for other settings, and for data that
    do not fit the model.
    """
    wrong = next(
        (word for word in fields if word.startswith("--") and not word.startswith(("--data.", "--model."))), None
    )
    if wrong is not None:
        raise InputError(
            f"{folder}: expected settings of the data or the model, --data.FIELD value or --model.FIELD value, found "
            f"{wrong}; leave it out"
        )
    other = with_fields(recipe, fields, f"mnemos eval {folder}")
    changed = list(_changed("model", recipe.model, other.model))
    _check_changed(folder, recipe, other, changed)
    if _places(to_dict(other.data)) == _places(to_dict(recipe.data)):
        task = other.data.build()
    else:
        known, found = _known(folder), _found(other.data)
        if known.get("sha256") and known["sha256"] == found.get("sha256"):
            task = other.data.build()
        else:
            task = other.data.build_to_score(split, _trained(folder, recipe))
            task.about = (*task.about, *_overlap(known, found))
    _check_names(folder, task)
    try:
        check_task(other, task)
    except InputError as error:
        problem = str(error).rpartition("; ")[0]
        raise InputError(f"{folder}: expected data that fit the run's model: {problem}; choose other data") from None
    task.about = (*task.about, *(f"changed: {one.name} {one.new} instead of {one.old}" for one in changed))
    return other, task


class Changed(NamedTuple):
    """A setting that differs between two configurations; allowed: an evaluation may change it."""

    name: str
    old: object
    new: object
    allowed: bool


def _changed(name: str, old: Any, new: Any, allowed: bool = False) -> Iterator[Changed]:
    """The settings that differ between two configurations."""
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        for field in dataclasses.fields(old):
            known = field.name in getattr(old, "at_evaluation", ())
            yield from _changed(f"{name}.{field.name}", getattr(old, field.name), getattr(new, field.name), known)
    elif old != new:
        yield Changed(name, old, new, allowed)


def _check_changed(folder: Path, recipe: Recipe, other: Recipe, changed: Sequence[Changed]) -> None:
    """Raise InputError unless an evaluation may change these settings of the model, and no weight changes with them."""
    if not changed:
        return
    wrong = next((one.name for one in changed if not one.allowed), None)
    problem = ""
    if wrong is None:
        weights = on_meta(other.model).state_dict()  # raises InputError for an impossible setting
        try:
            check_model_state(weights, on_meta(recipe.model).state_dict())
            return
        except InputError as error:
            wrong, problem = changed[0].name, f", which changes weights ({str(error).rpartition('; ')[0]})"
    may = ", ".join(f"--{name}" for name in _at_evaluation("model", recipe.model)) or "none"
    raise InputError(
        f"{folder}: expected settings of the model that an evaluation may change ({may}), found --{wrong}{problem}; "
        "train a run with it"
    )


def _at_evaluation(name: str, config: Any) -> Iterator[str]:
    """The settings of a configuration that an evaluation may change."""
    if dataclasses.is_dataclass(config):
        for field in dataclasses.fields(config):
            if field.name in getattr(config, "at_evaluation", ()):
                yield f"{name}.{field.name}"
            yield from _at_evaluation(f"{name}.{field.name}", getattr(config, field.name))


def _trained(folder: Path, recipe: Recipe) -> Preprocessing | None:
    """The preprocessing that a run's model was trained with; of a run that is not finished, that of its data."""
    if has_preprocessing(folder):
        return read_preprocessing(folder)
    if Result.exists(folder):
        return None
    found: Preprocessing | None = recipe.data.build().preprocessing()
    return found


def _places(data: JSON) -> list[Path | None]:
    """Where data are, from the JSON of their settings; None for data in their default place."""
    if not isinstance(data, dict):
        return []
    own = [Path(str(data[name])).resolve() if data[name] else None for name in PLACES if name in data]
    return [*own, *(place for part in data.values() for place in _places(part))]


def _known(folder: Path) -> JSONObject:
    """The data files that a run has read, from its run.json; {} if they are unknown."""
    return Provenance.read(folder).latest("data") or {} if Provenance.exists(folder) else {}


def _found(data: DataConfig) -> JSONObject:
    """The files of other data; {} if they have no training split, as only `build_to_score` reads them."""
    try:
        return data_read(data)
    except InputError:
        return {}


def _overlap(known: JSONObject, found: JSONObject) -> list[str]:
    """A warning if files of other data, by their hashes, are among those that the run has read."""
    read = {one["sha256"] for one in known.get("files") or ()}
    shared = [one["name"] for one in found.get("files") or () if one["sha256"] in read]
    if not shared:
        return []
    more = f" and {len(shared) - 1} more are" if shared[1:] else " is"
    return [
        f"warning: {shared[0]}{more} among the files that the run has read, so its model may have been trained on them"
    ]


def _check_names(folder: Path, task: Task) -> None:
    """Raise InputError if the classes of other data have other names than those that the run's model was trained on."""
    about = task.preprocessing()
    if about is None or not has_preprocessing(folder):
        return
    if problem := read_preprocessing(folder).difference(about):
        raise InputError(f"{folder}: {problem}")


def sample_run(folder: Path, sampling: Sampling) -> Path | None:
    """Print what a run's model generates, or write images to RUN/sampled. Returns this folder, or None for text.

    Raises InputError for a run whose model generates nothing, and for options that the task does not have.
    """
    if (sampling.count is not None and sampling.count < 1) or sampling.length < 1:
        raise InputError(
            f"--count and --length: expected at least 1, found {sampling.count} and {sampling.length}; raise them"
        )
    _, task, model = open_run(folder)
    try:
        if sampling.stop is not None and not task.writes_text:
            raise InputError(
                "--stop: expected none, because this task's models continue no text, found "
                f"{sampling.stop!r:.60}; leave it out"
            )
        return folder / "sampled" if task.sample_outputs(model, sampling, folder / "sampled") else None
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None


def translate_test_split(folder: Path) -> None:
    """Write translations.jsonl of the test split to the folder of a model that translates and has none yet.

    Does nothing for other folders. Cost: the beam search of the run's recipe over the test split. Raises InputError if
    the run's data are missing.
    """
    from mnemos.lab.translation.translate import TranslationPreprocessing
    from mnemos.lab.translation.translation import TRANSLATIONS

    if not is_model(folder) or (folder / TRANSLATIONS).is_file() or not has_preprocessing(folder):
        return
    if not isinstance(read_preprocessing(folder), TranslationPreprocessing):
        return
    say(f"{folder}: translating the test split", flush=True)
    _, task, model = open_run(folder)
    try:
        task.artifacts(model, folder, "test")
    finally:
        task.close()
