"""Run folders and comparison folders as the results of one page: runs of one task are compared, others are not."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

from mnemos import registry
from mnemos.config import from_dict, to_dict
from mnemos.lab.compare.baselines import CACHE, roles_of
from mnemos.lab.compare.budgets import FILE as BUDGET
from mnemos.lab.compare.comparison import FILE, Comparison, controls_of, read_comparison, rows_of
from mnemos.lab.compare.significance import Difference, Spread, paired, spread, welch
from mnemos.lab.evaluate.recorded import Left, StateControls
from mnemos.lab.evaluate.records import flat
from mnemos.lab.run.files import PLACES, Provenance, Result
from mnemos.lab.run.recipe import Recipe
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

    def cached(self) -> list[str]:
        """The rows with a gated cache that is written, and those with gates or controls of one that is not."""
        written = {row.name for row in self.rows if row.memory == CACHE} | {control.name for control in self.controls}
        return [name for name in self.names if name in written or any(run.gates for run in self.runs_of(name))]

    def described(self, metric: str) -> JSONObject | None:
        """Direction and bounds of a metric, as `Metric.described`; None where no run says them."""
        if metric == self.metric:
            return {"higher_is_better": self.higher_is_better, "about": self.about, "bounds": self.bounds}
        return next(filter(None, (described_in(result.metrics, metric) for result in self.finished())), None)

    def effect(self, name: str, control: str = "emptied") -> Difference | None:
        """What a control of stored caches changes: by run where results are at hand, else by means; None: not run."""
        scores = [(run.result.scores, run.result.controls.get(control, {})) for run in self.runs_of(name) if run.result]
        changes = [b[self.metric] - a[self.metric] for a, b in scores if self.metric in a and self.metric in b]
        if by_run := paired(changes, self.bounds):
            return by_run
        for one in self.controls:
            if (one.name, one.control) == (name, control) and math.isfinite(one.mean):
                return welch(one, next(row for row in self.rows if row.name == name), self.bounds)
        return None

    def state_controls(self, name: str) -> list[tuple[RunRecord, StateControls]]:
        explained = [(run, run.explained.memory) for run in self.runs_of(name) if run.explained]
        return [(run, memory) for run, memory in explained if isinstance(memory, StateControls)]

    def uncontrolled(self, name: str) -> str | None:
        """Why no run of a row scored controls of its state; None if one did, or none recorded a reason."""
        memories = [run.explained.memory for run in self.runs_of(name) if run.explained]
        reasons = [memory.left for memory in memories if isinstance(memory, Left)]
        return reasons[0] if reasons and not self.state_controls(name) else None

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


def finite_spread(values: Iterable[float]) -> Spread:
    """The mean and the spread of the finite values: a run that is not finished has no score."""
    return spread(list(filter(math.isfinite, values)))


def read(folders: Sequence[Path]) -> Results:
    """The results of runs of one task, as `read_tasks` reads them. Raises InputError if there are several tasks."""
    tasks = read_tasks(folders)
    if len(tasks) > 1:
        raise InputError(f"expected runs of one task, found {len(tasks)}: {task_differences(tasks)}; name those of one")
    return tasks[0]


def read_tasks(folders: Sequence[Path]) -> list[Results]:
    """The results of each task (`TaskKey`) of any number of run folders and comparison folders.

    Single runs become rows of the comparison of their task; those that differ only in the seed are one row. Raises
    InputError, also for two comparisons of one task.
    """
    if not folders:
        raise InputError("report: expected at least one run folder or comparison folder, found none; name one")

    # --- read each folder ---
    comparisons: list[Results] = []
    groups: list[tuple[TaskKey | None, list[RunRecord]]] = []  # the single runs of each task; a comparison may lack one
    runs: list[RunRecord] = []
    for folder, name in {Path(f).resolve(): f for f in folders}.items():
        if (folder / FILE).is_file():
            results = read_results(folder)
            key = next((task_key(run, results.metric) for run in results.all_runs()), None)
            if key is not None and any(key == other for other, _ in groups):
                raise InputError(f"{folder}: expected one comparison of this task, found a second; report each alone")
            comparisons.append(results)
            groups.append((key, []))
        elif (folder / "recipe.json").is_file():
            runs.append(read_run(folder, folder.name))
        else:
            raise InputError(
                f"{name}: expected a run folder (with recipe.json) or a comparison folder (with comparison.json), "
                f"found {_instead(Path(name))}"
            )

    # --- the single runs of each task: of the comparisons', then of others as they come ---
    inside = {run.folder for comparison in comparisons for run in comparison.all_runs()}
    single = [run for run in runs if run.folder not in inside]
    # A run that is not finished joins a task whose metric a finished one has named.
    for run in sorted(single, key=lambda run: run.result is None):
        key = task_key(run)
        members = next((members for task, members in groups if task is not None and task.holds(key)), None)
        if members is None:
            groups.append((key, members := []))
        members.append(run)
    order = {id(run): i for i, run in enumerate(single)}
    for _, members in groups:
        members.sort(key=lambda run: order[id(run)])

    # --- they become rows of the comparison, or results of their own ---
    tasks = []
    for i, (_, members) in enumerate(groups):
        if i >= len(comparisons):
            tasks.append(_with_roles(results_of(members)))
        elif members:
            one = comparisons[i]
            more = results_of(members, one.metric)
            if twice := next((name for name in more.names if name in one.names), None):
                raise InputError(f"{one.source}: expected new variants beside it, found {twice!r} twice; compare again")
            rows, controls, records = one.rows + more.rows, one.controls + more.controls, one.records | more.records
            source = f"{one.source} and {more.source}"
            joined = replace(one, rows=rows, controls=controls, records=records, source=source, equal=None)
            tasks.append(_with_roles(joined))
        else:
            tasks.append(comparisons[i])
    return tasks


def _instead(folder: Path) -> str:
    if not folder.is_dir():
        return registry.missing_folder(folder)
    if (folder / "benchmarks.json").is_file():
        return "the results of bench-memory, whose page is benchmarks.html; name the folder of a task in it"
    inside = {path.parent for name in (FILE, "recipe.json") for path in folder.glob(f"*/{name}")}
    if inside:
        return f"a folder of runs; name some of them, for example {min(inside)}"
    if (folder / BUDGET).is_file() or any(any(folder.glob(f"{part}seed-*/recipe.json")) for part in ("*/", "*/*/")):
        return "a comparison that is not finished; continue it with the command that began it, or name single runs"
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
    return Results(**content, records=records, source=f"{folder.name}/{FILE}")


def results_of(runs: Sequence[RunRecord], metric: str | None = None) -> Results:
    """Results computed from runs of one task: by its first metric, or by the loss if a result lacks that."""
    finished = [run for run in runs if run.result]
    first = finished[0].result or Result() if finished else Result()
    own = first.metric or "loss"
    if metric is None:
        metric = own if all(math.isfinite(run.tested(own)) for run in finished) else "loss"
    described: JSONObject = {"higher_is_better": False, "about": "", "bounds": None}
    if finished and metric != "loss":
        described |= first.description(metric, finished[0].folder)

    # --- runs whose recipes differ only in the seed, and in how they are described, are one row ---
    alike: dict[str, list[RunRecord]] = {}
    for run in runs:
        training = run.recipe.get("train")
        training = {k: v for k, v in training.items() if k != "seed"} if isinstance(training, dict) else training
        recipe = json.dumps({**run.recipe, "train": training, "about": ""}, sort_keys=True)
        alike.setdefault(recipe, []).append(run)
    records: dict[str, tuple[RunRecord, ...]] = {}
    for members in alike.values():
        base = str(members[0].recipe.get("name", members[0].label))
        name = base if base not in records else f"{base} ({sum(n.split(' (')[0] == base for n in records) + 1})"
        records[name] = tuple(members)

    results = {name: [run.result for run in members if run.result] for name, members in records.items()}
    bounds = bounds_of(described["bounds"])
    rows = rows_of(results, metric, next(iter(records)), bounds=bounds)
    reference = first.reference if metric == own else {}
    return Results(
        metric=metric,
        higher_is_better=described["higher_is_better"],
        rows=rows,
        about=described["about"],
        bounds=bounds,
        majority=first.majority if metric == own else None,  # of the metric, and not of the loss instead
        reference={name: value for name, value in reference.items() if name != MAJORITY and math.isfinite(value)},
        against=rows[0].name,
        unit=first.unit,
        controls=controls_of(results, metric),
        records=records,
        source="the runs' result.json",
    )


def _with_roles(results: Results) -> Results:
    """Results with the memory of each row, and whose baseline it is, from the recipes of runs that nothing compared."""
    if not all(map(results.runs_of, results.names)):
        return results
    try:
        recipes = [replace(from_dict(Recipe, results.runs_of(n)[0].recipe), name=n) for n in results.names]
    except InputError:
        return results
    roles, rows = roles_of(recipes), []
    for row in results.rows:
        role = roles[row.name]
        rows.append(replace(row, memory=role.memory, baseline_of=role.baseline_of or row.baseline_of))
    return replace(results, rows=tuple(rows))


class TaskKey(NamedTuple):
    """What decides whether two runs can be ranked."""

    # Settings and hash of the data, the rows scored, and the hash of the weights that training started from.
    data: tuple[tuple[str, str], ...]
    metric: str | None  # None for a run that is not finished, which belongs to any task with its data
    batch: int | None = 0  # decides what a part of the test split is; 0: all of it is scored; None: not finished

    def holds(self, other: "TaskKey") -> bool:
        """Whether a run with the key `other` belongs to this task."""
        pairs = (self.metric, other.metric), (self.batch, other.batch)
        return self.data == other.data and all(None in pair or pair[0] == pair[1] for pair in pairs)


def task_key(run: RunRecord, metric: str | None = None) -> TaskKey:
    """The key of a run's task. metric: the one that the run's comparison uses, by default the run's own."""
    data, training = run.recipe.get("data"), run.recipe.get("train")
    training = training if isinstance(training, dict) else {}
    about = run.provenance or Provenance()

    # --- the settings that decide what is scored; all as they are if they cannot be read, as without a plug-in ---
    try:
        config = from_dict(DataConfig, data)
        scored = {name: value for name, value in to_dict(config).items() if name not in config.unscored()}
    except InputError:
        scored = data if isinstance(data, dict) else {}
    settings = flat(scored, "data")

    # --- where the files are hashed, the hash says what they are ---
    files = about.latest("data")  # that the run was scored on
    if isinstance(files, dict) and files.get("sha256"):
        settings = {name: value for name, value in settings.items() if name.split(".")[-1] not in PLACES}
        settings["hash of the files"] = str(files["sha256"])[:12]
    elif isinstance(files, dict) and isinstance(files.get("generated"), dict):
        settings["generator's version"] = files["generated"].get("version")
    batch: int | None = 0
    if rows := training.get("test_rows"):  # scored on a part of the test split, which depends on its batches
        settings["train.test_rows"] = rows
        if run.result is None:
            batch = None
        elif run.result.scored_rows.get("test", rows) >= rows:  # fewer are all rows of the split
            batch = training.get("batch_size", 0)

    # --- the weights that it started from: random ones, or those of another run by their hash ---
    weights, path = about.latest("weights"), training.get("init_from")
    digest = isinstance(weights, dict) and weights.get("sha256")
    of_run = f"of {str(digest)[:12]}" if digest else f"of {path}, without a hash"  # without a run.json
    settings["starting weights"] = of_run if path else "random"
    values = tuple(sorted((name, str(value)) for name, value in settings.items()))
    return TaskKey(values, metric or (run.result.metric if run.result else None), batch)


def task_differences(tasks: Sequence[Results]) -> str:
    """In which settings of data, files or metric several tasks differ: at most four, with the values of each task."""
    tables = []
    for one in tasks:
        runs = one.all_runs()
        keys = [task_key(run) for run in runs]
        batch = next((key.batch for key in keys if key.batch), None)
        tables.append({**dict(keys[0].data if keys else ()), "metric": one.metric})
        tables[-1] |= {} if batch is None else {"train.batch_size": str(batch)}
    names = dict.fromkeys(name for table in tables for name in table)
    if any(table.get("data.is") != tables[0].get("data.is") for table in tables):
        names = dict.fromkeys(["data.is", "metric"])  # other tasks have other settings; to name them says nothing more
    apart = [name for name in names if len({table.get(name) for table in tables}) > 1]
    values = [f"{name}: {listed([table.get(name, 'not set') for table in tables])}" for name in apart[:4]]
    return "; ".join(values) + (f"; and {len(apart) - 4} more" if len(apart) > 4 else "")
