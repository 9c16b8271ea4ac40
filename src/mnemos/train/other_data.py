"""The data by which `mnemos eval` scores a run's model: the run's own with changed settings, or others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mnemos.config import PLACES, DataConfig, to_dict
from mnemos.data.task import Task
from mnemos.evaluate.predict import PREPROCESSING, read_preprocessing
from mnemos.models.store import RUN_MODEL
from mnemos.types import JSON, InputError, JSONObject

from .checks import check_task
from .provenance import data_read, latest
from .recipe import Recipe
from .recipe_fields import with_fields
from .run_files import read_about


def open_data(
    folder: Path, recipe: Recipe, fields: Sequence[str], split: Literal["valid", "test"]
) -> tuple[Recipe, Task]:
    """(recipe, task) of a run with other settings of its data: `fields` as on the command line.

    The run's own data, in their place or elsewhere with the same files, keep the run's splits, because its model was
    trained on the rest. Other data are opened to score `split` (`DataConfig.build_to_score`); `Task.about` then has a
    line for the files that the run has read too. Raises InputError for other settings than those of the data, and for
    data that do not fit the model.
    """
    wrong = next((word for word in fields if word.startswith("--") and not word.startswith("--data.")), None)
    if wrong is not None:
        raise InputError(f"{folder}: expected settings of the data, --data.FIELD value, found {wrong}; leave it out")
    other = with_fields(recipe, fields, f"mnemos eval {folder}")
    if _places(to_dict(other.data)) == _places(to_dict(recipe.data)):
        task = other.data.build()
    else:
        known, found = _known(folder), _found(other.data)
        if known.get("sha256") and known["sha256"] == found.get("sha256"):
            task = other.data.build()
        else:
            task = other.data.build_to_score(split)
            task.about = (*task.about, *_overlap(known, found))
    try:
        check_task(other, task)
    except InputError as error:
        problem = str(error).rpartition("; ")[0]
        raise InputError(f"{folder}: expected data that fit the run's model: {problem}; choose other data") from None
    _check_names(folder, task)
    return other, task


def _places(data: JSON) -> list[Path | None]:
    """Where data are, from the JSON of their settings; None for data in their default place."""
    if not isinstance(data, dict):
        return []
    own = [Path(str(data[name])).resolve() if data[name] else None for name in PLACES if name in data]
    return [*own, *(place for part in data.values() for place in _places(part))]


def _known(folder: Path) -> JSONObject:
    """The data files that a run has read, from its run.json; {} if they are unknown."""
    return latest(read_about(folder), "data") or {} if (folder / "run.json").is_file() else {}


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
    if about is None or not (folder / RUN_MODEL / PREPROCESSING).is_file():
        return
    known, found = read_preprocessing(folder).names, about.names
    if known != found:
        first = next((a, b) for a, b in zip(known, found, strict=True) if a != b)
        raise InputError(
            f"{folder}: expected data with the classes of the run, such as {first[0]!r}, found {first[1]!r}; name the "
            "class folders as the run's data do"
        )
