"""Small language models that are compared by perplexity: shared by the tables of the papers that have them."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from mnemos.lab.compare.compare import compare
from mnemos.lab.report import report
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.tasks.metrics import perplexity
from mnemos.types import JSONObject

from .claim import Values
from .findings import Finding, spread
from .reproduce import Options
from .small_runs import caution, runs


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
        known = [name for name in ours if name in theirs]
        pairs = [(a, b) for a, b in combinations(known, 2) if theirs[a][column] != theirs[b][column]]
        same = sum((ours[a] < ours[b]) == (theirs[a][column] < theirs[b][column]) for a, b in pairs)
        ranked = "; ".join(sorted(ours, key=ours.__getitem__))
        return f"From best to worst: {ranked}. {same} of {len(pairs)} pairs have the same order as in the paper."


def train(found: Finding, options: Options, name: str, recipes: Mapping[str, Recipe]) -> Trained:
    """Train the recipes in options.out/runs, unless they are trained, and add runs, report and note to `found`."""
    recipes = {row: _prepared(recipe, options) for row, recipe in recipes.items()}
    folder = options.out / "runs" / f"{name}-{next(iter(recipes.values())).train.steps}"
    comparison = {**compare(list(recipes.values()), folder, options.seeds, quiet=True), "folder": folder}
    found.runs += runs(comparison)
    found.files.append(report([folder], folder / "report.html"))
    found.notes.append(caution(options, data=False))
    losses = {
        row: [_loss(folder / place) for place in comparison["runs"][recipe.name]] for row, recipe in recipes.items()
    }
    return Trained(
        dict(zip(recipes, comparison["rows"], strict=True)),
        {row: [perplexity(loss) for loss in each] for row, each in losses.items()},
    )


def shape(recipe: Recipe) -> str:
    """A description of the small model, such as "2+4 layers, 4 slots"."""
    model: Any = recipe.model
    if model.name == "memformer":
        return f"{model.encoder_layers}+{model.decoder_layers} layers, {model.memory.slots} slots"
    attention = getattr(model, "attention", None)
    sizes = {name: getattr(attention, name, None) for name in ("memory", "compressed")}
    return ", ".join([f"{model.layers} layers", *(f"{name} {n}" for name, n in sizes.items() if n is not None)])


def _prepared(recipe: Recipe, options: Options) -> Recipe:
    steps = options.steps or recipe.train.steps
    return replace(recipe, train=replace(recipe.train, steps=steps, eval_every=min(recipe.train.eval_every, steps)))


def _loss(place: Path) -> float:
    result = json.loads((place / "result.json").read_text())
    return float(result["test"]["loss"])
