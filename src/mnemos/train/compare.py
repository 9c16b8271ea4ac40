"""Compare recipes on the same data, seeds and data order: their scores, the spread over seeds, and their cost."""

import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from mnemos.atomic import write_json
from mnemos.config import from_dict, to_dict
from mnemos.data.metrics import description
from mnemos.errors import one_line
from mnemos.types import InputError, JSONObject

from .baselines import with_baselines, with_unwritten
from .checks import complete, unresolved
from .provenance import shared, trained
from .recipe import Recipe, RolloutConfig, TrainConfig, as_json, as_written
from .run import differing
from .run_files import COMPARED, read_object, read_result
from .stopping import Interrupted, TrainingFailed


def compare(
    recipes: list[Recipe],
    folder: str | Path,
    seeds: int = 1,
    quiet: bool = False,
    unwritten: bool = False,
    baselines: bool = False,
) -> JSONObject:
    """Train every recipe with every seed in folder/RECIPE/seed-N; write and return folder/comparison.json.

    Result: {"metric", "higher_is_better", "about", "majority", "rows": [{"name", "mean", "std" (of the sample; null for
    one seed), "seeds", "parameters", "flops", "state_bytes" (null in results of older versions), "seconds",
    "peak_bytes", "runs"}], "controls": [{"name", "control", "mean", "std", "seeds"}], "runs": {name: [folders]},
    "provenance" (`provenance.shared`)}. The metric is the task's first, on the test split; "about" explains it.
    "seconds" (of updates) and "peak_bytes" are means over seeds. A row's "runs" give the commit that trained each run:
    [{"folder", "seed", "commit", "dirty"}]. A run that was finished earlier keeps its commit.
    A row of a task that measures a metric along an axis (`figures.along`) has "along": {"metric", "x", "values": [{"x",
    "mean", "std", "seeds"}]} too.
    unwritten: add the never-written baseline after each recipe with a gated cache or slots. baselines: add it, and one
    of equal parameters without the memory (`baselines.with_baselines`). A line for each says whose baseline it is.

    Each run has its own process, so runs do not share memory or threads. Runs alternate between recipes, seed by seed,
    so a machine that becomes slower affects all recipes. An interrupted comparison continues where it stopped; the
    results of a finished one are read again. Raises InputError if the recipes differ in data or training settings;
    only `RolloutConfig` may differ, because it belongs to the memory.
    """
    if seeds < 1:
        raise InputError(f"--seeds: expected at least 1, found {seeds}; raise it")
    folder = Path(folder)
    given = {recipe.name for recipe in recipes}
    if baselines:
        _check_equal(recipes)  # as the sizes of all models are taken from the data of the first recipe
        recipes = with_baselines(_completed(recipes))
    elif unwritten:
        recipes = with_unwritten(recipes)
    _check(recipes, folder)
    if any(map(unresolved, recipes)):
        recipes = _completed(recipes)
    folder.mkdir(parents=True, exist_ok=True)
    if not quiet:
        print(f"{len(recipes)} recipes × {seeds} seed{'s' * (seeds > 1)}: {len(recipes) * seeds} runs", flush=True)
        for recipe in recipes:
            if recipe.name not in given:
                print(f"{recipe.name}: {recipe.about}", flush=True)
    runs: dict[str, list[Path]] = {recipe.name: [] for recipe in recipes}
    for offset in range(seeds):
        for recipe in recipes:
            seed = recipe.train.seed + offset
            place = folder / recipe.name / f"seed-{seed}"
            train_apart(replace(recipe, train=replace(recipe.train, seed=seed)), place, quiet)
            runs[recipe.name].append(place)
    comparison = summarise(runs, folder)
    write_json(folder / "comparison.json", comparison)
    if not quiet:
        show(comparison)
        print(folder)
    return comparison


def _completed(recipes: list[Recipe]) -> list[Recipe]:
    """The recipes with the sizes of their data, which are closed again before the runs start."""
    task = recipes[0].data.build()
    try:
        return [complete(recipe, task) for recipe in recipes]
    finally:
        task.close()


def _check_equal(recipes: list[Recipe]) -> None:
    """Raise InputError for recipes that differ in data or training settings."""
    first = recipes[0]
    for other in recipes[1:]:
        for part, equal in (("data", other.data == first.data), ("train", _train(other) == _train(first))):
            if not equal:
                raise InputError(
                    f"compare: expected recipes with equal {part} settings, found that {first.name} and {other.name} "
                    f"differ; make them equal with --{part}.FIELD"
                )


def _check(recipes: list[Recipe], folder: Path) -> None:
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        doubled = next(name for name in names if names.count(name) > 1)
        left, right = [as_json(recipe) for recipe in recipes if recipe.name == doubled][:2]
        if difference := differing(left, right):
            raise InputError(
                f"compare: expected a name of its own for each recipe, found two called {doubled!r}, which differ in "
                f'{difference}; change "name" in the file of one'
            )
        raise InputError(f"compare: expected different recipes, found {', '.join(names)}; name each recipe once")
    _check_equal(recipes)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: expected a folder for the comparison, found a file; name a folder with --out")
    stray = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    stray = [name for name in stray if name not in {*names, "comparison.json", "comparison.json.tmp", "report.html"}]
    if stray:
        raise InputError(
            f"{folder}: expected a new folder or this comparison, found {stray[0]!r} in it; name another with --out"
        )


def _train(recipe: Recipe) -> TrainConfig:
    """The training settings that must be equal: all except the rollout, but including its number of new batches."""
    return replace(recipe.train, rollout=RolloutConfig(segments=recipe.train.rollout.stride))


def train_apart(recipe: Recipe, place: Path, quiet: bool = False) -> None:
    """Train one recipe in a separate process, in the folder `place`, or continue it there. A finished run is read only.

    Raises InputError if the folder has a run of another recipe or the run cannot start, TrainingFailed if it fails, and
    `Interrupted` after Ctrl-C, when the run has saved. Only a call from the main thread handles signals.
    """
    done = (place / "result.json").is_file() and "flops" in read_result(place)
    resume = (place / "recipe.json").is_file()
    if resume and as_written(read_object(place / "recipe.json")) != as_json(recipe):
        raise InputError(
            f"{place}: expected a run of this recipe, found one of another recipe; name another folder with --out, or "
            "remove this one"
        )
    if done:
        return
    child = multiprocessing.get_context("spawn").Process(
        target=_child, args=(to_dict(recipe), str(place), resume, quiet)
    )
    if _join(child):
        raise Interrupted(f"{place}: interrupted; the same command continues from the last checkpoint")
    if child.exitcode == 2:
        raise InputError(f"{place}: the run could not start; the line above gives the reason")
    if child.exitcode:
        raise TrainingFailed(
            f"{place}: the run failed with exit code {child.exitcode}; the lines above give the reason"
        )


def _join(child: BaseProcess) -> bool:
    """Start a process and wait for its end, passing SIGINT and SIGTERM on. Returns whether it was interrupted."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        # A terminal sends Ctrl-C to the child too. Its SIGINT stays blocked, so that Ctrl-C cannot end it with a
        # traceback while it starts up: it ends by the caller's SIGTERM, or by its own when the parent has ended.
        multiprocessing.resource_tracker.ensure_running()  # a first start of it unblocks SIGINT
        before_start = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before_start)
        child.join()
        return child.exitcode == 130
    signalled = []

    def pass_on(*_: object) -> None:
        signalled.append(True)
        if child.pid is not None:
            child.terminate()

    # A terminal sends Ctrl-C to parent and child. The child starts with SIGINT ignored, so that Ctrl-C cannot end it
    # before it is able to save. The SIGTERM that the parent sends ends the child at once while it starts up, and makes
    # it save later on.
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        signal.signal(signal.SIGTERM, pass_on)
        child.start()
        signal.signal(signal.SIGINT, pass_on)
        if signalled:
            child.terminate()
        child.join()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    return bool(signalled) or child.exitcode == 130


def _child(recipe: JSONObject, place: str, resume: bool, quiet: bool) -> None:
    from .session import run

    # The child must not train on after its parent was killed.
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        run(from_dict(Recipe, recipe), Path(place), resume=resume, quiet=quiet)
    except (InputError, TrainingFailed, Interrupted) as error:
        print(f"mnemos: {error}", file=sys.stderr)
        raise SystemExit({InputError: 2, TrainingFailed: 1, Interrupted: 130}[type(error)]) from None
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        print(f"mnemos: {line}", file=sys.stderr)
        raise SystemExit(1) from None


def _stop_with_parent() -> None:
    """Wait for the parent process to end, then stop this process with SIGTERM."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def summarise(runs: dict[str, list[Path]], folder: Path) -> JSONObject:
    """The content of comparison.json for finished runs: {name: run folders}."""
    rows, controls = [], []
    place = next(iter(runs.values()))[0]
    first = read_result(place, COMPARED)
    metric = first["metric"]
    described = description(first, metric, str(place / "result.json"))
    for name, places in runs.items():
        results = [read_result(place, COMPARED) for place in places]
        spread = _spread([result["test"][metric] for result in results])
        cost = {key: results[0].get(key) for key in ("parameters", "flops", "state_bytes")}
        cost |= {key: statistics.fmean(result[key] for result in results) for key in ("seconds", "peak_bytes")}
        commits = [trained(place, str(place.relative_to(folder))) for place in places]
        rows.append({"name": name, **spread, **cost, **_along(results), "runs": commits})
        for control in results[0].get("controls", {}):
            found = [result["controls"][control][metric] for result in results]
            controls.append({"name": name, "control": control, **_spread(found)})
    return {
        "metric": metric,
        "higher_is_better": described["higher_is_better"],
        "about": described["about"],
        "majority": first["majority"],
        "rows": rows,
        "controls": controls,
        "runs": {name: [str(place.relative_to(folder)) for place in places] for name, places in runs.items()},
        "provenance": shared([place for places in runs.values() for place in places]),
    }


def _spread(values: list[float]) -> JSONObject:
    std = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": std, "seeds": len(values)}


def _along(results: Sequence[JSONObject]) -> JSONObject:
    """{"along": the metric along an axis of the task, mean and spread over the seeds}; {} if no run measured one."""
    found = [result["along"] for result in results if "along" in result]
    if not found:
        return {}
    by_place: dict[float, list[float]] = {}
    for at, value in (pair for one in found for pair in one["values"]):
        by_place.setdefault(at, []).append(value)
    values = [{"x": at, **_spread(by_place[at])} for at in sorted(by_place)]
    return {"along": {"metric": found[0].get("metric"), "x": found[0].get("x"), "values": values}}


def show(comparison: JSONObject) -> None:
    """Print a comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    def score(row: JSONObject) -> str:
        spread = "" if row["std"] is None else f" ± {row['std']:.4f}"
        return f"{row['mean']:.4f}{spread}"

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", comparison["metric"], "seeds", "parameters", "MFLOP/sample", "state KiB", "seconds", "peak MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for row in comparison["rows"]:
        state = "–" if row["state_bytes"] is None else f"{row['state_bytes'] / 2**10:,.1f}"
        costs = (f"{row['flops'] / 1e6:.2f}", state, f"{row['seconds']:.1f}", f"{row['peak_bytes'] / 2**20:.0f}")
        table.add_row(row["name"], score(row), str(row["seeds"]), f"{row['parameters']:,}", *costs)
        for control in comparison["controls"]:
            if control["name"] == row["name"]:
                table.add_row(f"  cache {control['control']}", score(control), str(control["seeds"]))
    if comparison["majority"] is not None:
        table.add_row("majority class", f"{comparison['majority']:.4f}")
    # A file has no width; this one is enough for all columns.
    console = Console(width=max(100, Console().width))
    console.print(table)
    rows = [row for row in comparison["rows"] if row.get("along")]
    if rows:
        first = rows[0]["along"]
        reach = Table(box=None, pad_edge=False, header_style="bold", title=f"{first['metric']} by {first['x']}")
        reach.add_column("")
        for one in first["values"]:
            reach.add_column(f"{one['x']:g}", justify="right")
        for row in rows:
            reach.add_row(row["name"], *(score(one) for one in row["along"]["values"]))
        console.print(reach)
