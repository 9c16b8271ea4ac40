"""Compare recipes on the same data, seeds and data order: their scores, the spread over seeds, and their cost."""

from dataclasses import replace
from pathlib import Path

from mnemos.atomic import write_json
from mnemos.types import InputError, JSONObject

from .apart import train_apart
from .baselines import with_baselines, with_unwritten
from .checks import complete, unresolved
from .comparison import summarise
from .comparison_table import show
from .recipe import Recipe, RolloutConfig, TrainConfig, as_json
from .run import differing


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
