"""Figure 8: perplexity by how far the gradient reaches back, and by how many slots there are."""

import json
import math
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

from mnemos.figures.style import RULE, arm
from mnemos.figures.summary_image import heading
from mnemos.train.compare import compare
from mnemos.train.recipe import Recipe, RolloutConfig

from ..claim import Claim
from ..drawing import png
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import caution, runs
from .text_runs import small, source

HORIZONS = (1, 2, 4, 8, 16, 32)  # segments through which gradient flows
SLOTS = (1, 8, 16, 32, 64)
HORIZON = 8  # where slots are compared
STEPS = 150
SEGMENT, READ = 32, max(HORIZONS)  # tokens per segment, and segments that an update reads, in every variant


def figure8(claim: Claim, options: Options) -> Finding:
    """Figure 8: (a) horizons 1 to 32, (b) 1 to 64 slots; small Memformers on text, alike in all else."""
    found = Finding([], [_ABOUT])
    if options.recipes_only:
        return found
    variants = {"horizon": [(h, max(SLOTS)) for h in HORIZONS], "slots": [(HORIZON, k) for k in SLOTS]}
    scores = {kind: [_trained(found, options, *both) for both in pairs] for kind, pairs in variants.items()}
    read = _recipe(options, HORIZON, max(SLOTS))
    about = f"{source(options)}, {read.train.steps:,} updates of {read.train.batch_size} x {READ} x {SEGMENT} bytes"
    for kind, title, values in (("horizon", "(a) the gradient's horizon", HORIZONS), ("slots", "(b) slots", SLOTS)):
        table = Table(
            f"Perplexity per byte by {title}: {about}", [kind, "perplexity", "least", "most", "bits per byte"]
        )
        for value, each in zip(values, scores[kind], strict=True):
            mean = statistics.fmean(each)
            table.add(value, mean, min(each), max(each), math.log2(mean))
        found.tables.append(table)
    found.notes += [_SAYS, caution(options)]
    found.files.append(png(options.out / "figure8.png", (10.0, 4.2), partial(_lay_out, scores=scores)))
    return found


_ABOUT = (
    f"Every variant reads the same {READ} segments of {SEGMENT} bytes per update; they differ in how many of them the "
    f"gradient flows through (a, {max(SLOTS)} slots), or in their slots (b, a horizon of {HORIZON}). With larger "
    f"models: mnemos train text-memformer --train.rollout.segments {READ} --train.rollout.horizon H "
    "--model.memory.slots K"
)
_SAYS = (
    "The paper: worst at a horizon of 1, hardly better at 32 than before; much better with 8 slots than with 1, little "
    "beyond. Perplexity is the test split's, read to the end of every document with the memory carried on."
)


def _recipe(options: Options, horizon: int, slots: int) -> Recipe:
    """A model of one layer in each half, so small that an update of 32 segments takes a fraction of a second."""
    recipe = small(options, STEPS)
    model: Any = recipe.model
    data: Any = recipe.data
    steps = recipe.train.steps
    memory = replace(model.memory, slots=slots)
    return replace(
        recipe,
        name=f"text-horizon-{horizon}-slots-{slots}",
        model=replace(model, dim=32, encoder_layers=1, decoder_layers=1, mlp=64, segment=SEGMENT, memory=memory),
        data=replace(data, segment=SEGMENT, longest=512 * SEGMENT),
        optim=replace(recipe.optim, lr=3e-3, schedule=replace(recipe.optim.schedule, warmup=min(100, steps // 10))),
        train=replace(
            recipe.train, batch_size=8, eval_every=steps, rollout=RolloutConfig(segments=READ, horizon=horizon)
        ),
    )


def _trained(found: Finding, options: Options, horizon: int, slots: int) -> list[float]:
    """Test perplexity of each seed. The folder is its own: `compare` refuses recipes that train differently."""
    recipe = _recipe(options, horizon, slots)
    folder = options.out / "runs" / f"{recipe.name}-{recipe.train.steps}"
    print(f"  a horizon of {horizon}, {slots} slots", flush=True)
    comparison = {**compare([recipe], folder, options.seeds, quiet=True), "folder": folder}
    found.runs += [place for place in runs(comparison) if place not in found.runs]
    return [math.exp(json.loads((place / "result.json").read_text())["test"]["loss"]) for place in runs(comparison)]


def _lay_out(figure: Any, scores: dict[str, list[list[float]]]) -> None:
    panels: list[tuple[str, str, tuple[int, ...], str]] = [
        ("horizon", "Perplexity by the gradient's horizon", HORIZONS, "segments it flows through"),
        ("slots", "Perplexity by the size of the memory", SLOTS, "slots"),
    ]
    for i, (kind, title, values, label) in enumerate(panels):
        axes = figure.add_axes((0.06 + 0.5 * i, 0.13, 0.42, 0.7))
        for value, each in zip(values, scores[kind], strict=True):
            axes.plot([value] * len(each), each, color=arm(i + 1), marker="o", markersize=4, linewidth=0, alpha=0.5)
        axes.plot(values, [statistics.fmean(each) for each in scores[kind]], color=arm(i + 1), marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
        axes.grid(axis="y", color=RULE[0])
        heading(axes, title, [])
        axes.set_xlabel(label)
