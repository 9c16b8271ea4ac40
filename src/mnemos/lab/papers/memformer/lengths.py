"""Figure 8: perplexity by the horizon of the gradient, and by the number of slots."""

import math
import statistics
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mnemos.errors import say
from mnemos.lab.report.style import RULE
from mnemos.lab.run.files import Result
from mnemos.lab.run.recipe import Recipe, RolloutConfig

from ..claim import Claim
from ..drawing import heading, png, variant_colour
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import caution, runs, train_and_compare
from .slot_figures import small, source

if TYPE_CHECKING:
    from matplotlib.figure import Figure


HORIZONS = (1, 2, 4, 8, 16, 32)  # segments through which gradient flows
SLOTS = (1, 8, 16, 32, 64)
HORIZON = 8  # the horizon at which numbers of slots are compared
STEPS = 150
SEGMENT, READ = 32, max(HORIZONS)  # tokens per segment, and segments per update, in every variant


def figure8(claim: Claim, options: Options) -> Finding:
    """Figure 8: (a) horizons 1 to 32, (b) 1 to 64 slots, with small Memformers on text that are otherwise equal."""
    found = Finding([], [_ABOUT])
    if options.recipes_only:
        return found
    variants = {"horizon": [(h, max(SLOTS)) for h in HORIZONS], "slots": [(HORIZON, k) for k in SLOTS]}
    scores = {kind: [_trained(found, options, *both) for both in pairs] for kind, pairs in variants.items()}
    read = _recipe(options, HORIZON, max(SLOTS))
    about = f"{source(options)}, {read.train.steps:,} updates of {read.train.batch_size} x {READ} x {SEGMENT} bytes"
    for kind, title, values in (
        ("horizon", "(a) horizon of the gradient", HORIZONS),
        ("slots", "(b) number of slots", SLOTS),
    ):
        table = Table(
            f"Perplexity per byte by {title}: {about}", [kind, "perplexity", "minimum", "maximum", "bits per byte"]
        )
        for value, each in zip(values, scores[kind], strict=True):
            mean = statistics.fmean(each)
            table.add(value, mean, min(each), max(each), math.log2(mean))
        found.tables.append(table)
    found.notes += [_SAYS, caution(options)]
    found.files.append(png(options.out / "figure8.png", (10.0, 4.2), partial(_lay_out, scores=scores)))
    return found


_ABOUT = (
    f"Every variant reads {READ} segments of {SEGMENT} bytes per update. Variants differ in (a) the number of "
    f"segments that the gradient passes through, with {max(SLOTS)} slots, or (b) the number of slots, with a horizon "
    f"of {HORIZON}. With larger models: mnemos train text-memformer --train.rollout.segments {READ} "
    "--train.rollout.horizon H --model.memory.slots K"
)
_SAYS = (
    "The paper: a horizon of 1 is the worst, longer ones are better, and at 32 the improvement is almost gone. 8 slots "
    "are much better than 1; more slots gain little. Perplexity is on the test split, with the memory carried to the "
    "end of every document."
)


def _recipe(options: Options, horizon: int, slots: int) -> Recipe:
    """A model with one encoder and one decoder layer: an update of 32 segments takes a fraction of a second."""
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
    """The test perplexity of each seed. Each variant has its own folder: `compare` requires equal training settings."""
    recipe = _recipe(options, horizon, slots)
    say(f"  horizon {horizon}, {slots} slots", flush=True)
    trained = runs(train_and_compare(options, recipe.name, [recipe]))
    found.runs += [run for run in trained if run not in found.runs]
    return [math.exp(Result.read(run).score("loss")) for run in trained]


def _lay_out(figure: "Figure", scores: dict[str, list[list[float]]]) -> None:
    panels: list[tuple[str, str, tuple[int, ...], str]] = [
        ("horizon", "Perplexity by horizon of the gradient", HORIZONS, "segments that the gradient passes through"),
        ("slots", "Perplexity by size of the memory", SLOTS, "slots"),
    ]
    for i, (kind, title, values, label) in enumerate(panels):
        axes = figure.add_axes((0.06 + 0.5 * i, 0.13, 0.42, 0.7))
        for value, each in zip(values, scores[kind], strict=True):
            axes.plot(
                [value] * len(each), each, color=variant_colour(i + 1), marker="o", markersize=4, linewidth=0, alpha=0.5
            )
        axes.plot(values, [statistics.fmean(each) for each in scores[kind]], color=variant_colour(i + 1), marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
        axes.grid(axis="y", color=RULE[0])
        heading(axes, title, [])
        axes.set_xlabel(label)
