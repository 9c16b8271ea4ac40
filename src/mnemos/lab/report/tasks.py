"""Runs grouped by task: runs with equal data, splits, starting weights and metric are compared, others are not."""

from collections.abc import Sequence
from dataclasses import dataclass

from mnemos.config import PLACES, DataConfig, from_dict, to_dict
from mnemos.types import InputError, JSONObject

from .markup import listed
from .origins import flat
from .results import Comparison, RunRecord


@dataclass(frozen=True)
class TaskKey:
    """What decides whether two runs can be ranked: data, rows, starting weights and metric.

    data: the settings and the hash of the data, the rows scored, and the hash of the weights that the run started from,
    because training of another run is an advantage. metric: None
    for a run that is not finished, which belongs to any task with its data.
    """

    data: tuple[tuple[str, str], ...]
    metric: str | None

    def holds(self, other: "TaskKey") -> bool:
        """Whether a run with the key `other` belongs to this task."""
        return self.data == other.data and (None in (self.metric, other.metric) or self.metric == other.metric)


def task_key(run: RunRecord, metric: str | None = None) -> TaskKey:
    """The key of a run's task. metric: the one that the run's comparison uses, by default the run's own."""
    settings = flat(_completed(run.recipe.get("data")), "data")
    about = run.provenance or {}
    found = _latest(about, "data")  # that the run was scored on
    if isinstance(found, dict) and found.get("sha256"):
        # Where the files are hashed, the hash says what they are.
        settings = {name: value for name, value in settings.items() if name.split(".")[-1] not in PLACES}
        settings["hash of the files"] = str(found["sha256"])[:12]
    elif isinstance(found, dict) and isinstance(found.get("generated"), dict):
        settings["generator's version"] = found["generated"].get("version")
    training = run.recipe.get("train")
    if isinstance(training, dict) and training.get("test_rows"):  # scored on a part of the test split
        settings["train.test_rows"] = training["test_rows"]
    settings["starting weights"] = _weights(training, about)
    data = tuple(sorted((name, str(value)) for name, value in settings.items()))
    return TaskKey(data, metric or (run.result or {}).get("metric"))


def _latest(about: JSONObject, name: str) -> object:
    """An entry of run.json of the last process that continued the run with another one, else of its start."""
    return next((one[name] for one in (*reversed(about.get("resumed") or ()), about) if one.get(name)), None)


def _weights(training: object, about: JSONObject) -> str:
    """The weights that a run started from: random ones, or those of another run by their hash."""
    path = training.get("init_from") if isinstance(training, dict) else None
    if not path:
        return "random"
    found = _latest(about, "weights")
    # A run of an older version names the folder alone, whose weights may be others by now.
    if isinstance(found, dict) and found.get("sha256"):
        return f"of {str(found['sha256'])[:12]}"
    return f"of {path}, without a hash"


def grouped(runs: Sequence[RunRecord], known: Sequence[TaskKey | None] = ()) -> list[list[RunRecord]]:
    """The runs of each task: first of the `known` ones, of which None holds no run, then of others as they come."""
    groups: list[tuple[TaskKey | None, list[RunRecord]]] = [(key, []) for key in known]
    # A run that is not finished joins a task whose metric a finished one has named.
    for run in sorted(runs, key=lambda run: run.result is None):
        key = task_key(run)
        place = next((members for task, members in groups if task is not None and task.holds(key)), None)
        if place is None:
            groups.append((key, place := []))
        place.append(run)
    order = {id(run): i for i, run in enumerate(runs)}
    return [sorted(members, key=lambda run: order[id(run)]) for _, members in groups]


def differences(comparisons: Sequence[Comparison]) -> str:
    """In which settings of data, files or metric several tasks differ: at most four, with the values of each task."""
    tables = []
    for one in comparisons:
        runs = one.all_runs()
        tables.append({**dict(task_key(runs[0]).data if runs else ()), "metric": one.metric})
    fields = dict.fromkeys(name for table in tables for name in table)
    if any(table.get("data.is") != tables[0].get("data.is") for table in tables):
        fields = dict.fromkeys(["data.is", "metric"])  # other tasks have other settings; to name them says nothing more
    apart = [name for name in fields if len({table.get(name) for table in tables}) > 1]
    said = [f"{name}: {listed([table.get(name, 'not set') for table in tables])}" for name in apart[:4]]
    return "; ".join(said) + (f"; and {len(apart) - 4} more" if len(apart) > 4 else "")


def _completed(data: object) -> JSONObject:
    """The data's settings that decide what is scored, with the defaults of those that an older version did not have.

    As they are if they cannot be read.
    """
    try:
        config = from_dict(DataConfig, data)
    except InputError:
        return data if isinstance(data, dict) else {}
    skipped = config.unscored()
    return {name: value for name, value in to_dict(config).items() if name not in skipped}
