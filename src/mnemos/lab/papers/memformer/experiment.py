"""Memformer on MNIST at 14 x 14 byte by byte, beside its ablations and a Transformer-XL of equal parameters.

A segment is a row of 14 bytes, a picture 14 segments. The models are those of Table 1 with half the layers and half
the slots, a quarter of the width, and `preset="paper"`: 1 + 3 layers of width 32, 32 slots. Gradients go back through
the whole picture; the paper's through 8 segments.
"""

import math

from mnemos.lab.compare.baselines import parameters, with_parameters
from mnemos.lab.compare.equal import completed
from mnemos.lab.evaluate.write_attention import KINDS, measure_write_attention
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.recipe import Recipe, RolloutConfig
from mnemos.lab.run.trained import open_run
from mnemos.models.memformer import MemformerConfig

from ..claims import PAPERS, Claim
from ..experiments import add_tables, train_variants
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import Trained, digits_or_mnist, perplexities
from .figures import VERBS, paper_share
from .recipes import SMALL_PICTURES, ImageSizes, picture_recipe, picture_variant

SIDE, STEPS = 14, 1200
SIZE = ImageSizes(dim=32, layer_divisor=2, slot_divisor=2, side=SIDE, dropout=0.0)
MEMFORMER, XL = "Memformer", "Transformer-XL"
ROWS = {  # of the variants in Table 1
    MEMFORMER: "Memformer 2+6 memory=64",
    "without memory": "w/o memory",
    "without forgetting": "w/o forgetting",
    XL: "Transformer-XL memory=784",
}
PICTURES = 500  # of the test split, whose slots are counted
_TRANSLATED = (
    "The paper's differences are those of the logarithms of its perplexities (28 x 28), in nats per byte, of the rows "
    "Memformer 2+6 memory=64, w/o memory, w/o forgetting and Transformer-XL memory=784. A byte of a smaller picture "
    "holds other information, so the same number of nats may be another share of the loss."
)


def experiment(claim: Claim, options: Options) -> Finding:
    """Train the four variants with the seeds of the options; tables of loss, differences and slots that hold."""
    finding, recipes = Finding(), variants(options)
    trained = train_variants(finding, options, recipes)
    table1 = PAPERS["memformer"].claim("table1").values
    theirs = {name: math.log(table1[row][1]) for name, row in ROWS.items()}
    effects = {name: theirs[MEMFORMER] - theirs[name] for name in ROWS if name != MEMFORMER}
    extra = {"perplexity": perplexities(trained)}
    add_tables(finding, recipes[MEMFORMER], trained, "nats/byte", lambda one: one.score("loss"), False, effects, extra)
    finding.tables.append(_slots_table(recipes, trained))
    finding.notes.append(_TRANSLATED)
    return finding


def variants(options: Options) -> dict[str, Recipe]:
    """The recipes by the variants' names. Transformer-XL's MLPs have the width that gives it Memformer's parameters."""
    data, fields = digits_or_mnist(options)
    mnist = data == "mnist"
    steps = options.steps or STEPS
    recipes = []
    for name, row in ROWS.items():
        model, rollout = picture_variant(row, SIZE if mnist else SMALL_PICTURES[data])
        if name != XL:
            rollout = RolloutConfig()  # the whole picture at once: the gradient passes through all its segments
        recipe = altered(
            picture_recipe(data, row),
            name=f"{data}-{name.lower().replace(' ', '-')}",
            model=model,
            data={"images": fields | ({"size": SIDE} if mnist else {})},
            train={"steps": steps, "eval_every": max(1, steps // 4), "rollout": rollout},
        )
        recipes.append(recipe)
    *memformers, xl = completed(recipes)
    xl = with_parameters(xl, parameters(memformers[0].model), memformers[0].name)
    return dict(zip(ROWS, [*memformers, xl], strict=True))


def _slots_table(recipes: dict[str, Recipe], trained: Trained) -> Table:
    """Figure 6: the share of the slots of each kind in the middle half of a test picture, by seed."""
    table = Table("", ["", "seed", *(f"slots that {VERBS[kind]}" for kind in KINDS)])
    for name, recipe in recipes.items():
        if not isinstance(recipe.model, MemformerConfig) or not recipe.model.memory.slots:
            continue
        for seed, run in enumerate(trained.runs[name]):
            _, data, model = open_run(run)
            record = measure_write_attention(model, data, PICTURES)
            assert record is not None
            low, high = record.thresholds
            table.title = (
                f"Slots in the middle half of {record.documents} test pictures, % (holds: own weight > {high:g}; "
                f"overwritten: < {low:g})"
            )
            table.add(name, seed, *(100 * record.middle[kind] for kind in KINDS))
    table.add("the paper, text", None, *map(paper_share, KINDS))
    return table
