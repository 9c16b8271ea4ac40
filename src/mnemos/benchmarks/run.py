"""Train every memory on every benchmark: learning rates by the validation split, then the seeds at the best rate."""

import difflib
import math
import multiprocessing
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from mnemos.atomic import write_json
from mnemos.train.checks import complete
from mnemos.train.compare import summarise, train_apart
from mnemos.train.provenance import provenance
from mnemos.train.recipe import OptimConfig, Recipe, RolloutConfig, ScheduleConfig, TrainConfig
from mnemos.train.run_files import read_result
from mnemos.train.stopping import TrainingFailed
from mnemos.types import InputError, JSONObject

from . import memories, tasks
from .measurements import measured
from .page import show, write_page
from .tasks import BENCHMARKS, Benchmark

RATES = tuple(10 ** (-4 + 2 * i / 3) for i in range(4))  # logspace(−4, −2, 4), as Zoology sweeps


@dataclass(frozen=True)
class Options:
    """How to run the benchmarks.

    out: the folder of all runs and results; an interrupted command continues in it. tasks, memories: their names; ():
    the default ones. quick: fewer tasks, memories, updates and one seed: about ten minutes on two cores. seeds: runs at
    the best rate. steps: updates per run (0: each benchmark's own). dim: the width (0: each benchmark's own). rates:
    learning rates. books: a file or folder for the benchmarks with text. jobs: runs at a time, with one thread each.
    """

    out: Path
    tasks: Sequence[str] = ()
    memories: Sequence[str] = ()
    quick: bool = False
    seeds: int = 3
    steps: int = 0
    dim: int = 0
    rates: Sequence[float] = RATES
    books: str | None = None
    jobs: int = 2


def bench_memory(options: Options) -> JSONObject:
    """Run the benchmarks; returns what is written to out/benchmarks.json, and writes the page out/benchmarks.html.

    For each task and memory, one run per learning rate with seed 0, in out/TASK/MEMORY/RATE/seed-0. The rate with the
    best score on the validation split is chosen. Its other seeds are trained, and only its runs are reported and scored
    on longer rows; no choice depends on a test split. A run that fails, for example because its loss is not finite,
    counts as the worst. Each run has a process of its own. out/TASK/comparison.json is a comparison for
    `mnemos report`. Raises InputError for unknown names and options out of range, and `Interrupted`.
    """
    found = chosen(options)
    for benchmark in found.values():
        benchmark.data.files()  # missing books are named before anything is trained
    count = sum(len(options.rates) + _seeds(options) - 1 for _ in found for _ in _memories(options))
    print(
        f"{len(found)} tasks × {len(_memories(options))} memories: {count} runs, {options.jobs} at a time", flush=True
    )
    benchmarks: list[JSONObject] = []
    result: JSONObject = {"quick": options.quick, "seeds": _seeds(options), "benchmarks": benchmarks}
    result["provenance"] = provenance(0, "cpu")
    for name, benchmark in found.items():
        print(f"{name}: {benchmark.about}", flush=True)
        benchmarks.append(_bench(name, benchmark, options))
        write_json(options.out / "benchmarks.json", result)
        show(benchmarks[-1])
        write_page(result, options.out / "benchmarks.html")
    print(options.out / "benchmarks.html")
    return result


def chosen(options: Options) -> dict[str, Benchmark]:
    """The benchmarks of the options, with their books, steps and width. Raises InputError for options out of range."""
    _known(options.tasks, BENCHMARKS, "task")
    _known(options.memories, memories.MEMORIES, "memory")
    for name, least in (("seeds", 1), ("jobs", 1), ("steps", 0), ("dim", 0)):
        if getattr(options, name) < least:
            raise InputError(f"--{name}: expected at least {least}, found {getattr(options, name)}; raise it")
    if not options.rates or not all(0 < rate < math.inf for rate in options.rates):
        raise InputError(f"--rates: expected learning rates above 0, found {list(options.rates)}; such as 1e-3,1e-2")
    if len({f"{rate:.1e}" for rate in options.rates}) < len(options.rates):
        raise InputError(
            f"--rates: expected rates that differ in two digits, found {list(options.rates)}; leave some out"
        )
    if options.out.exists() and not options.out.is_dir():
        raise InputError(f"{options.out}: expected a folder, found a file; name another with --out")
    names = options.tasks or (tasks.QUICK if options.quick else tasks.DEFAULT)
    return {name: _sized(BENCHMARKS[name].of_books(options.books), options) for name in names}


def _known(names: Iterable[str], known: Mapping[str, object], what: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise InputError(f"bench-memory: expected the name of a {what}, found {name!r}; {hint}")


def _sized(benchmark: Benchmark, options: Options) -> Benchmark:
    steps = options.steps or (min(benchmark.steps, tasks.QUICK_STEPS) if options.quick else benchmark.steps)
    sizes = replace(benchmark.sizes, dim=options.dim) if options.dim else benchmark.sizes
    return replace(benchmark, steps=steps, sizes=sizes)


def _memories(options: Options) -> Sequence[str]:
    return options.memories or (memories.QUICK if options.quick else tuple(memories.MEMORIES))


def _seeds(options: Options) -> int:
    return 1 if options.quick else options.seeds


def recipe(memory: str, benchmark: Benchmark, rate: float, seed: int) -> Recipe:
    """The recipe of one run: all memories have the same data, updates, batches and schedule."""
    model, segment_length, horizon = memories.MEMORIES[memory](benchmark.sizes)
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
            rollout=RolloutConfig(segment_length=segment_length, horizon=horizon),
        ),
        name=memory,
        about=benchmark.about,
    )


def _bench(name: str, benchmark: Benchmark, options: Options) -> JSONObject:
    """Train the memories on one benchmark; its entry of benchmarks.json."""
    folder = options.out / name
    names, first = _memories(options), [0]
    task = benchmark.data.build()

    def made(memory: str, rate: float, seed: int) -> Recipe:
        return complete(recipe(memory, benchmark, rate, seed), task)

    place = {memory: {rate: folder / memory / f"{rate:.1e}" for rate in options.rates} for memory in names}
    sweep = [(made(m, rate, 0), place[m][rate] / "seed-0") for rate in options.rates for m in names]
    _train(sweep, options.jobs)
    valid = {m: {rate: _valid(place[m][rate] / "seed-0") for rate in options.rates} for m in names}
    best = {m: _best(scores) for m, scores in valid.items()}
    trained = [m for m in names if valid[m][best[m]] is not None]
    if not trained:
        raise TrainingFailed(f"{folder}: no run of any memory was finished; the lines above give the reasons")
    seeds = [*first, *range(1, _seeds(options))]
    _train(
        [(made(m, best[m], s), place[m][best[m]] / f"seed-{s}") for s in seeds for m in trained],
        options.jobs,
    )
    runs = {m: [p for s in seeds if _valid(p := place[m][best[m]] / f"seed-{s}") is not None] for m in trained}
    comparison = summarise(runs, folder)
    write_json(folder / "comparison.json", comparison)
    rows = [
        {
            **row,
            "rate": best[row["name"]],
            "rates": [[rate, valid[row["name"]][rate]] for rate in options.rates],
            **measured(runs[row["name"]], benchmark),
        }
        for row in comparison["rows"]
    ]
    return {
        "name": name,
        "about": benchmark.about,
        "metric": comparison["metric"],
        "chance": benchmark.chance,
        "axis": benchmark.axis,
        "trained_at": benchmark.at({}),
        "steps": benchmark.steps,
        "batch": benchmark.batch,
        "rows": rows,
        "failed": [m for m in names if m not in trained],
        "published": [list(one) for one in benchmark.published],
        "published_at_this_size": benchmark.exact,
        "provenance": comparison["provenance"],
    }


def _valid(place: Path) -> float | None:
    """The score of a finished run on the validation split; None for a run that failed."""
    if not (place / "result.json").is_file():
        return None
    result = read_result(place)
    value = result["valid"][result["metric"]]
    return value if value is not None and math.isfinite(value) else None


def _best(scores: Mapping[float, float | None]) -> float:
    """The rate of the greatest score. A run that failed, None, is worse than a score of 0."""

    def rank(rate: float) -> float:
        score = scores[rate]
        return -math.inf if score is None else score

    return max(scores, key=rank)


def _train(runs: Sequence[tuple[Recipe, Path]], jobs: int) -> None:
    """Train runs in processes of their own, `jobs` at a time. A run that fails is reported and left out."""
    stopped = threading.Event()

    def job(recipe: Recipe, place: Path) -> bool:
        """Train a run; False if it was not begun, because another was interrupted."""
        if stopped.is_set():
            return False
        try:
            train_apart(recipe, place, True)
        except TrainingFailed:
            raise
        except BaseException:
            stopped.set()  # here and not by the thread that waits, which may be late
            raise
        return True

    with ThreadPoolExecutor(jobs) as pool:
        waiting: dict[Future[bool], Path] = {pool.submit(job, *run): run[1] for run in runs}
        try:
            for future in as_completed(waiting):
                try:
                    if not future.result():
                        continue
                except TrainingFailed as error:
                    print(f"  {error}", flush=True)
                    continue
                place = waiting[future]
                result = read_result(place)
                score = result["valid"][result["metric"]]
                where = f"{place.parents[1].name} at {place.parent.name}, {place.name}"
                print(f"  {where}: validation {result['metric']} {score:.3f}, {result['seconds']:.0f} s", flush=True)
        except BaseException:
            stopped.set()
            for child in multiprocessing.active_children():
                child.terminate()  # a run that is asked to end saves a checkpoint
            raise
