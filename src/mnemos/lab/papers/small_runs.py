"""Small models that claims train: on which data, how they are compared, and what few seeds can show."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from mnemos.lab.compare.compare import compare
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.tasks.images import find_mnist
from mnemos.lab.tasks.metrics import perplexity
from mnemos.types import InputError, JSONObject

from .claim import Values
from .findings import Finding, spread
from .reproduce import Options


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


def train_and_compare(
    options: Options, name: str, recipes: Sequence[Recipe], baselines: bool = False, seeds: int = 0
) -> JSONObject:
    """Train the recipes in a folder of options.out/runs, unless they are trained.

    seeds: 0 for those of the options. Returns the contents of comparison.json, and its folder as "folder".
    """
    folder = options.out / "runs" / f"{name}-{recipes[0].train.steps}"
    recipes = [replace(one, about="") for one in recipes]  # they are not what the registered ones say of themselves
    found = compare(recipes, folder, seeds or options.seeds, of_claim=True, baselines=baselines)
    return {**found, "folder": folder}


def runs(comparison: JSONObject) -> list[Path]:
    """The folders of all runs of a comparison."""
    return [comparison["folder"] / place for each in comparison["runs"].values() for place in each]


def runs_of(comparison: JSONObject, recipe: Recipe) -> list[Path]:
    """The folders of a recipe's runs, one a seed."""
    return [comparison["folder"] / place for place in comparison["runs"][recipe.name]]


def write_report(comparison: JSONObject) -> Path:
    """Write the page of a comparison into its folder; returns its path."""
    from mnemos.lab.report import report  # what only names recipes needs no report

    folder: Path = comparison["folder"]
    return report([folder], folder / "report.html")


def caution(options: Options) -> str:
    """A note on what the number of seeds can show."""
    if options.seeds == 1:
        return "One seed: another may give another order. Use --seeds 5."
    return f"± is the standard deviation over {options.seeds} seeds."


@dataclass(frozen=True)
class Trained:
    """Trained models of a table: rows of the comparison by the paper's names, and one perplexity per seed."""

    rows: Mapping[str, JSONObject]
    perplexities: Mapping[str, list[float]]

    def perplexity(self, name: str, digits: int = 3) -> str:
        """Text of the mean and the standard deviation over seeds, with so many decimals."""
        found = self.perplexities[name]
        return spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, 1.0, digits)

    def order(self, theirs: Values, column: int) -> str:
        """A sentence: the models from best to worst, and how many pairs of rows have the same order in the paper."""
        ours = {name: statistics.fmean(found) for name, found in self.perplexities.items()}
        ours = {name: mean for name, mean in ours.items() if math.isfinite(mean)}
        known = [name for name in ours if name in theirs]
        pairs = [(a, b) for a, b in combinations(known, 2) if theirs[a][column] != theirs[b][column]]
        same = sum((ours[a] < ours[b]) == (theirs[a][column] < theirs[b][column]) for a, b in pairs)
        ranked = "; ".join(sorted(ours, key=ours.__getitem__))
        return f"From best to worst: {ranked}. {same} of {len(pairs)} pairs have the same order as in the paper."


def train_language_models(found: Finding, options: Options, name: str, recipes: Mapping[str, Recipe]) -> Trained:
    """Train the recipes of a table by its rows' names; add runs, report and note to `found`."""
    shortened = {row: _shortened(recipe, options) for row, recipe in recipes.items()}
    comparison = train_and_compare(options, name, list(shortened.values()))
    found.runs += runs(comparison)
    found.files.append(write_report(comparison))
    found.notes.append(caution(options))
    return Trained(
        dict(zip(recipes, comparison["rows"], strict=True)),
        {
            row: [perplexity(Result.read(run).score("loss")) for run in runs_of(comparison, recipe)]
            for row, recipe in shortened.items()
        },
    )


def _shortened(recipe: Recipe, options: Options) -> Recipe:
    steps = options.steps or recipe.train.steps
    return replace(recipe, train=replace(recipe.train, steps=steps, eval_every=min(recipe.train.eval_every, steps)))


def shape(recipe: Recipe) -> str:
    """A description of the small model, such as "2+4 layers, 4 slots"."""
    model: Any = recipe.model
    if model.name == "memformer":
        return f"{model.encoder_layers}+{model.decoder_layers} layers, {model.memory.slots} slots"
    attention = getattr(model, "attention", None)
    sizes = {name: getattr(attention, name, None) for name in ("memory", "compressed")}
    return ", ".join([f"{model.layers} layers", *(f"{name} {n}" for name, n in sizes.items() if n is not None)])
