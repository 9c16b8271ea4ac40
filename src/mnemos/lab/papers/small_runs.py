"""Small models that claims train: on which data, how they are compared, and what few seeds can show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mnemos.errors import say
from mnemos.lab.compare import significance
from mnemos.lab.compare.compare import compare
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.tasks.images import find_mnist
from mnemos.lab.tasks.metrics import perplexity
from mnemos.types import InputError, JSONObject

from .findings import Finding, spread
from .reproduce import Options, OtherDataError


def task(options: Options) -> tuple[str, JSONObject]:
    """The small recipes that the options select ("digits", "mnist" or "cifar"), and changed fields of their data."""
    if options.data is None:
        return "digits", {}
    if not options.data.is_dir():
        raise InputError(
            f"--data {options.data}: expected a folder with CIFAR-10 or MNIST, found a file; give the folder"
        )
    for folder in (options.data, options.data / "mnist"):
        try:
            find_mnist(folder, "train")
        except InputError:
            continue
        return "mnist", {"path": str(folder)}
    return "cifar", {"folder": str(options.data)}


def digits_or_mnist(options: Options) -> tuple[str, JSONObject]:
    """`task` for claims of grey pictures: CIFAR-10 is refused."""
    name, fields = task(options)
    if name == "cifar":
        raise OtherDataError(
            f"--data {options.data}: expected a folder with MNIST, found no MNIST files; omit --data to use digits"
        )
    return name, fields


@dataclass(frozen=True)
class Trained:
    """Trained models of a table by the names of its rows.

    rows: of comparison.json; a baseline that the comparison added has its recipe's name. runs: a row's folders, one a
    seed. comparison: the whole of comparison.json.
    """

    rows: Mapping[str, JSONObject]
    runs: Mapping[str, list[Path]]
    comparison: JSONObject

    def results(self, name: str) -> list[Result]:
        return [Result.read(run) for run in self.runs[name]]

    def spread(self, name: str) -> significance.Spread:
        """The mean, the standard deviation and the number of a row's scores."""
        row = self.rows[name]
        std = math.nan if row["std"] is None else row["std"]
        return significance.Spread(row["mean"], std, row["seeds"])

    def emptied(self, name: str) -> str | None:
        """Text of a row's mean score with its caches emptied; None for a row without caches."""
        wanted = self.rows[name]["name"], "emptied"
        every = (one for one in self.comparison["controls"] if one["mean"] is not None)
        scores = (one for one in every if (one["name"], one["control"]) == wanted)
        return next((spread(one["mean"], one["std"]) for one in scores), None)

    def score(self, name: str, scale: float = 100.0, digits: int = 1) -> str:
        """Text of a row's mean score and its standard deviation over seeds."""
        return spread(self.rows[name]["mean"], self.rows[name]["std"], scale, digits)


def train(
    finding: Finding,
    options: Options,
    name: str,
    recipes: Mapping[str, Recipe],
    baselines: bool = False,
    seeds: int = 0,
) -> Trained:
    """Train a recipe for each row, unless it is trained; add the runs to `finding`, and what their seeds can show.

    The folder is options.out/runs/NAME-STEPS, with RECIPE/seed-N below it. seeds: 0 for those of the options.
    """
    if options.run is not None:  # claims that draw a run do not come here with one
        raise InputError("--run: expected a claim that draws one run, found one that compares several; leave it out")
    if 0 < seeds < options.seeds:
        say(f"  It draws one run: seed 0 alone is trained, of the {options.seeds} of --seeds", flush=True)
    plain = [replace(one, about="") for one in recipes.values()]  # they are not what the registered ones say
    folder = options.out / "runs" / f"{name}-{plain[0].train.steps}"
    seeds = seeds or options.seeds
    comparison = compare(plain, folder, seeds, of_claim=True, baselines=baselines, jobs=options.jobs)
    names = {recipe.name: row for row, recipe in recipes.items()}
    every = [row if row["mean"] is not None else row | {"mean": math.nan} for row in comparison["rows"]]
    rows = {names.get(row["name"], row["name"]): row for row in every}
    runs = {names.get(one, one): [folder / path for path in paths] for one, paths in comparison["runs"].items()}
    if (note := caution(seeds)) not in finding.notes:
        finding.notes.append(note)
    # Each once: two tables of a claim may have a row in common.
    finding.runs += [run for each in runs.values() for run in each if run not in finding.runs]
    return Trained(rows, runs, comparison)


def shortened(recipe: Recipe, options: Options, evaluations: int = 1) -> Recipe:
    """The recipe with the updates of the options, if they say so, and at least so many evaluations."""
    steps = options.steps or recipe.train.steps
    every = max(1, min(recipe.train.eval_every, steps // evaluations))
    return altered(recipe, train={"steps": steps, "eval_every": every})


def caution(seeds: int) -> str:
    """A note on what the number of seeds can show."""
    if seeds == 1:
        return "One seed: another may give another order. Use --seeds 5."
    return f"± is the standard deviation over {seeds} seeds."


def perplexities(trained: Trained) -> dict[str, list[float]]:
    """The test perplexity of each seed, by row."""
    return {name: [perplexity(one.score("loss")) for one in trained.results(name)] for name in trained.runs}


def perplexity_text(values: list[float], digits: int = 3) -> str:
    """Text of the mean and the standard deviation over seeds."""
    mean, std, _ = significance.spread(values)  # a seed that diverged has an infinite perplexity, and no deviation
    return spread(mean, None if math.isnan(std) else std, 1.0, digits)
