"""Linear, softmax and LSH attention on pictures byte by byte: bits, differences, power, and the evolution of training.

The models are those of `mnist-pixels-small`: 2 layers of width 64 that differ in their attention alone. 3,600 updates
of 8 pictures are half an epoch of MNIST, far from the paper's 250.
"""

from dataclasses import replace

import numpy as np

from mnemos.lab.report.read import read_run
from mnemos.lab.report.run_records import Columns, RunRecord
from mnemos.lab.tasks.metrics import bits

from ..claims import PAPERS, Claim
from ..drawing import draw_seeds, panel, picture
from ..experiments import add_tables, mean_and_spread, train_variants
from ..findings import Finding
from ..reproduce import Options
from .tables import small_recipe

STEPS = 3600
VARIANTS = ("linear", "softmax", "lsh-1")
_EFFECT = (
    "The effects are the paper's differences after 250 epochs, with a mixture of logistics, at .62 to .75 bits. The "
    "models here predict one of 256 classes. LSH-4, the paper's nearest to linear, is left out for its cost."
)
_FIGURE = (
    "experiment.png: bits/dim in training and on the validation split, by update and by second of training on one "
    "thread. Thin lines are seeds, thick lines their mean."
)


def experiment(claim: Claim, options: Options) -> Finding:
    """Train the three attentions with the seeds of the options; tables, and experiment.png with the curves."""
    finding, options = Finding(), replace(options, steps=options.steps or STEPS)
    recipes = {name: small_recipe(options, name) for name in VARIANTS}
    trained = train_variants(finding, options, recipes)
    theirs = PAPERS["linear_transformers"].claim("table1").values
    effects = {name: theirs["linear"][0] - theirs[name][0] for name in VARIANTS[1:]}
    add_tables(finding, recipes["linear"], trained, "bits/dim", lambda one: bits(one.score("loss")), False, effects)
    # --- bits of the validation split by update, over seeds ---
    runs = {name: [read_run(run, name) for run in paths] for name, paths in trained.runs.items()}
    table = finding.table(
        "Validation, bits/dim", ["updates", *(part for name in VARIANTS for part in (name, f"{name}, sd"))]
    )
    valid = [[_timed(run, "valid") for run in each] for each in runs.values()]
    for i, step in enumerate(valid[0][0]["step"]):
        spreads = [mean_and_spread([float(run["bits"][i]) for run in each]) for each in valid]
        table.add(int(step), *(cell for pair in spreads for cell in pair))
    # --- four panels: training and validation, each by update and by second ---
    path = options.out / "experiment.png"
    with picture(path, (9.6, 7.4)) as figure:
        grid = figure.subplots(2, 2)
        for line, split, title in zip(grid, ("train", "valid"), ("Training", "Validation"), strict=True):
            for axes, x in zip(line, ("updates", "seconds of training"), strict=True):
                panel(axes, title, x).set_ylabel("bits/dim")
                ends = [
                    draw_seeds(axes, [_timed(run, split) for run in each], x, "bits", i, name)[-1]
                    for i, (name, each) in enumerate(runs.items())
                ]
                axes.set_ylim(top=min(axes.get_ylim()[1], 2 * max(ends)))  # the first updates would hide the rest
    finding.files.insert(0, path)
    finding.notes += [_EFFECT, _FIGURE]
    return finding


def _timed(run: RunRecord, split: str) -> Columns:
    """A run's records of a split: updates, seconds of training until then, and bits."""
    columns: Columns = getattr(run, split)
    seconds = np.interp(columns["step"], run.train["step"], run.train["seconds"])
    bits_by_step = columns["loss"] / np.log(2)
    return {"step": columns["step"], "updates": columns["step"], "seconds of training": seconds, "bits": bits_by_step}
