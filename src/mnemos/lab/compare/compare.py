"""Compare recipes on the same data, seeds and data order: their scores, the spread over seeds, and their cost."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mnemos.atomic import is_temporary
from mnemos.errors import say
from mnemos.lab.errors import TrainingFailed
from mnemos.lab.run.checks import unresolved
from mnemos.lab.run.recipe import Recipe, as_json, differing
from mnemos.types import InputError, JSONObject

from .baselines import roles_of, widths_text, with_baselines, with_unwritten
from .budgets import FILE, Budget, budget_lines
from .comparison import show, summarise
from .equal import (
    PARAMETERS,
    UPDATES,
    check_equal,
    check_parameters,
    check_scored,
    completed,
    of_equal_parameters,
    read_equal,
    scored_alike,
)
from .rates import Sweep, at_best_rates, check_rates, end_warning, sweep, with_seed
from .runs import Planned, RunsLeft, train_several


def compare(
    recipes: list[Recipe],
    folder: str | Path,
    seeds: int = 1,
    of_claim: bool = False,
    unwritten: bool = False,
    baselines: bool = False,
    equal: Sequence[str] = (UPDATES,),
    minutes: float | None = None,
    rates: Sequence[float] = (),
    jobs: int = 1,
    against: str | None = None,
) -> JSONObject:
    """Train every recipe with every seed in folder/RECIPE/seed-N; write and return folder/comparison.json.

    The file is described by `comparison.Comparison`. The metric is the task's first, on the test split. Costs are means
    over seeds. A run that was finished earlier keeps its commit.

    of_claim: print nothing; rows of other comparisons may be in the folder, because tables share trained models.
    unwritten: add the never-written baseline after each recipe with a gated cache or slots. baselines: add it, and one
    of equal parameters without the memory (`baselines.with_baselines`). A line for each says whose baseline it is.
    equal: kinds of `equal.KINDS`. "updates": of equal batches. "samples", "flops" or "time": the steps of each recipe
    follow from a budget, that of the first recipe with its steps, or `minutes` of updates per run (`budgets`).
    "parameters", alone or beside one of these: MLPs get the widths that give all recipes as many as the first.
    rates: learning rates. Each recipe is trained once with each and its first seed, in folder/RECIPE/RATE/seed-N; only
    the rate with the best score on the validation split gets the other seeds and is reported, as "rate" and "rates":
    [[rate, score]] of its row.
    jobs: runs at a time, with one thread each if there are several; a run that was begun keeps its threads. against:
    the row that the others are tested against, by default the first recipe (`significance`).

    Each run has its own process, so runs do not share memory or threads. Runs alternate between recipes, seed by seed,
    so a machine that becomes slower affects all recipes. An interrupted comparison continues where it stopped; the
    results of a finished one are read again. Raises InputError if the recipes differ in data or training settings
    (`check_equal`), or are scored on different targets (`check_scored`).
    """
    for name, count in (("seeds", seeds), ("jobs", jobs)):
        if count < 1:
            raise InputError(f"--{name}: expected at least 1, found {count}; raise it")
    if rates:
        check_rates(rates)
    equal = read_equal(",".join(equal))
    folder, given, budget = Path(folder), recipes, Budget(equal[0], minutes)
    _check_names(recipes)
    check_equal(recipes, budget.kind)  # before the sizes of models are taken from the data
    recipes = _with_models(scored_alike(recipes), unwritten, baselines, PARAMETERS in equal)
    _check(recipes, folder, budget.kind, of_claim)
    if against is not None and against not in (names := [one.name for one in recipes]):
        raise InputError(f"--against: expected one of {', '.join(names)}, found {against!r}; change it")
    if any(map(unresolved, recipes)):
        recipes = completed(recipes)
    check_scored(recipes)
    if jobs > 1:
        recipes = [replace(one, train=replace(one.train, threads=one.train.threads or 1)) for one in recipes]
    folder.mkdir(parents=True, exist_ok=True)
    tell = _silent if of_claim else _print
    tell(_describe_count(len(recipes), seeds, len(rates)))
    for recipe in recipes:
        if (line := _describe_change(recipe, given)) is not None:
            tell(f"{recipe.name}: {line}")
        if (line := differing(as_json(recipe.data), as_json(recipes[0].data), "data")) is not None:
            tell(f"{recipe.name}: other data settings than {recipes[0].name}: {line}")
    roles = roles_of(recipes)  # before each gets steps of its own
    recipes, spent = budget.apply(recipes, folder, jobs)
    for line in budget_lines(spent):
        tell(line)
    left = RunsLeft([one.name for one in recipes] * (max(1, len(rates)) + seeds - 1), jobs)
    planned, chosen = _plan(recipes, folder, seeds, rates, jobs, left, tell)
    others = planned[len(recipes) :] if rates else planned  # the first seeds are of the sweep
    train_several(others, jobs, quiet=of_claim or jobs > 1, tell=not of_claim, left=left)
    runs: dict[str, list[Path]] = {recipe.name: [] for recipe in recipes}
    for recipe, place in planned:
        runs[recipe.name].append(place)
    comparison = summarise(runs, folder, against, roles)
    swept = [
        replace(row, rate=one.best, rates=tuple(one.scores.items())) if (one := chosen.get(row.name)) else row
        for row in comparison.rows
    ]
    made_equal = _without_recipes(spent) | {"parameters": PARAMETERS in equal}
    comparison = replace(comparison, rows=tuple(swept), equal=made_equal)
    comparison.write(folder)
    if not of_claim:
        if recipes[0].train.test_rows and (rows := comparison.scored_rows.get("test")):
            say(f"scored: {rows:,} rows of the test split; --train.test-rows 0 scores all of it")
        show(comparison)
        say(folder)
    return comparison.as_json()


def _print(line: str) -> None:
    say(line, flush=True)


def _silent(line: str) -> None:
    """Print nothing."""


def _with_models(recipes: list[Recipe], unwritten: bool, baselines: bool, parameters: bool) -> list[Recipe]:
    """The recipes with equal parameters and with their baselines, where they are wanted."""
    if parameters:
        recipes = of_equal_parameters(completed(recipes))
    if baselines:
        recipes = with_baselines(completed(recipes))
    elif unwritten:
        recipes = with_unwritten(recipes)
    if parameters:
        check_parameters(recipes)
    return recipes


def _describe_count(recipes: int, seeds: int, rates: int) -> str:
    """How many runs there will be."""
    of_seeds = f"{seeds} seed{'s' * (seeds > 1)}"
    if not rates:
        return f"{recipes} recipes × {of_seeds}: {recipes * seeds} runs"
    runs = recipes * (rates + seeds - 1)
    return f"{recipes} recipes × {rates} learning rate{'s' * (rates > 1)}, then {of_seeds} of the best: {runs} runs"


def _describe_change(recipe: Recipe, given: Sequence[Recipe]) -> str | None:
    """What a recipe is that was not given, or how it differs from the one that was; None if it does not."""
    before = next((one for one in given if one.name == recipe.name), None)
    return recipe.about if before is None else widths_text(before.model, recipe.model)


def _plan(
    recipes: list[Recipe],
    folder: Path,
    seeds: int,
    rates: Sequence[float],
    jobs: int,
    left: RunsLeft,
    tell: Callable[[str], None],
) -> tuple[list[Planned], dict[str, Sweep]]:
    """The runs that are reported, seed by seed, and the sweeps of learning rates that chose them."""
    if not rates:
        own = [with_seed(one, one.train.seed + offset) for offset in range(seeds) for one in recipes]
        return [(run, folder / run.name / f"seed-{run.train.seed}") for run in own], {}
    sweeps = sweep(recipes, rates, folder, jobs, left, tell=tell is _print)
    if failed := next((name for name, one in sweeps.items() if one.best is None), None):
        raise TrainingFailed(f"{folder / failed}: the run failed with every learning rate; give other --rates")
    for name, one in sweeps.items():
        tell(f"{name}: learning rate {one.best:.1e}, the best of {len(rates)} on the validation split")
    if (warning := end_warning(sweeps)) is not None:
        say(f"mnemos: warning: {warning}", file=sys.stderr, flush=True)
    return at_best_rates(recipes, sweeps, seeds, folder), sweeps


def _without_recipes(spent: JSONObject) -> JSONObject:
    """What a budget has about the whole comparison; budget.json has the recipes and their measurements too."""
    return {key: value for key, value in spent.items() if key not in ("recipes", "provenance")}


def _check_names(recipes: list[Recipe]) -> None:
    """Raise InputError for recipes of one name."""
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


def _check(recipes: list[Recipe], folder: Path, budget: str, shared: bool) -> None:
    """Raise InputError for recipes that cannot be compared, and for a folder of something else.

    shared: rows of other comparisons may be in the folder.
    """
    _check_names(recipes)
    check_equal(recipes, budget)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: expected a folder for the comparison, found a file; name a folder with --out")
    stray = sorted(p.name for p in folder.iterdir() if not is_temporary(p)) if folder.is_dir() else []
    own = {
        *(recipe.name for recipe in recipes),
        "report.html",
        "comparison.json",
        FILE,
    }
    stray = [name for name in stray if name not in own and not (shared and (folder / name / "seed-0").is_dir())]
    if stray:
        raise InputError(
            f"{folder}: expected a new folder or this comparison, found {stray[0]!r} in it; name another with --out"
        )
