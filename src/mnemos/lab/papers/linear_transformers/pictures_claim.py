"""Figure 3: images that a model with linear attention generates, and half images that it completes."""

from pathlib import Path

from mnemos.lab.compare.compare import compare
from mnemos.lab.report.image_grids import write_grids
from mnemos.lab.run.trained import open_run
from mnemos.lab.tasks.pixels import WAYS, PixelTask, write_pictures
from mnemos.types import InputError

from ..claim import Claim
from ..findings import Finding, Table
from ..reproduce import Options
from ..small_runs import task
from .generation import at_the_papers_size, small_recipe

COUNT, COMPLETED = 24, 8


def figure3(claim: Claim, options: Options) -> Finding:
    """Figure 3 from the run in --run, or from a small model that is trained on MNIST (--data) or scikit-learn's digits.

    Writes two images, of samples and of completions. Nothing is selected; there is no number to compare.
    """
    found = Finding([], [at_the_papers_size("mnist-pixels")])
    if options.recipes_only:
        return found
    run = options.run or _trained(options)
    recipe, data, model = open_run(run)
    if not isinstance(data, PixelTask):
        raise InputError(
            f"{run}: expected a run on images byte by byte, found one on {recipe.data.name}; choose another"
        )
    folder = options.out / "figure3"
    folder.mkdir(parents=True, exist_ok=True)
    written = write_pictures(model, data, folder, COUNT, COMPLETED)
    table = Table(f"Images of {' x '.join(map(str, data.shape))} bytes that {recipe.name} generated", ["", "images"])
    table.add("samples", len(written["samples"]))
    table.add(f"half test images, completed in {WAYS} ways", len(written["originals"]))
    found.tables.append(table)
    found.files += write_grids(folder)
    found.runs.append(run)
    found.notes.append("Not selected, temperature 1, seed 0. The paper's model is larger and trained for 250 epochs.")
    return found


def _trained(options: Options) -> Path:
    recipe = small_recipe(options, "linear")
    folder = options.out / "runs" / f"pictures-{task(options)[0]}-{recipe.train.steps}"
    return folder / compare([recipe], folder, quiet=True)["runs"][recipe.name][0]
