"""Train every memory on every benchmark: learning rates by the validation split, then the seeds at the best rate."""

import difflib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mnemos.atomic import read_text, write_json
from mnemos.errors import say
from mnemos.lab.compare.baselines import roles_of
from mnemos.lab.compare.comparison import summarise
from mnemos.lab.compare.rates import at_best_rates, check_rates, end_warning, sweep, valid_score
from mnemos.lab.compare.runs import RunsLeft, train_several
from mnemos.lab.compare.significance import spread
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.evaluate.controls import STATE_CONTROLS
from mnemos.lab.evaluate.recorded import StateControls, read_explanation
from mnemos.lab.evaluate.records import to_json
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.report.markup import plural
from mnemos.lab.run.checks import complete, on_meta
from mnemos.lab.run.provenance import provenance
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.weights import trained_model
from mnemos.lab.tasks.task import Task
from mnemos.types import InputError, JSONObject, State

from . import tasks
from .memories import MEMORIES
from .memories import QUICK as QUICK_MEMORIES
from .page import show, write_page
from .tasks import BENCHMARKS, DEFAULT, Benchmark

SEEDS = 3
RATES = tuple(10 ** (-4 + 2 * i / 3) for i in range(4))  # logspace(−4, −2, 4), as Zoology sweeps
BEYOND, STATE = "beyond.json", "state.json"  # in the folder of a run
ROWS = 200  # of a longer test


@dataclass(frozen=True)
class Options:
    """How to run the benchmarks.

    out: the folder of all runs and results; an interrupted command continues in it. tasks, memories: their names; ():
    the default ones. quick: fewer tasks, memories, updates and one seed: about ten minutes on two cores. seeds: runs at
    the best rate (0: `SEEDS`, or one of `quick`). steps: updates per run (0: each benchmark's own). dim: the width (0:
    each benchmark's own). rates: learning rates. books: a file or folder for the benchmarks with text. jobs: runs at a
    time, with one thread each.
    """

    out: Path
    tasks: Sequence[str] = ()
    memories: Sequence[str] = ()
    quick: bool = False
    seeds: int = 0
    steps: int = 0
    dim: int = 0
    rates: Sequence[float] = RATES
    books: str | None = None
    jobs: int = 2


def bench_memory(options: Options) -> JSONObject:
    """Run the benchmarks; returns what is written to out/benchmarks.json, and writes the page out/benchmarks.html.

    For each task and memory, one run per learning rate with seed 0, in out/TASK/MEMORY/RATE/seed-0. The rate with the
    best score on the validation split is chosen. Its other seeds are trained, and only its runs are reported and scored
    on longer rows; no choice depends on a test split. In the choice of a rate a run that fails, for example because its
    loss is not finite, counts as the worst. A later seed that fails at the chosen rate has no score: "failed_seeds" of
    the row counts these runs, which are not in its mean, and table and page name them. Each run has a process of its
    own. out/TASK/comparison.json is a comparison for `mnemos report`. Raises InputError for unknown names and options
    out of range, and `Interrupted`.
    """
    found = choose(options)
    _check_books(found, options.books)
    names = _memories(options)
    count = len(found) * len(names) * _runs(options)
    compared = "1 memory" if len(names) == 1 else f"{len(names)} memories"
    say(f"{plural(len(found), 'task')} × {compared}: {plural(count, 'run')}, {options.jobs} at a time", flush=True)
    benchmarks: list[JSONObject] = []
    result: JSONObject = {"quick": options.quick, "seeds": _seeds(options), "benchmarks": benchmarks}
    result["provenance"] = provenance(0, "cpu")
    for name, benchmark in found.items():
        say(f"{name}: {benchmark.about}", flush=True)
        benchmarks.append(_bench(name, benchmark, options))
        write_json(options.out / "benchmarks.json", result)
        show(benchmarks[-1])
        write_page(result, options.out / "benchmarks.html")
    say(options.out / "benchmarks.html")
    return result


def choose(options: Options) -> dict[str, Benchmark]:
    """The benchmarks of the options, with their books, steps and width. Raises InputError for options out of range."""
    _check_names(options.tasks, BENCHMARKS, "task")
    _check_names(options.memories, MEMORIES, "memory")
    for name, least in (("seeds", 0), ("jobs", 1), ("steps", 0), ("dim", 0)):
        if getattr(options, name) < least:
            raise InputError(f"--{name}: expected at least {least}, found {getattr(options, name)}; raise it")
    check_rates(options.rates)
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"{options.out}: expected a folder, found a file; name another with --out")
    names = options.tasks or (tasks.QUICK if options.quick else DEFAULT)
    return {name: _with_sizes(BENCHMARKS[name].of_books(options.books), options) for name in names}


def _check_books(found: Mapping[str, Benchmark], books: str | None) -> None:
    """Raise InputError, before anything is trained, for books that do not suffice or are missing, or no task reads."""
    if books is not None and not any(benchmark.books for benchmark in found.values()):
        reading = ", ".join(name for name, benchmark in BENCHMARKS.items() if benchmark.books)
        raise InputError(
            f"--books: expected a task that reads books ({reading}), found {', '.join(found)}; leave it out"
        )
    for name, benchmark in found.items():
        try:
            if books is None or not benchmark.books:
                benchmark.data.files()
                continue
            for settings in ({}, *benchmark.beyond):
                data: Any = replace(benchmark.data, **settings)
                data.build()
        except InputError as error:
            fixed = str(error).replace("data.path", "--books").replace(", or lower data.length", "")
            raise InputError(f"{name}: {fixed}") from None


def _check_names(names: Sequence[str], known: Mapping[str, object], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"bench-memory: expected each {what} once, found {name!r} again; leave one out")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InputError(f"bench-memory: expected the name of a {what}, found {name!r}; {hint}")


def _with_sizes(benchmark: Benchmark, options: Options) -> Benchmark:
    steps = options.steps or (min(benchmark.steps, tasks.QUICK_STEPS) if options.quick else benchmark.steps)
    sizes = replace(benchmark.sizes, dim=options.dim) if options.dim else benchmark.sizes
    return replace(benchmark, steps=steps, sizes=sizes)


def _memories(options: Options) -> Sequence[str]:
    return options.memories or (QUICK_MEMORIES if options.quick else tuple(MEMORIES))


def _seeds(options: Options) -> int:
    return options.seeds or (1 if options.quick else SEEDS)


def _runs(options: Options) -> int:
    """The number of runs per task and memory: one per rate, and the other seeds at the best one."""
    return len(options.rates) + _seeds(options) - 1


def recipe(memory: str, benchmark: Benchmark, rate: float, seed: int) -> Recipe:
    """The recipe of one run: all memories have the same data, updates, batches and schedule."""
    model, segment_length, horizon = MEMORIES[memory](benchmark.sizes)
    steps = benchmark.steps
    return Recipe(
        model,
        benchmark.data,
        OptimConfig(lr=rate, schedule=ScheduleConfig("cosine", warmup=max(1, steps // 20))),
        TrainConfig(
            steps=steps,
            batch_size=benchmark.batch,
            seed=seed,
            log_every=max(1, steps // 50),
            eval_every=max(1, steps // 5),
            checkpoint_every=max(1, steps // 2),
            keep=1,
            threads=1,
            # Replay has the same gradients. Its second forward saves memory that rows of so few segments do not need.
            rollout=RolloutConfig(segment_length=segment_length, horizon=horizon, replay=False),
        ),
        name=memory,
        about=benchmark.about,
    )


def _bench(name: str, benchmark: Benchmark, options: Options) -> JSONObject:
    """Train the memories on one benchmark; its entry of benchmarks.json."""
    folder = options.out / name
    names = _memories(options)
    task = benchmark.data.build()
    recipes = [complete(recipe(memory, benchmark, options.rates[0], 0), task) for memory in names]
    for one in recipes:
        try:
            on_meta(one.model)
        except InputError as error:
            raise InputError(f"{name}, {one.name}: {error}; here --dim sets dim") from None
    seeds = _seeds(options)
    left = RunsLeft([name for name in names for _ in range(_runs(options))], options.jobs)
    sweeps = sweep(recipes, options.rates, folder, options.jobs, left)
    best = {memory: one.best for memory, one in sweeps.items() if one.best is not None}
    if not best:
        raise TrainingFailed(f"{folder}: no run of any memory was finished; the lines above give the reasons")
    if (warning := end_warning(sweeps)) is not None:
        say(f"  warning: {warning}", flush=True)
    left.without([name for name in names if name not in best])
    planned = at_best_rates(recipes, sweeps, seeds, folder)
    train_several([run for run in planned if run[0].train.seed], options.jobs, keep_going=True, left=left)
    runs: dict[str, list[Path]] = {memory: [] for memory in best}
    for run, place in planned:
        if valid_score(place) is not None:
            runs[run.name].append(place)
    comparison = summarise(runs, folder, roles=roles_of(recipes))
    comparison.write(folder)
    rows = [
        {
            **row,
            "rate": best[row["name"]],
            "failed_seeds": seeds - len(runs[row["name"]]),
            "rates": [list(pair) for pair in sweeps[row["name"]].scores.items()],
            **measure_runs(runs[row["name"]], benchmark),
        }
        for row in comparison.as_json()["rows"]
    ]
    rows.sort(key=lambda row: row["state_bytes"])
    return {
        "name": name,
        "about": benchmark.about,
        "metric": comparison.metric,
        "bounds": comparison.as_json()["bounds"],
        "chance": benchmark.chance,
        "keyless": benchmark.keyless,
        "axis": benchmark.axis.replace("_", " "),
        "trained_at": benchmark.at({}),
        "steps": benchmark.steps,
        "batch": benchmark.batch,
        "rows": rows,
        "failed": [m for m in names if m not in best],
        "published": [list(one) for one in benchmark.published],
        "published_at_this_size": benchmark.exact,
        "provenance": comparison.provenance,
    }


def measure_runs(runs: Sequence[Path], benchmark: Benchmark) -> JSONObject:
    """{"state_bytes", "segment_state_bytes", "beyond": [{"at", "mean", "std"}], "beside", "controls"}.

    "state_bytes" is what one row must keep between two tokens, at most within a row of the training length that is
    read token by token; "segment_state_bytes" is the same between two segments, or after the row where the memory
    reads it in one call. The first place of "beyond" is the training length. "beside": {name: {"mean", "std"}} of the
    benchmark's further scores. "controls": {name: mean score} with the whole state emptied, exchanged or frozen
    (`state_controls`), from the runs' explain.json, or {"left": reason}. What was measured before is read from the
    runs' folders.
    """
    scores = [spread(values) for values in zip(*(_run(run, benchmark) for run in runs), strict=True)]
    found = [to_json({"mean": score.mean, "std": score.std}) for score in scores]
    places = [benchmark.at(settings) for settings in ({}, *benchmark.beyond)]
    beyond = [{"at": at, **one} for at, one in zip(places, found, strict=False)]
    beside = dict(zip(benchmark.beside, found[len(places) :], strict=True))
    return {**_state(runs[0]), "beyond": beyond, "beside": beside, "controls": _controls(runs)}


def _run(folder: Path, benchmark: Benchmark) -> list[float]:
    """The scores of one run at the training length, beyond it, and beside: kept in its folder."""
    path = folder / BEYOND
    settings = [*benchmark.beyond, *benchmark.beside.values()]
    wanted = [list(one.items()) for one in settings]
    if path.is_file():
        kept: JSONObject = json.loads(read_text(path))
        if kept["settings"] == json.loads(json.dumps(wanted)):
            return list(kept["beyond"])
    recipe = read_recipe(folder)
    model, segment = trained_model(folder, recipe), recipe.train.rollout.segment_length
    scores = []
    for i, one in enumerate([{}, *settings]):
        data: Any = benchmark.data
        rows = min(data.rows, ROWS) if 0 < i <= len(benchmark.beyond) else data.rows
        task = replace(data, **{**one, "rows": rows}).build()
        scores.append(evaluate(model, _segments(task, segment), task)[task.metrics[0].name])
    write_json(path, {"settings": wanted, "beyond": scores})
    return scores


def _state(folder: Path) -> JSONObject:
    """The bytes of state of one run, which are kept in its folder.

    They follow from the run's recipe alone, which never changes, so they are kept without settings of the benchmark.
    """
    path = folder / STATE
    if path.is_file():
        kept: JSONObject = json.loads(read_text(path))
        return kept
    recipe = read_recipe(folder)
    task = recipe.data.build()
    model, segment = trained_model(folder, recipe), recipe.train.rollout.segment_length
    result = {
        "state_bytes": most_bytes(model, task, 1),
        "segment_state_bytes": most_bytes(model, task, segment),
    }
    write_json(path, result)
    return result


def _segments(task: Task, length: int) -> Any:
    for batch in task.batches("test", 50):
        yield from task.segments(batch, length)


@torch.no_grad()
def most_bytes(model: torch.nn.Module, task: Task, length: int) -> int:
    """The most bytes of state between calls of `length` tokens of the task's example, and at its end; 0: one call."""
    most = 0
    state: State = None
    for part in task.segments(task.example(), length):
        _, state = task.forward(model, part, state)
        most = max(most, state_bytes(state))
    return most


def _controls(runs: Sequence[Path]) -> JSONObject:
    """The mean over runs of the scored segments as carried and under each control of the whole state."""
    found = [explanation.memory for run in runs if (explanation := read_explanation(run))]
    known = [one for one in found if isinstance(one, StateControls)]
    if not known:
        return {"left": next((one.left for one in found if one), "not recorded")}
    metric = known[0].metric
    parts = {"carried": [one.carried.scores[metric] for one in known]}
    scored = [one.memories[0].scored() for one in known]
    for control in STATE_CONTROLS:
        if all(control in one for one in scored):
            parts[control] = [one[control].scores[metric] for one in scored]
    return {name: statistics.fmean(values) for name, values in parts.items()}
