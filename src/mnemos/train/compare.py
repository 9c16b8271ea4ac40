"""Two recipes or more on the same data, seeds and order: which is better, by how much, and what it costs."""

import json
import multiprocessing
import os
import signal
import statistics
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from mnemos.atomic import write_json
from mnemos.config import from_dict, to_dict
from mnemos.types import InputError, JSONObject

from .checks import complete, unresolved
from .provenance import shared, trained
from .recipe import Recipe, RolloutConfig, TrainConfig, as_json
from .recipe import unwritten as never_written
from .stopping import Interrupted, TrainingFailed


def compare(
    recipes: list[Recipe], folder: str | Path, seeds: int = 1, quiet: bool = False, unwritten: bool = False
) -> JSONObject:
    """Train every recipe with every seed in folder/RECIPE/seed-N and write folder/comparison.json (returned).

    {"metric", "higher_is_better", "about", "majority", "rows": [{"name", "mean", "std" (of the sample; null for one
    seed), "seeds", "parameters", "flops", "seconds", "peak_bytes"}], "controls": [{"name", "control", "mean", "std",
    "seeds"}], "runs": {name: [folders]}, "provenance"}. The metric, of the test split, is the first of the task's, by
    which it is judged; "about" says what it counts. Seconds (in updates) and peak bytes are means over seeds.

    A row's "runs" say for each of its runs which commit trained it: [{"folder", "seed", "commit", "dirty"}]; a run that
    was finished before keeps the commit that it was trained with. See `provenance.shared` for "provenance".
    `unwritten` adds, after each recipe with a gated cache, its baseline whose cache is never written.

    Each run has a process of its own, so that none finds another's memory or threads; the seeds' rounds alternate
    between recipes, so that a machine that slows down slows all of them. A comparison that was interrupted goes on
    where it was; one that is finished is only read again. Raises InputError where the recipes cannot be compared: data
    and training must be equal, but for how an update reads its batches (`RolloutConfig`), which is a memory's own.
    """
    if seeds < 1:
        raise InputError(f"seeds must be at least 1, found {seeds}")
    folder = Path(folder)
    recipes = with_unwritten(recipes) if unwritten else recipes
    _check(recipes, folder)
    if any(map(unresolved, recipes)):
        task = recipes[0].data.build()
        recipes = [complete(recipe, task) for recipe in recipes]
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Path]] = {recipe.name: [] for recipe in recipes}
    for offset in range(seeds):
        for recipe in recipes:
            seed = recipe.train.seed + offset
            place = folder / recipe.name / f"seed-{seed}"
            _run(replace(recipe, train=replace(recipe.train, seed=seed)), place, quiet)
            runs[recipe.name].append(place)
    comparison = summarise(runs, folder)
    write_json(folder / "comparison.json", comparison)
    if not quiet:
        show(comparison)
        print(folder)
    return comparison


def with_unwritten(recipes: list[Recipe]) -> list[Recipe]:
    """The recipes, and after each with a gated cache its never-written baseline, where it is not given already."""
    names, found = {recipe.name for recipe in recipes}, []
    for recipe in recipes:
        baseline = never_written(recipe)
        found += [recipe] if baseline is None or baseline.name in names else [recipe, baseline]
    if all(never_written(recipe) is None for recipe in recipes):
        known = ", ".join(recipe.name for recipe in recipes)
        raise InputError(f"--unwritten expects a recipe with a written gated cache, found {known}; leave it out")
    return found


def _check(recipes: list[Recipe], folder: Path) -> None:
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names):
        raise InputError(f"compare takes different recipes, found {', '.join(names)}; name each once")
    first = recipes[0]
    for other in recipes[1:]:
        for part, equal in (("data", other.data == first.data), ("train", _train(other) == _train(first))):
            if not equal:
                raise InputError(
                    f"{first.name} and {other.name} differ in {part}: nothing could be told from comparing them; "
                    f"make them equal with --{part}.FIELD"
                )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: expected a folder for the comparison, found a file; name another with --out")
    stray = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    stray = [name for name in stray if name not in {*names, "comparison.json", "comparison.json.tmp", "report.html"}]
    if stray:
        raise InputError(f"{folder}: expected a new folder or this comparison, found {stray[0]!r} in it; name another")


def _train(recipe: Recipe) -> TrainConfig:
    """What runs must have in common: not how an update reads its rows, but how many batches it reads."""
    return replace(recipe.train, rollout=RolloutConfig(segments=recipe.train.rollout.segments))


def _run(recipe: Recipe, place: Path, quiet: bool) -> None:
    """Run one recipe to its end in a separate process. A finished run is not repeated."""
    done = (place / "result.json").is_file() and "flops" in json.loads((place / "result.json").read_text())
    resume = (place / "recipe.json").is_file()
    if resume and json.loads((place / "recipe.json").read_text()) != as_json(recipe):
        raise InputError(
            f"{place}: a run of another recipe is here; name another folder with --out, or remove this one"
        )
    if done:
        return
    child = multiprocessing.get_context("spawn").Process(
        target=_child, args=(to_dict(recipe), str(place), resume, quiet)
    )
    if _join(child):
        raise Interrupted(f"{place}: interrupted; the same command goes on from what is saved there")
    if child.exitcode == 2:
        raise InputError(f"{place}: could not be run; see the line above")
    if child.exitcode:
        raise TrainingFailed(f"{place}: failed with exit code {child.exitcode}; see the lines above")


def _join(child: Any) -> bool:
    """Start a process and wait for its end; SIGINT and SIGTERM are passed on to it. Whether there was one."""
    if threading.current_thread() is not threading.main_thread():  # where signals are never heard
        child.start()
        child.join()
        return child.exitcode == 130
    asked = []

    def pass_on(*_: Any) -> None:
        asked.append(True)
        if child.pid is not None:
            child.terminate()

    # The child starts with SIGINT ignored, so that a Ctrl-C, which a terminal sends to both, does not meet it before
    # it can save; SIGTERM, which it is sent from here, ends it at once until then, and makes it save afterwards.
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        signal.signal(signal.SIGTERM, pass_on)
        child.start()
        signal.signal(signal.SIGINT, pass_on)
        if asked:
            child.terminate()
        child.join()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    return bool(asked) or child.exitcode == 130


def _child(recipe: JSONObject, place: str, resume: bool, quiet: bool) -> None:
    from .session import run

    # The child ends with its parent, however the parent ends.
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        run(from_dict(Recipe, recipe), Path(place), resume=resume, quiet=quiet)
    except (InputError, TrainingFailed, Interrupted) as error:
        print(f"mnemos: {error}", file=sys.stderr)
        raise SystemExit({InputError: 2, TrainingFailed: 1, Interrupted: 130}[type(error)]) from None


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def summarise(runs: dict[str, list[Path]], folder: Path) -> JSONObject:
    """What comparison.json says of finished runs."""
    rows, controls = [], []
    first = json.loads((next(iter(runs.values()))[0] / "result.json").read_text())
    metric, described = first["metric"], first["metrics"][first["metric"]]
    for name, places in runs.items():
        results = [json.loads((place / "result.json").read_text()) for place in places]
        spread = _spread([result["test"][metric] for result in results])
        cost = {key: results[0][key] for key in ("parameters", "flops")}
        cost |= {key: statistics.fmean(result[key] for result in results) for key in ("seconds", "peak_bytes")}
        commits = [trained(place, str(place.relative_to(folder))) for place in places]
        rows.append({"name": name, **spread, **cost, "runs": commits})
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


def show(comparison: JSONObject) -> None:
    """Print a comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    def score(row: JSONObject) -> str:
        spread = "" if row["std"] is None else f" ± {row['std']:.4f}"
        return f"{row['mean']:.4f}{spread}"

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", comparison["metric"], "seeds", "parameters", "MFLOP/sample", "seconds", "peak MiB"):
        table.add_column(column, justify="left" if not column else "right")
    for row in comparison["rows"]:
        costs = (f"{row['flops'] / 1e6:.2f}", f"{row['seconds']:.1f}", f"{row['peak_bytes'] / 2**20:.0f}")
        table.add_row(row["name"], score(row), str(row["seeds"]), f"{row['parameters']:,}", *costs)
        for control in comparison["controls"]:
            if control["name"] == row["name"]:
                table.add_row(f"  cache {control['control']}", score(control), str(control["seeds"]))
    if comparison["majority"] is not None:
        table.add_row("majority class", f"{comparison['majority']:.4f}")
    # Wide enough for its columns even where the output is a file, which has no width.
    Console(width=max(100, Console().width)).print(table)
