"""Compare recipes on the same data, seeds and data order: their scores, the spread over seeds, and their cost."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mnemos.atomic import check_output_folder, is_temporary
from mnemos.errors import plural, say
from mnemos.lab.run.checks import VALID_IS_TEST, unresolved
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe, as_json, differing
from mnemos.types import InputError, JSONObject

from .baselines import NEAR, parameters, roles_of, with_baselines, with_parameters, with_unwritten
from .budgets import FILE, Budget, budget_text
from .comparison import show, summarise
from .equal import PARAMETERS, UPDATES, check_equal, check_scored, completed, read_equal, scored_alike
from .runs import check_rates, train


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
    """Train every recipe with every seed in folder/RECIPE/seed-N; write and return folder/comparison.json
    (`Comparison`).

    The metric is the task's first, on the test split; costs are means over seeds. docs/compare.md explains the options.

    of_claim: print nothing; rows of other comparisons may be in the folder, because tables share trained models.
    unwritten: add the never-written baseline after each recipe with a gated cache or slots. baselines: add it, and one
    of equal parameters without the memory. equal: kinds of `equal.KINDS`; for "samples", "flops" or "time" the steps
    follow from a budget, that of the first recipe with its steps, or `minutes` of updates per run (`budgets`). rates:
    learning rates; each recipe is trained once with each and its first seed, in folder/RECIPE/RATE/seed-N, and the best
    on the validation split gets the other seeds and is reported, as "rate" and "rates": [[rate, score]] of its row.
    jobs: runs at a time, with one thread each if there are several. against: the row that the others are tested
    against, by default the first.

    Each run has its own process. An interrupted comparison continues where it stopped; the results of a finished one
    are read again. Raises InputError if the recipes differ in data or training settings (`check_equal`), or are scored
    on different rows (`check_scored`).
    """
    # --- the recipes, and that they can be compared ---
    for name, count in (("seeds", seeds), ("jobs", jobs)):
        if count < 1:
            raise InputError(f"--{name}: expected at least 1, found {count}; raise it")
    if rates:
        check_rates(rates)
        if any(one.data.valid_is_test for one in recipes):
            raise InputError(f"--rates: expected a validation split of its own to choose by, {VALID_IS_TEST}")
    folder, equal, told = Path(folder), read_equal(",".join(equal)), {one.about for one in recipes}
    budget = Budget(equal[0], minutes)
    recipes = _compared(recipes, budget, PARAMETERS in equal, baselines, unwritten)
    _check_folder(folder, [one.name for one in recipes], shared=of_claim)
    if against is not None and against not in (names := [one.name for one in recipes]):
        raise InputError(f"--against: expected one of {', '.join(names)}, found {against!r}; change it")
    if any(map(unresolved, recipes)):
        recipes = completed(recipes)
    check_scored(recipes)
    if jobs > 1:
        recipes = [replace(one, train=replace(one.train, threads=one.train.threads or 1)) for one in recipes]

    # --- what will be trained, and for how many steps ---
    folder.mkdir(parents=True, exist_ok=True)
    of_seeds = plural(seeds, "seed")
    if rates:
        of_seeds = f"{plural(len(rates), 'learning rate')}, then {of_seeds} of the best"
    runs = len(recipes) * (max(1, len(rates)) + seeds - 1)
    lines = [f"{plural(len(recipes), 'recipe')} × {of_seeds}: {plural(runs, 'run')}"]
    lines += [f"{one.name}: {one.about}" for one in recipes if one.about not in told]  # baselines, and those widened
    roles = roles_of(recipes)  # before each gets steps of its own
    if not of_claim:
        say("\n".join(lines), flush=True)
    recipes, spent = budget.apply(recipes, folder, jobs)
    if not of_claim and budget.kind != UPDATES:
        say(budget_text(spent))
        for name, one in spent["recipes"].items():
            say(f"  {name}: {one['update']:.4g} {spent['unit']} per update, {one['steps']:,} steps", flush=True)

    # --- the runs, and what came out ---
    trained = train(recipes, folder, seeds, rates, jobs, quiet=of_claim or jobs > 1, tell=not of_claim)
    comparison = summarise(trained.runs, folder, against, roles, trained.sweeps)
    made_equal = {key: value for key, value in spent.items() if key not in ("recipes", "provenance")}
    made_equal["parameters"] = PARAMETERS in equal
    early = [name for name, runs in trained.runs.items() if any(Result.read(run).stopped_early for run in runs)]
    comparison = replace(comparison, equal=made_equal | ({"early": early} if early else {}))
    comparison.write(folder)
    if not of_claim:
        rows = comparison.scored_rows.get("test", 0)
        if 0 < recipes[0].train.test_rows <= rows:  # fewer than wanted are all rows of the split
            say(f"scored: {rows:,} rows of the test split; --train.test-rows 0 scores all of it")
        show(comparison)
        say(folder)
    return comparison.as_json()


def _compared(
    recipes: list[Recipe], budget: Budget, of_equal_size: bool, baselines: bool, unwritten: bool
) -> list[Recipe]:
    """All recipes of a comparison: those that were named, widened to one size, with their baselines."""
    _check_names(recipes)
    check_equal(recipes, budget.kind)  # before the sizes of models are taken from the data
    recipes = scored_alike(recipes)
    if of_equal_size or baselines:
        recipes = completed(recipes)  # parameters depend on the sizes of the data
    if of_equal_size:
        first, *others = recipes
        recipes = [first, *(with_parameters(one, parameters(first.model), first.name) for one in others)]
    if baselines:
        recipes = with_baselines(recipes)
    elif unwritten:
        recipes = with_unwritten(recipes)
    if of_equal_size:  # baselines may not have as many
        wanted = parameters(recipes[0].model)
        for one in recipes[1:]:
            if abs((count := parameters(one.model)) / wanted - 1) > NEAR:
                raise InputError(
                    f"--equal parameters: expected {wanted:,} parameters as of {recipes[0].name}, within {NEAR:.0%}, "
                    f"found {count:,} of {one.name}; leave it out"
                )
    return recipes


def _check_names(recipes: list[Recipe]) -> None:
    names = [recipe.name for recipe in recipes]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        left, right = [as_json(recipe) for recipe in recipes if recipe.name == doubled][:2]
        difference = differing(left, right) or "nothing"
        raise InputError(
            f"compare: expected recipes with names of their own, found {', '.join(names)}: two called {doubled!r}, "
            f'which differ in {difference}; name each once, or change "name" in the file of one'
        )


def _check_folder(folder: Path, names: Sequence[str], shared: bool) -> None:
    """Raise InputError for a folder of something else. shared: rows of other comparisons may be in it."""
    check_output_folder(folder)
    own = {*names, "report.html", "look.html", "comparison.json", FILE}
    for path in sorted(folder.glob("[!.]*")):  # file managers leave hidden files behind
        if path.name not in own and not is_temporary(path) and not (shared and (path / "seed-0").is_dir()):
            raise InputError(
                f"{folder}: expected a new folder or this comparison, found {path.name!r} in it; name another with "
                "--out"
            )
