"""Memformer on MNIST at 14 x 14 byte by byte, beside its ablations and a Transformer-XL of equal parameters.

A segment is a row of 14 bytes, a picture 14 segments. The models are those of Table 1 with half the layers and half
the slots, a quarter of the width, and `preset="paper"`: 1 + 3 layers of width 32, 32 slots. Gradients go back through
the whole picture; the paper's through 8 segments.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mnemos.lab.compare.baselines import parameters, with_parameters
from mnemos.lab.compare.equal import completed
from mnemos.lab.evaluate.recorded import KINDS, WriteAttention
from mnemos.lab.evaluate.write_attention import record_write_attention
from mnemos.lab.report.slot_attention import PAPER, VERBS
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe, RolloutConfig
from mnemos.lab.run.trained import open_run
from mnemos.lab.tasks.metrics import perplexity
from mnemos.types import InputError

from ..claim import Claim
from ..experiments import Measure, Values, add_tables, train_arms
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import caution, runs_of, task
from .recipes import SMALL_PICTURES, ImageSizes, picture_recipe, picture_variant

SIDE, STEPS = 14, 1200
SIZE = ImageSizes(dim=32, layer_divisor=2, slot_divisor=2, side=SIDE, dropout=0.0)
MEMFORMER, XL = "Memformer", "Transformer-XL"
ARMS = {  # their rows in Table 1
    MEMFORMER: "Memformer 2+6 memory=64",
    "without memory": "w/o memory",
    "without forgetting": "w/o forgetting",
    XL: "Transformer-XL memory=784",
}
PICTURES = 500  # of the test split, whose slots are counted


def experiment(claim: Claim, options: Options) -> Finding:
    """Train the four arms with the seeds of the options; tables of loss, differences and slots that hold."""
    found = Finding()
    if options.recipes_only:
        return Finding([], ["Five seeds: --data MNIST --seeds 5."])
    made = arms(options)
    comparison = train_arms(found, options, f"experiment-{task(options)[0]}", made)
    slots = {name: [_slots(run) for run in runs_of(comparison, made[name])] for name in _written(made)}
    extra: dict[str, Values] = {
        "perplexity": {
            name: [perplexity(_loss(Result.read(run))) for run in runs_of(comparison, recipe)]
            for name, recipe in made.items()
        }
    }
    theirs = {name: math.log(claim.values[name][0]) for name in ARMS}
    controls = {name: theirs[MEMFORMER] - theirs[name] for name in ARMS if name != MEMFORMER}
    add_tables(found, made, comparison, Measure("nats/byte", _loss, higher_is_better=False), controls, extra)
    found.tables.append(_slots_table(slots))
    found.notes += [_TRANSLATED, caution(options)]
    return found


_TRANSLATED = (
    "The paper's differences are those of the logarithms of its perplexities (28 x 28), in nats per byte, of the rows "
    "Memformer 2+6 memory=64, w/o memory, w/o forgetting and Transformer-XL memory=784. A byte of a smaller picture "
    "holds other information, so the same number of nats may be another share of the loss."
)


def _loss(result: Result) -> float:
    return result.score("loss")


def arms(options: Options) -> dict[str, Recipe]:
    """The recipes by the arms' names. Transformer-XL has MLPs of the width that gives it Memformer's parameters."""
    data, fields = task(options)
    if data == "cifar":
        raise InputError(
            f"--data {options.data}: expected a folder with MNIST, found no MNIST files; omit --data to use digits"
        )
    size = SIZE if data == "mnist" else SMALL_PICTURES[data]
    steps = options.steps or STEPS
    found = []
    for name, row in ARMS.items():
        base = picture_recipe(data, row)
        pixels: Any = base.data
        model, rollout = picture_variant(row, size)
        if name != XL:
            rollout = RolloutConfig()  # the whole picture at once: the gradient passes through all its segments
        train = replace(base.train, steps=steps, eval_every=max(1, steps // 4), rollout=rollout)
        sized = {**fields, "size": SIDE} if data == "mnist" else fields
        images = replace(pixels.images, **sized)
        slug = f"{data}-{name.lower().replace(' ', '-')}"
        found.append(replace(base, name=slug, model=model, data=replace(pixels, images=images), train=train))
    *memformers, xl = completed(found)
    return dict(
        zip(ARMS, [*memformers, with_parameters(xl, parameters(memformers[0].model), memformers[0].name)], strict=True)
    )


def _written(made: Mapping[str, Recipe]) -> list[str]:
    """The arms whose models write slots."""
    models: dict[str, Any] = {name: recipe.model for name, recipe in made.items()}
    return [name for name, model in models.items() if model.name == "memformer" and model.memory.slots]


def _slots(run: Path) -> WriteAttention:
    """The kinds of a run's slots on the first `PICTURES` pictures of the test split."""
    _, data, model = open_run(run)
    found = record_write_attention(model, data, run, PICTURES)
    assert found is not None
    return found


def _slots_table(slots: Mapping[str, list[WriteAttention]]) -> Table:
    """Figure 6: the share of the slots of each kind in the middle half of a picture, by seed."""
    first = next(iter(slots.values()))[0]
    low, high = first.thresholds
    table = Table(
        f"Slots in the middle half of {first.documents} test pictures, % (holds: own weight > {high:g}; overwritten: "
        f"< {low:g})",
        ["", "seed", *(f"slots that {VERBS[kind]}" for kind in KINDS)],
    )
    for name, every in slots.items():
        for seed, one in enumerate(every):
            table.add(name, seed, *(100 * one.middle[kind] for kind in KINDS))
    theirs = [PAPER.get(kind) for kind in KINDS]
    table.add(
        "the paper, text",
        None,
        *("–" if span is None else f"{100 * span[0]:.0f} to {100 * span[1]:.0f}" for span in theirs),
    )
    return table
