"""A gated cache on CIFAR-10 pictures beside four controls: test accuracy, and the gap to accuracy on training pictures.

The host is timm's vision transformer, 3 layers of width 64 over 16 patches of 8 x 8 pixels: with smaller patches an
update costs twice as much, and fewer of them leave the model less trained. 5,000 updates of 64 pictures are seven
epochs. The cache has the settings of the paper and mixes the heads one by one before the host's projection (eq. 2), so
that each attention with it is the paper's layer. Nothing is augmented: the paper explains its gain by a regularisation
across samples, which has more to do the sooner a model learns its pictures by heart.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mnemos.lab.compare.baselines import equal_parameters
from mnemos.lab.compare.equal import completed
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.trained import open_run

from ..claim import Claim
from ..experiments import Measure, add_tables, differences_table, train_arms
from ..findings import Finding
from ..reproduce import Options
from ..small_runs import caution, runs_of, task
from .comparisons import ATTENTION, CONTROLS, PAPER, PLAIN, recipe

STEPS, PATCH = 5000, 8
CACHED, NONE, EQUAL, CONSTANT, KEYS = "cached", "no cache", "equal parameters", "constant cache", "keys and values"
BATCHES, BATCH = 20, 250  # of training pictures that are scored for the gap
ORDER = 1000  # the seed of their order, which no run has


def experiment(claim: Claim, options: Options) -> Finding:
    """Train the five arms with the seeds of the options; tables of accuracy, of gaps, and their differences."""
    found = Finding()
    if options.recipes_only:
        return Finding([], ["Six seeds: --data CIFAR --seeds 6."])
    made = arms(options)
    comparison = train_arms(found, options, f"experiment-{task(options)[0]}", made)
    gaps = {name: [_gap(run) for run in runs_of(comparison, one)] for name, one in made.items()}
    none, keys, cached = claim.values["ViT-S"]
    # The paper has no model of equal parameters and no constant: for these the effect is its gain over no cache.
    controls = {NONE: cached - none, EQUAL: cached - none, CONSTANT: cached - none, KEYS: cached - keys}
    measure = Measure("test accuracy, %", _accuracy, higher_is_better=True)
    add_tables(found, made, comparison, measure, controls, {"gap, points": gaps})
    gap_controls: Mapping[str, float | None] = dict.fromkeys(controls)
    found.tables.append(differences_table(gaps, "gap, points", False, gap_controls))
    found.notes += [_EFFECT, _GAP, caution(options)]
    return found


_EFFECT = (
    "Effects: the paper's ViT-S on ImageNet, 79.9 without a cache, 80.0 with keys and values, 81.3 with the gated one. "
    "The paper has no model of equal parameters and no constant cache; their effect is its gain over no cache, 1.4."
)
_GAP = (
    f"Gap: accuracy on {BATCHES} batches of {BATCH} training pictures, as evaluation reads them, minus test accuracy; "
    "the paper expects a smaller one with a cache and gives no number."
)


def _accuracy(result: Result) -> float:
    return 100 * result.score("accuracy")


def arms(options: Options) -> dict[str, Recipe]:
    """The recipes by the arms' names: the cached one first, then its controls."""
    kinds = (PAPER, PLAIN, CONTROLS[PAPER], ATTENTION)
    cached, none, constant, keys = (_patched(recipe(options, "vit", kind), options) for kind in kinds)
    (cached,) = completed([cached])
    equal = equal_parameters(cached)
    assert equal is not None
    return {CACHED: cached, NONE: none, EQUAL: equal, CONSTANT: constant, KEYS: keys}


def _patched(found: Recipe, options: Options) -> Recipe:
    """The recipe with the steps of the options and, on CIFAR-10, patches of 8 x 8."""
    model: Any = found.model
    model = replace(model, patch=PATCH) if task(options)[0] == "cifar" else model
    steps = options.steps or STEPS
    return replace(found, model=model, train=replace(found.train, steps=steps, eval_every=max(1, steps // 5)))


def _gap(run: Path) -> float:
    """Accuracy on fixed training pictures (the recipes do not augment) minus test accuracy, in points."""
    _, data, model = open_run(run)
    batches = [data.train_batch(i, BATCH, ORDER) for i in range(BATCHES)]
    return 100 * evaluate(model, batches, data)["accuracy"] - _accuracy(Result.read(run))
