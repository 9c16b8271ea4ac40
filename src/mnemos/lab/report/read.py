"""Run folders or comparison folders as the results of one page: runs of one task are compared, others are not."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from mnemos import registry
from mnemos.config import from_dict, to_dict
from mnemos.lab.compare.baselines import roles_of
from mnemos.lab.compare.comparison import FILE, Comparison, controls_of, read_comparison, rows_of
from mnemos.lab.compare.significance import Difference, paired
from mnemos.lab.evaluate.recorded import StateControls
from mnemos.lab.evaluate.records import flat
from mnemos.lab.run.files import PLACES, Provenance, Result
from mnemos.lab.run.recipe import OWN, Recipe
from mnemos.lab.tasks.metrics import MAJORITY, bounds_of, described_in
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError, JSONObject

from .markup import listed
from .run_records import RunRecord, read_run


@dataclass(frozen=True)
class Results(Comparison):
    """A comparison with its runs, in the order of `rows`. source: names the file that the numbers come from."""

    records: dict[str, tuple[RunRecord, ...]] = field(default_factory=dict)
    source: str = ""

    @property
    def names(self) -> list[str]:
        return [row.name for row in self.rows]

    @property
    def split(self) -> str:
        """The split that the scores are of: "validation" for data without a test split, else "test"."""
        return "validation" if {result.split for result in self.finished()} == {"valid"} else "test"

    @property
    def score(self) -> str:
        return f"{self.split} {self.metric}"

    def runs_of(self, name: str) -> tuple[RunRecord, ...]:
        """The runs of a row; () where the comparison names none."""
        return self.records.get(name, ())

    def all_runs(self) -> list[RunRecord]:
        return [run for name in self.names for run in self.runs_of(name)]

    def finished(self) -> list[Result]:
        return [run.result for run in self.all_runs() if run.result]

    def first_runs(self, has: Callable[[RunRecord], object]) -> list[tuple[str, RunRecord]]:
        """By row, the first of its runs that has something; rows without one are left out."""
        runs = ((name, next(filter(has, self.runs_of(name)), None)) for name in self.names)
        return [(name, run) for name, run in runs if run is not None]

    def described(self, metric: str) -> JSONObject | None:
        """Direction and bounds of a metric, as `Metric.described`; None where no run says them."""
        if metric == self.metric:
            return {"higher_is_better": self.higher_is_better, "about": self.about, "bounds": self.bounds}
        return next(filter(None, (described_in(result.metrics, metric) for result in self.finished())), None)

    def effect(self, name: str, control: str = "emptied") -> Difference | None:
        """What a control of stored caches changes, run by run; None: it was not run."""
        scores = [(run.result.scores, run.result.controls.get(control, {})) for run in self.runs_of(name) if run.result]
        changes = [b[self.metric] - a[self.metric] for a, b in scores if self.metric in a and self.metric in b]
        return paired(changes, self.bounds)

    def state_controls(self, name: str) -> list[tuple[RunRecord, StateControls]]:
        explained = [(run, run.explained.memory) for run in self.runs_of(name) if run.explained]
        return [(run, memory) for run, memory in explained if isinstance(memory, StateControls)]

    def memory_effect(self, name: str, memory: str, control: str) -> Difference | None:
        """What a control of one memory of the state changes, run by run; None where it was not run."""
        changes, bounds = [], self.bounds
        for _, controls in self.state_controls(name):
            carried = controls.carried.scores
            metric = self.metric if self.metric in carried else controls.metric
            bounds = bounds_of((self.described(metric) or {}).get("bounds"))
            scored = [one.scored() for one in controls.memories if one.name == memory]
            after = [one[control].scores for one in scored if control in one]
            changes += [scores[metric] - carried[metric] for scores in after if metric in scores and metric in carried]
        return paired(changes, bounds)


def read_tasks(folders: Sequence[Path]) -> list[Results]:
    """The results of comparison folders, each of a task of its own, or of run folders: a result for each task.

    Runs that differ only in the seed are one row, those of `mnemos.fit` if they are seed-0, seed-1, … of one folder.
    Raises InputError, also for comparisons beside runs.
    """
    if not folders:
        raise InputError("report: expected at least one run folder or comparison folder, found none; name one")
    names = list({Path(f).resolve(): Path(f) for f in folders}.values())
    compared = [folder for folder in names if (folder / FILE).is_file()]
    for folder in names:
        if folder not in compared and not (folder / "recipe.json").is_file():
            raise InputError(
                f"{folder}: expected a run folder (with recipe.json) or a comparison folder (with comparison.json), "
                f"found {_instead(folder)}"
            )

    # --- comparisons ---
    if compared:
        if alone := next((folder for folder in names if folder not in compared), None):
            raise InputError(
                f"report: expected comparisons alone or runs alone, found the comparison {compared[0]} and the run "
                f"{alone}; name the runs of the comparison in its place"
            )
        comparisons: list[Results] = []
        for folder in compared:
            one = read_results(folder)
            if any(_same_task(_key_of(one), _key_of(other)) for other in comparisons if one.records and other.records):
                raise InputError(f"{folder}: expected one comparison of this task, found a second; report each alone")
            comparisons.append(one)
        return comparisons

    # --- single runs; one that is not finished joins a task whose metric a finished one has named ---
    runs = [read_run(folder.resolve(), folder.resolve().name) for folder in names]
    groups: list[list[RunRecord]] = []
    for run in sorted(runs, key=lambda run: run.result is None):
        group = next((group for group in groups if _same_task(task_key(group[0]), task_key(run))), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return [results_of([run for run in runs if run in group]) for group in groups]


def _instead(folder: Path) -> str:
    if not folder.is_dir():
        return registry.missing_folder(folder)
    depths = ("*", "*/*", "*/*/*")
    if inside := [path.parent for depth in depths for path in sorted(folder.glob(f"{depth}/recipe.json"))]:
        return (
            f"a folder of runs without {FILE}; name some of them, for example {inside[0]}, or end a comparison that is "
            "not finished with the command that began it"
        )
    if (folder.parent / "recipe.json").is_file():
        return f"a part of a run; name {folder.parent}"
    return "neither file; name the folder that a run wrote"


def read_results(folder: Path) -> Results:
    """A comparison folder: comparison.json and the runs that it names, with paths relative to it."""
    comparison = read_comparison(folder)
    records = {}
    for name, paths in comparison.runs.items():
        for path in paths:
            if not (folder / path / "recipe.json").is_file():
                raise InputError(f"{folder / FILE}: expected the run {path!r} of {name!r}, found no such run folder")
        records[name] = tuple(read_run((folder / path).resolve(), path) for path in paths)
    content = {one.name: getattr(comparison, one.name) for one in fields(comparison)}
    content["reference"] = {name: value for name, value in comparison.reference.items() if name != MAJORITY}
    content["against"] = comparison.against or comparison.rows[0].name
    return Results(**content, records=records, source=f"{folder.resolve().name}/{FILE}")


def results_of(runs: Sequence[RunRecord]) -> Results:
    """Results computed from runs of one task, with the memories and baselines that their recipes say."""
    finished = [run for run in runs if run.result]
    first = finished[0].result or Result() if finished else Result()
    metric = first.metric or "loss"
    described: JSONObject = {"higher_is_better": False, "about": "", "bounds": None}
    if metric != "loss":
        described |= first.description(metric, finished[0].folder)

    # --- runs whose recipes differ only in the seed, and in how they are described, are one row ---
    # The recipe of a run of `fit` does not say which model it was: such runs are alike only as seed-0, seed-1, … of one
    # folder.
    alike: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        recipe = {name: value for name, value in flat(run.recipe).items() if name not in ("about", "train.seed")}
        own = recipe.get("model.is") == OWN
        key: tuple[str, ...] = (json.dumps(recipe, sort_keys=True), _folder_of_seeds(run) if own else "")
        while run.seed in [one.seed for one in alike.get(key, ())]:  # two runs of one seed are no two seeds
            key += ("again",)
        alike.setdefault(key, []).append(run)
    records: dict[str, tuple[RunRecord, ...]] = {}
    for (_, own_folder, *_), members in alike.items():
        recipe, folder = members[0].recipe, members[0].folder
        base = str(recipe.get("name", members[0].label))
        if len(alike) > 1 and own_folder:  # the recipe has the name of the model's class
            base = folder.parent.name if len(members) > 1 else f"{folder.parent.name}/{folder.name}"
        number = sum(name.split(" (")[0] == base for name in records)
        records[f"{base} ({number + 1})" if number else base] = tuple(members)

    results = {name: [run.result for run in members if run.result] for name, members in records.items()}
    try:
        recipes = [replace(from_dict(Recipe, members[0].recipe), name=name) for name, members in records.items()]
        roles = roles_of(recipes)
    except InputError:  # of a plug-in that is not here
        roles = {}
    bounds, against = bounds_of(described["bounds"]), next(iter(records))
    return Results(
        metric=metric,
        higher_is_better=described["higher_is_better"],
        rows=rows_of(results, metric, against, roles, bounds=bounds),
        about=described["about"],
        bounds=bounds,
        majority=first.majority,
        reference={name: one for name, one in first.reference.items() if name != MAJORITY and math.isfinite(one)},
        against=against,
        unit=first.unit,
        scored_rows=first.scored_rows,
        scored_targets=first.scored_targets,
        controls=controls_of(results, metric),
        records=records,
        source="the runs' result.json",
    )


def _folder_of_seeds(run: RunRecord) -> str:
    numbered = re.search(rf"(?<!\d){run.seed}$", run.folder.name)
    return str(run.folder.parent if numbered else run.folder)


def task_key(run: RunRecord, metric: str | None = None) -> dict[str, str | None]:
    """What decides whether two runs can be ranked: the settings and the hash of the data, the rows scored, the weights
    that training started from, and the metric (by default the run's own). None: not known before the run is finished.
    """
    data, training = run.recipe.get("data"), run.recipe.get("train") or {}
    about = run.provenance or Provenance()

    # --- the settings that decide what is scored; all as they are if they cannot be read, as without a plug-in ---
    try:
        config = from_dict(DataConfig, data)
        data = {name: value for name, value in to_dict(config).items() if name not in config.unscored()}
    except InputError:
        pass
    settings = flat(data, "data")

    # --- where the files are hashed, the hash says what they are ---
    files = about.latest("data") or {}  # that the run was scored on
    if files.get("sha256"):
        settings = {name: value for name, value in settings.items() if name.split(".")[-1] not in PLACES}
        settings["hash of the files"] = str(files["sha256"])[:12]
    elif generated := files.get("generated"):
        settings["generator's version"] = generated.get("version")
    if rows := training.get("test_rows"):  # scored on a part of the test split, which depends on its batches
        settings["train.test_rows"] = rows

    # --- the weights that it started from: random ones, or those of another run by their hash ---
    weights, path = about.latest("weights") or {}, training.get("init_from")
    of_run = f"of {str(weights['sha256'])[:12]}" if weights.get("sha256") else f"of {path}, without a hash"
    settings["starting weights"] = of_run if path else "random"
    key: dict[str, str | None] = {name: str(value) for name, value in settings.items()}
    key["metric"] = metric or (run.result.metric if run.result else None)
    if rows and not run.result:
        key["train.batch_size"] = None
    elif rows and run.result and run.result.scored_rows.get("test", rows) >= rows:  # fewer are all rows of the split
        key["train.batch_size"] = str(training.get("batch_size"))
    return key


def _same_task(one: dict[str, str | None], other: dict[str, str | None]) -> bool:
    pairs = ((one.get(name, "not set"), other.get(name, "not set")) for name in {**one, **other})
    return all(a == b or None in (a, b) for a, b in pairs)


def _key_of(task: Results) -> dict[str, str | None]:
    runs = task.all_runs()
    return task_key(runs[0], task.metric) if runs else {"metric": task.metric}


def task_differences(tasks: Sequence[Results]) -> str:
    """In which settings of data, files or metric several tasks differ: at most four, with the values of each task."""
    keys = [_key_of(one) for one in tasks]
    names = dict.fromkeys(name for key in keys for name in key)
    if len({key.get("data.is") for key in keys}) > 1:
        names = dict.fromkeys(["data.is", "metric"])  # other tasks have other settings; to name them says nothing more
    apart = [name for name in names if len({key.get(name) for key in keys}) > 1]
    values = [f"{name}: {listed([key.get(name) or 'not set' for key in keys])}" for name in apart[:4]]
    return "; ".join(values) + (f"; and {len(apart) - 4} more" if len(apart) > 4 else "")
