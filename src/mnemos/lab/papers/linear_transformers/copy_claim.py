"""Figure 2: the convergence of each attention on the copy task."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemos.attention.linear import LinearConfig
from mnemos.lab.compare.compare import compare
from mnemos.lab.report import report
from mnemos.lab.report.curves import draw
from mnemos.lab.report.read import read
from mnemos.lab.report.results import Comparison
from mnemos.lab.report.style import MARKERS, variant_colour
from mnemos.lab.report.summary_image import heading
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.tasks.copying import CopyConfig
from mnemos.models.transformer import TransformerConfig

from ..claim import Claim
from ..drawing import png
from ..findings import Finding, Table, spread
from ..reproduce import Options
from ..small_runs import caution, runs
from .attentions import attention

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ATTENTIONS = ("softmax", "lsh-4", "linear")
LEARNED = 0.02  # nats per symbol; the initial loss is log 10 = 2.3


@recipe
def copy_small() -> Recipe:
    """Copy a word of 16 to 31 symbols with linear attention: 2 layers of width 128, a few minutes on two cores.

    Gradients are clipped at 1, the library's default. The paper names no clipping, and `copy`, at its size, has none.
    """
    return Recipe(
        model=TransformerConfig.classic(
            vocab_size=0, dim=128, layers=2, num_heads=4, mlp=256, max_length=0, attention=LinearConfig()
        ),
        data=CopyConfig(length=64),
        optim=OptimConfig(name="radam", lr=3e-3, weight_decay=0.0, schedule=ScheduleConfig(name="cosine", floor=0.02)),
        train=TrainConfig(steps=2500, batch_size=64, eval_every=100, log_every=100),
    )


def figure2(claim: Claim, options: Options) -> Finding:
    """Figure 2 with small models: the loss by update, and the share of correct symbols at the end."""
    found = Finding([], ["At the paper's size: mnemos train copy (length 128, 4 layers of width 256)."])
    if options.recipes_only:
        return found
    base = copy_small()
    steps = options.steps or base.train.steps
    recipes = [_variant(base, name, steps) for name in ATTENTIONS]
    folder = options.out / "runs" / f"copy-{steps}"
    comparison = {**compare(recipes, folder, options.seeds, quiet=True), "folder": folder}
    table = Table(
        f"Copying words of 16 to 31 of 10 symbols: models of 2 layers, {steps:,} updates",
        ["", "symbols right, %", "test loss, nats", f"updates until {LEARNED:g} nats", "seconds of training"],
    )
    for name, trained, row in zip(ATTENTIONS, recipes, comparison["rows"], strict=True):
        places = [folder / place for place in comparison["runs"][trained.name]]
        losses = [json.loads((place / "result.json").read_text())["test"]["loss"] for place in places]
        table.add(name, spread(row["mean"], row["std"]), max(losses), _learned(places), row["seconds"])
    found.tables.append(table)
    found.notes += [
        caution(options, data=False),
        "Loss and updates are those of the worst seed. A dash: the loss was not reached.",
    ]
    found.runs += runs(comparison)
    page = report([folder], folder / "report.html")
    drawn = partial(_lay_out, comparison=read([folder]))
    found.files += [png(options.out / "figure2.png", (6.4, 4.2), drawn), page]
    return found


def _variant(base: Recipe, name: str, steps: int) -> Recipe:
    model: Any = base.model
    data: Any = base.data
    train = replace(base.train, steps=steps, eval_every=max(1, min(base.train.eval_every, steps // 4)))
    return replace(base, name=f"copy-{name}", model=replace(model, attention=attention(name, data.length)), train=train)


def _learned(places: list[Path]) -> float | None:
    """The update by which the validation loss of every run has reached `LEARNED`; None if one run never does."""
    firsts = []
    for place in places:
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if line["kind"] == "valid" and line["loss"] <= LEARNED]
        if not steps:
            return None
        firsts.append(steps[0])
    return max(firsts)


def _lay_out(figure: "Figure", comparison: Comparison) -> None:
    axes = figure.add_axes((0.11, 0.13, 0.86, 0.68))
    draw(axes, comparison, "valid", "loss")
    axes.set_yscale("log")
    axes.set_ylabel("validation loss, nats")
    heading(axes, "Copying", [(variant_colour(i), name, MARKERS[i]) for i, name in enumerate(ATTENTIONS)])
