"""The data by which `mnemos eval` scores a run's model, and the model's settings that it may change for this."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mnemos.config import PLACES, DataConfig, to_dict
from mnemos.lab.evaluate.predict import has_preprocessing, read_preprocessing
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.lab.tasks.task import Task
from mnemos.types import JSON, InputError, JSONObject

from .checks import check_task
from .files import Provenance, Result
from .model_size import on_meta
from .provenance import data_read
from .recipe import Recipe
from .recipe_fields import with_fields
from .sharding import check_model_state


def open_data(
    folder: Path, recipe: Recipe, fields: Sequence[str], split: Literal["valid", "test"]
) -> tuple[Recipe, Task]:
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
