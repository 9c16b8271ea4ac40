"""Linear, softmax and LSH attention on pictures byte by byte: bits, differences, power, and the evolution of training.

The models are those of `mnist-pixels-small`: 2 layers of width 64 that differ in their attention alone. 3,600 updates
of 8 pictures are half an epoch of MNIST, far from the paper's 250.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mnemos.lab.report.read import Results, read
from mnemos.lab.report.run_records import Columns, RunRecord
from mnemos.lab.run.files import Result
from mnemos.lab.tasks.metrics import bits

from ..claim import Claim
from ..drawing import MARKERS, draw_curves, heading, png, variant_colour
from ..experiments import Measure, add_tables, mean_and_spread, train_arms
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import caution, task
from .generation import small_recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS = 3600
ARMS = ("linear", "softmax", "lsh-1")


def experiment(claim: Claim, options: Options) -> Finding:
    """Train the three attentions with the seeds of the options; tables, and experiment.png with the curves."""
    found = Finding()
    if options.recipes_only:
        return Finding([], ["Three seeds: --data MNIST --seeds 3."])
    wanted = replace(options, steps=options.steps or STEPS)
    arms = {name: small_recipe(wanted, name) for name in ARMS}
    comparison = train_arms(found, wanted, f"experiment-{task(options)[0]}", arms)
    measure = Measure("bits/dim", _bits, higher_is_better=False)
    theirs = {name: claim.values[name][0] for name in ARMS}
    controls = {name: theirs["linear"] - theirs[name] for name in ARMS[1:]}
    add_tables(found, arms, comparison, measure, controls)
    results = read([comparison["folder"]])
    found.tables.append(_validation(results))
    found.files.insert(0, png(options.out / "experiment.png", (9.6, 7.4), partial(_evolution, results=results)))
    found.notes += [_EFFECT, _FIGURE, caution(options)]
    return found


_EFFECT = (
    "The effects are the paper's differences after 250 epochs, with a mixture of logistics, at .62 to .75 bits. The "
    "models here predict one of 256 classes. LSH-4, the paper's nearest to linear, is left out for its cost."
)
_FIGURE = (
    "experiment.png: bits/dim in training and on the validation split, by update and by second of training on one "
    "thread. Thin lines are seeds, thick lines their mean."
)


def _bits(result: Result) -> float:
    return bits(result.score("loss"))


def _validation(results: Results) -> Table:
    """Bits of the validation split by update, over seeds."""
    table = Table("Validation, bits/dim", ["updates", *(part for name in ARMS for part in (name, f"{name}, sd"))])
    runs = [[_timed(run, "valid") for run in results.runs_of(name)] for name in results.names]
    for i, step in enumerate(runs[0][0]["step"]):
        spreads = [mean_and_spread([float(run["bits"][i]) for run in every]) for every in runs]
        table.add(int(step), *(cell for pair in spreads for cell in pair))
    return table


def _evolution(figure: "Figure", results: Results) -> None:
    """Four panels: training and validation, each by update and by second."""
    for i, (kind, title) in enumerate((("train", "Training"), ("valid", "Validation"))):
        for j, axis in enumerate(("updates", "seconds of training")):
            axes = figure.add_axes((0.07 + 0.49 * j, 0.58 - 0.5 * i, 0.42, 0.32))
            _panel(axes, [[_timed(run, kind) for run in results.runs_of(name)] for name in results.names], axis)
            axes.set_ylabel("bits/dim")
            shown = enumerate(ARMS) if not i and not j else ()
            heading(axes, title, [(variant_colour(k), name, MARKERS[k]) for k, name in shown], axis)


def _timed(run: RunRecord, kind: str) -> Columns:
    """A run's records of a kind: updates, seconds of training until then, and bits."""
    columns: Columns = getattr(run, kind)
    seconds = np.interp(columns["step"], run.train["step"], run.train["seconds"])
    bits_by_step = columns["loss"] / np.log(2)
    return {"step": columns["step"], "updates": columns["step"], "seconds of training": seconds, "bits": bits_by_step}


def _panel(axes: "Axes", arms: Sequence[Sequence[Columns]], axis: str) -> None:
    ends = [draw_curves(axes, series, axis, "bits", index)[-1] for index, series in enumerate(arms)]
    axes.set_ylim(top=min(axes.get_ylim()[1], 2 * max(ends)))  # the first updates would hide the rest
