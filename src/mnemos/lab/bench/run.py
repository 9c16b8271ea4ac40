"""Train every memory on every benchmark: learning rates by the validation split, then the seeds at the best rate."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from mnemos.atomic import write_json
from mnemos.errors import near_name, plural, say
from mnemos.lab.compare.baselines import roles_of
from mnemos.lab.compare.comparison import FILE as COMPARISON
from mnemos.lab.compare.comparison import Comparison, plain_table, summarise
from mnemos.lab.compare.comparison import show as comparison_tables
from mnemos.lab.compare.runs import check_rates, train
from mnemos.lab.compare.significance import spread
from mnemos.lab.evaluate.records import read_object
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.measure.gradients import state_bytes
from mnemos.lab.report.markup import decimal, listed, memory
from mnemos.lab.run.checks import complete, on_meta
from mnemos.lab.run.files import Result
from mnemos.lab.run.provenance import provenance
from mnemos.lab.run.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.weights import trained_model
from mnemos.lab.tasks.task import Task
from mnemos.types import InputError, JSONObject, State

from . import tasks
from .memories import MEMORIES
from .memories import QUICK as QUICK_MEMORIES
from .tasks import BENCHMARKS, DEFAULT, Benchmark

SEEDS = 3
RATES = tuple(10 ** (-4 + 2 * i / 3) for i in range(4))  # logspace(−4, −2, 4), as Zoology sweeps
ROWS = 200  # of a longer test


@dataclass(frozen=True)
class Options:
    """How to run the benchmarks."""

    out: Path  # of all runs and results; an interrupted command continues in it
    tasks: Sequence[str] = ()  # their names, as of memories; (): the default ones
    memories: Sequence[str] = ()
    quick: bool = False  # fewer tasks, memories, updates and one seed: about ten minutes on two cores
    seeds: int = 0  # runs at the best rate; 0: `SEEDS`, or one of `quick`
    steps: int = 0  # updates of a run; 0: each benchmark's own, as of the width
    dim: int = 0
    rates: Sequence[float] = RATES
    jobs: int = 2  # runs at a time, with one thread each


def bench_memory(options: Options) -> JSONObject:
    """Run the benchmarks; returns what is written to out/benchmarks.json, and writes the page out/benchmarks.html.

    Both keep the other tasks that earlier calls have put into `out`.

    For each task and memory, one run per learning rate with seed 0, in out/TASK/MEMORY/RATE/seed-0. The rate with the
    best validation score is chosen; its other seeds are trained, and only its runs are reported and scored on longer
    rows: no choice depends on a test split. In the choice a run that fails counts as the worst; "failed_seeds" of a row
    counts those at the chosen rate, which are not in its mean. out/TASK/comparison.json is the comparison of a task,
    for `mnemos report`. Raises InputError for unknown names, and `Interrupted`.
    """
    from mnemos.lab.report import report

    benchmarks, page = choose(options), options.out / "benchmarks.html"
    names = tuple(dict.fromkeys(options.memories)) or (QUICK_MEMORIES if options.quick else tuple(MEMORIES))
    seeds = options.seeds or (1 if options.quick else SEEDS)
    runs = len(benchmarks) * len(names) * (len(options.rates) + seeds - 1)
    compared = "1 memory" if len(names) == 1 else f"{len(names)} memories"
    recipes = {name: recipes_of(name, one, names, options.rates[0]) for name, one in benchmarks.items()}
    say(f"{plural(len(benchmarks), 'task')} × {compared}: {plural(runs, 'run')}, {options.jobs} at a time", flush=True)
    file = options.out / "benchmarks.json"
    earlier = read_object(file, "remove it").get("benchmarks") if file.is_file() else []
    entries: dict[str, JSONObject] = {  # of tasks whose runs are there too
        one["name"]: one for one in earlier or () if (options.out / one["name"] / COMPARISON).is_file()
    }
    origin = provenance(0, "cpu")
    for name, benchmark in benchmarks.items():
        say(f"{name}: {benchmark.about}", flush=True)
        comparison = compare_memories(options.out / name, benchmark, recipes[name], options.rates, seeds, options.jobs)
        entries[name] = entry(name, benchmark, comparison, options.out / name, names, seeds)
        write_json(file, {"benchmarks": list(entries.values()), "provenance": origin})
        comparison_tables(comparison)
        show(entries[name], benchmark)
        report([options.out / one for one in entries], page)
    say(page)
    return {"benchmarks": list(entries.values()), "provenance": origin}


def choose(options: Options) -> dict[str, Benchmark]:
    """The benchmarks of the options, with their steps and width. Raises InputError for unknown names."""
    for what, names, known in (("task", options.tasks, BENCHMARKS), ("memory", options.memories, MEMORIES)):
        if wrong := next((name for name in names if name not in known), None):
            raise InputError(f"bench-memory: expected the name of a {what}, found {wrong!r}; {near_name(wrong, known)}")
    check_rates(options.rates)
    if options.jobs < 1:
        raise InputError(f"jobs: expected at least 1, found {options.jobs}; raise it")
    chosen = {}
    for name in options.tasks or (tasks.QUICK if options.quick else DEFAULT):
        benchmark = BENCHMARKS[name]
        steps = options.steps or (min(benchmark.steps, tasks.QUICK_STEPS) if options.quick else benchmark.steps)
        sizes = replace(benchmark.sizes, dim=options.dim) if options.dim else benchmark.sizes
        chosen[name] = replace(benchmark, steps=steps, sizes=sizes)
    return chosen


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


def recipes_of(name: str, benchmark: Benchmark, memories: Sequence[str], rate: float) -> list[Recipe]:
    """The recipes of a benchmark's memories, completed. Raises InputError for a width that one of them cannot have."""
    task = benchmark.data.build()
    recipes = [complete(recipe(memory, benchmark, rate, 0), task) for memory in memories]
    for one in recipes:
        try:
            on_meta(one.model)
        except InputError as error:
            raise InputError(f"{name}, {one.name}: {error}; here --dim sets dim") from None
    return recipes


def compare_memories(
    folder: Path, benchmark: Benchmark, recipes: Sequence[Recipe], rates: Sequence[float], seeds: int, jobs: int
) -> Comparison:
    """Train the recipes on one benchmark, measure their runs, and write their comparison.json."""
    trained = train(recipes, folder, seeds, rates, jobs, keep_going=True)
    for run in (run for runs in trained.runs.values() for run in runs):
        measure(run, benchmark)
    comparison = summarise(trained.runs, folder, roles=roles_of(recipes), sweeps=trained.sweeps)
    keyless = {"ignoring what is asked": benchmark.keyless} if benchmark.keyless else {}
    comparison = replace(comparison, reference={"guessing": benchmark.chance, **keyless})
    comparison.write(folder)
    return comparison


def measure(folder: Path, benchmark: Benchmark) -> None:
    """Add what a benchmark measures of a run to its result.json, unless it is there.

    "along" has the scores at the training length and beyond it, "bench" the scores "beside" and the bytes of state of a
    row: "state_bytes" is the most that must be kept between two tokens when it is read token by token,
    "segment_state_bytes" the same between two segments, or after the row where the memory reads it in one call.
    """
    result = Result.read(folder)
    settings = [*benchmark.beyond, benchmark.beside]
    if result.artifacts.get("bench", {}).get("settings") == settings:
        return
    recipe, data = read_recipe(folder), cast("Any", benchmark.data)
    task, segment = recipe.data.build(), recipe.train.rollout.segment_length
    model = trained_model(folder, recipe)

    def score(**changed: Any) -> float:
        other = replace(data, **changed).build()
        parts = (part for batch in other.batches("test", 50) for part in other.segments(batch, segment))
        return evaluate(model, parts, other)[other.metrics[0].name]

    longer = min(data.rows, ROWS)
    values = [[benchmark.at({}), result.score(result.metric)]]
    values += [[benchmark.at(one), score(**one, rows=longer)] for one in benchmark.beyond]
    axis = benchmark.axis.replace("_", " ")
    along = {"metric": result.metric, "x": axis, "values": values, "chance": benchmark.chance}
    bench = {
        "settings": settings,
        "beside": {name: score(**changed) for name, changed in benchmark.beside.items()},
        "state_bytes": most_bytes(model, task, 1),
        "segment_state_bytes": most_bytes(model, task, segment),
    }
    replace(result, artifacts={**result.artifacts, "along": along, "bench": bench}).write(folder)


@torch.no_grad()
def most_bytes(model: torch.nn.Module, task: Task, length: int) -> int:
    """The most bytes of state between calls of `length` tokens of the task's example, and at its end; 0: one call."""
    most = 0
    state: State = None
    for part in task.segments(task.example(), length):
        _, state = task.forward(model, part, state)
        most = max(most, state_bytes(state))
    return most


def entry(
    name: str, benchmark: Benchmark, comparison: Comparison, folder: Path, names: Sequence[str], seeds: int
) -> JSONObject:
    """A benchmark's entry of benchmarks.json: its rows, those of its comparison in the order of their state.

    A row has further "failed_seeds", "state_bytes", "segment_state_bytes", "beyond": [{"at", "mean", "std"}], and
    "beside": {name: {"mean", "std"}}.
    """
    content = comparison.as_json()
    for row in content["rows"]:
        runs = [folder / run for run in comparison.runs[row["name"]]]
        bench = [Result.read(run).artifacts["bench"] for run in runs]
        row["failed_seeds"] = seeds - len(runs)
        row["beyond"] = [{"at": one["x"], "mean": one["mean"], "std": one["std"]} for one in row.pop("along")["values"]]
        row["beside"] = {}
        for other in benchmark.beside:
            mean, std, _ = spread([one["beside"][other] for one in bench])
            row["beside"][other] = {"mean": mean, "std": std if len(runs) > 1 else None}
        row |= {key: bench[0][key] for key in ("state_bytes", "segment_state_bytes")}
    return {
        "name": name,
        "about": benchmark.about,
        **{key: content[key] for key in ("metric", "bounds")},
        **{key: getattr(benchmark, key) for key in ("chance", "keyless", "steps", "batch")},
        "axis": benchmark.axis.replace("_", " "),
        "trained_at": benchmark.at({}),
        "rows": sorted(content["rows"], key=lambda row: row["state_bytes"]),
        "failed": [memory for memory in names if memory not in comparison.runs],
        "provenance": content["provenance"],
    }


def show(entry: JSONObject, benchmark: Benchmark) -> None:
    """Print what a benchmark has beside the tables of its comparison: bytes of state, and further scores."""
    from rich.console import Console

    console = Console(width=max(130, Console().width), markup=False)
    table = plain_table(["", "most state", "between segments", *benchmark.beside])
    for row in entry["rows"]:
        scores = (decimal(one["mean"]) for one in row["beside"].values())
        table.add_row(row["name"], memory(row["state_bytes"]), memory(row["segment_state_bytes"]), *scores)
    for name in entry["failed"]:
        table.add_row(name, "failed")
    console.print(table)
    if failed := [row for row in entry["rows"] if row["failed_seeds"]]:
        names = listed([f"{r['name']} ({r['failed_seeds']} of {r['failed_seeds'] + r['seeds']})" for r in failed])
        say(f"Failed runs at the chosen rate, which are not in the mean: {names}.")
