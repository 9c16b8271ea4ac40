"""The work of `mnemos train`: a recipe is trained in a folder, the trained model measured, and the result printed."""

from datetime import datetime
from pathlib import Path

from mnemos.errors import say
from mnemos.lab.evaluate.controls import legend
from mnemos.lab.tasks.no_learning import no_better
from mnemos.lab.tasks.task import Task
from mnemos.types import JSONObject

from .files import Result
from .recipe import OWN, Recipe
from .run import Run


def run_name(recipe: Recipe, verb: str = "") -> str:
    """The folder name of a new run: [verb-]recipe-date-time."""
    return "-".join(filter(None, (verb, recipe.name, datetime.now().strftime("%Y%m%d-%H%M%S"))))


def run(
    recipe: Recipe | None,
    folder: str | Path,
    resume: bool = False,
    quiet: bool = False,
    steps: int | None = None,
) -> JSONObject:
    """Train a recipe in a folder, measure the trained model, and return the content of its result.json (`Result`).

    resume: continue the folder's run with its own recipe (`recipe` is ignored). steps: see `Run.open`. quiet: print
    neither progress nor a summary. The model is saved in folder/model. Raises as `Run.open` and `Run.train`.
    """
    recipe = None if resume else recipe
    opened = Run.open(recipe, folder, resume, steps=steps, quiet=quiet)
    return carry_out(opened).to_json()


def carry_out(run: Run, count_flops: bool = True) -> Result:
    """Train and assess a run that is open, and print its summary. count_flops: see `Run.train`."""
    finished = run.result is not None
    run.train(count_flops=count_flops)
    result = run.assess()
    if run.first and not run.quiet:
        name, rows = run.recipe.name, result.scored_rows.get("test", 0)
        if 0 < run.recipe.train.test_rows <= rows:  # fewer are all rows of the split
            say(f"{name}: {rows:,} rows of the test split were scored; mnemos eval {run.path} --rows 0 scores all")
        if finished:
            own = run.recipe.model.name == OWN
            if result.stopped_early:
                again = "fit(...) with this model in another folder" if own else f"--from {run.path}"
                say(f"{name}: this run had stopped early; {again} starts another with its weights")
            else:
                more = "fit(..., steps=N, resume=True)" if own else "--train.steps N"
                say(f"{name}: this run had finished its {result.steps:,} steps; {more} trains it for longer")
        _print_summary(result, run.task, run.path)
    return result


def _print_summary(result: Result, task: Task, folder: Path) -> None:
    metric = task.metrics[0]
    line = f"{result.split} loss {result.score('loss'):.4f}" + "".join(
        f", {m.text(result.score(m.name))}"
        for m in task.metrics
        if m.form and m.name in result.scores and m.name != "loss"
    )
    line += "".join(f" ({name} {value:.4f})" for name, value in task.reference.items())
    said = []
    if result.before:
        scores = (metric.text(scores[metric.name]) for scores in (result.before, result.valid))
        said.append("on the validation split {} before training, {} after".format(*scores))
    if result.controls:
        line += "; caches " + ", ".join(
            f"{name} {metric.text(score[metric.name])}" for name, score in result.controls.items()
        )
        said.append(f"caches {legend(result.controls)}")
    if result.best_step:
        line += f"; weights of step {result.best_step:,}, the best on the validation split"
    if steps := result.averaged_steps:
        line += f"; weights averaged over the checkpoints of {len(steps)} steps, {steps[-1]:,} to {steps[0]:,}"
    if result.stopped_early:
        line += f"; stopped early after {result.steps:,} steps"
    if result.epoch_seconds:
        line += f"; {result.epoch_seconds:.1f} s per epoch"
    score = result.score(metric.name)
    said += no_better({result.recipe: score}, task.reference, metric.name, metric.higher_is_better)
    say("\n".join([f"{result.recipe}: {line}", *said, str(folder)]))
