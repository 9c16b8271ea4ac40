"""A gated cache on CIFAR-10 pictures beside four controls: test accuracy, and the gap to accuracy on training pictures.

The host is timm's vision transformer, 3 layers of width 64 over 16 patches of 8 x 8 pixels: with smaller patches an
update costs twice as much, and fewer of them leave the model less trained. 5,000 updates of 64 pictures are seven
epochs. The cache has the settings of the paper and mixes the heads one by one before the host's projection (eq. 2), so
that each attention with it is the paper's layer. Nothing is augmented: the paper explains its gain by a regularisation
across samples, which has more to do the sooner a model learns its pictures by heart.
"""

from pathlib import Path

from mnemos.lab.compare.baselines import equal_parameters
from mnemos.lab.compare.equal import completed
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.trained import open_run

from ..claims import PAPERS, Claim
from ..experiments import add_tables, differences_table, train_variants
from ..findings import Finding
from ..reproduce import Options
from ..small_runs import task
from .tables import ATTENTION, CONTROLS, PAPER, PLAIN, recipe

STEPS, PATCH = 5000, 8
CACHED, NONE, EQUAL, CONSTANT, KEYS = "cached", "no cache", "equal parameters", "constant cache", "keys and values"
BATCHES, BATCH = 20, 250  # of training pictures that are scored for the gap
ORDER = 1000  # the seed of their order, which no run has
_EFFECT = (
    "Effects: the paper's ViT-S on ImageNet, 79.9 without a cache, 80.0 with keys and values, 81.3 with the gated one. "
    "The paper has no model of equal parameters and no constant cache; their effect is its gain over no cache, 1.4."
)
_GAP = (
    f"Gap: accuracy on {BATCHES} batches of {BATCH} training pictures, as evaluation reads them, minus test accuracy; "
    "the paper expects a smaller one with a cache and gives no number."
)


def experiment(claim: Claim, options: Options) -> Finding:
    """Train the five variants with the seeds of the options; tables of accuracy, of gaps, and their differences."""
    finding, recipes = Finding(), variants(options)
    trained = train_variants(finding, options, recipes)
    gaps = {name: [_gap(run) for run in each] for name, each in trained.runs.items()}
    none, keys, cached = PAPERS["cached_transformers"].claim("table2").values["ViT-S"]
    effects = {NONE: cached - none, EQUAL: cached - none, CONSTANT: cached - none, KEYS: cached - keys}
    gap = {"gap, points": gaps}
    add_tables(finding, recipes[CACHED], trained, "test accuracy, %", _accuracy, True, effects, gap)
    finding.tables.append(differences_table(gaps, "gap, points", False, {name: None for name in effects}))
    finding.notes += [_EFFECT, _GAP]
    return finding


def variants(options: Options) -> dict[str, Recipe]:
    """The recipes by the variants' names: the cached one first, then its controls. On CIFAR-10 patches are 8 x 8."""
    steps = options.steps or STEPS
    changes = {
        "model": {"patch": PATCH} if task(options)[0] == "cifar" else {},
        "train": {"steps": steps, "eval_every": max(1, steps // 5)},
    }
    endings = (PAPER, PLAIN, CONTROLS[PAPER], ATTENTION)
    cached, none, constant, keys = (altered(recipe(options, "vit", ending), **changes) for ending in endings)
    (cached,) = completed([cached])
    equal = equal_parameters(cached)
    assert equal is not None
    return {CACHED: cached, NONE: none, EQUAL: equal, CONSTANT: constant, KEYS: keys}


def _accuracy(result: Result) -> float:
    return 100 * result.score("accuracy")


def _gap(run: Path) -> float:
    """Accuracy on fixed training pictures (the recipes do not augment) minus test accuracy, in points."""
    _, data, model = open_run(run)
    batches = [data.train_batch(i, BATCH, ORDER) for i in range(BATCHES)]
    return 100 * evaluate(model, batches, data)["accuracy"] - _accuracy(Result.read(run))
