"""What small models learn with each attention: the copy task (Figure 2), and speech with CTC (Table 3)."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnemos import registry
from mnemos.lab.report.read import Results, read
from mnemos.lab.run.files import Measurement, Result
from mnemos.lab.run.recipe import Recipe
from mnemos.types import InputError

from ..claim import Claim
from ..drawing import MARKERS, draw_curves, heading, png, variant_colour
from ..findings import Finding, Table, spread
from ..reproduce import Options
from ..small_runs import caution, runs, runs_of, train_and_compare, write_report
from .recipes import attention, copy_small

if TYPE_CHECKING:
    from matplotlib.figure import Figure


ATTENTIONS = ("softmax", "lsh-4", "linear")
LEARNED = 0.02  # nats per symbol; the initial loss is log 10 = 2.3


_COPYING = (
    "At the paper's size (128 tokens, 4 layers; the width, 256, is ours): mnemos train copy (-softmax, -lsh-1, -lsh-4)."
)


def figure2(claim: Claim, options: Options) -> Finding:
    """Figure 2 with small models: the loss by update, and the share of correct symbols at the end."""
    found = Finding([], [_COPYING])
    if options.recipes_only:
        return found
    base = copy_small()
    steps = options.steps or base.train.steps
    recipes = [_variant(base, name, steps) for name in ATTENTIONS]
    comparison = train_and_compare(options, "copy", recipes)
    table = Table(
        f"Copying words of 16 to 31 of 10 symbols: models of 2 layers, {steps:,} updates",
        ["", "symbols right, %", "test loss, nats", f"updates until {LEARNED:g} nats", "seconds of training"],
    )
    for name, trained, row in zip(ATTENTIONS, recipes, comparison["rows"], strict=True):
        places = runs_of(comparison, trained)
        losses = [Result.read(place).score("loss") for place in places]
        table.add(name, spread(row["mean"], row["std"]), max(losses), _learned(places), row["seconds"])
    found.tables.append(table)
    found.notes += [
        caution(options),
        _reach(recipes[ATTENTIONS.index("lsh-4")]),
        "Loss and updates are those of the worst seed. A dash: the loss was not reached.",
    ]
    found.runs += runs(comparison)
    page = write_report(comparison)
    drawn = partial(_lay_out, comparison=read([comparison["folder"]]))
    found.files += [png(options.out / "figure2.png", (6.4, 4.2), drawn), page]
    return found


def _reach(recipe: Recipe) -> str:
    """A sentence: how much of a sequence LSH can read."""
    model: Any = recipe.model
    data: Any = recipe.data
    chunk = model.attention.chunk
    return (
        f"LSH has chunks of {chunk}: in each of its {model.attention.rounds} rounds a token reads at most {2 * chunk} "
        f"of {data.length} tokens. The paper names no chunk for this task."
    )


def _variant(base: Recipe, name: str, steps: int) -> Recipe:
    model: Any = base.model
    data: Any = base.data
    train = replace(base.train, steps=steps, eval_every=max(1, min(base.train.eval_every, steps // 4)))
    return replace(base, name=f"copy-{name}", model=replace(model, attention=attention(name, data.length)), train=train)


def _learned(places: list[Path]) -> float | None:
    """The update by which the validation loss of every run has reached `LEARNED`; None if one run never does."""
    firsts = []
    for place in places:
        lines = Measurement.read_all(place)
        steps = [line.step for line in lines if line.kind == "valid" and line.values["loss"] <= LEARNED]
        if not steps:
            return None
        firsts.append(steps[0])
    return max(firsts)


def _lay_out(figure: "Figure", comparison: Results) -> None:
    axes = figure.add_axes((0.11, 0.13, 0.86, 0.68))
    for index, name in enumerate(comparison.names):
        draw_curves(axes, [run.valid for run in comparison.runs_of(name)], "step", "loss", index)
    axes.set_yscale("log")
    axes.set_ylabel("validation loss, nats")
    heading(axes, "Copying", [(variant_colour(i), name, MARKERS[i]) for i, name in enumerate(ATTENTIONS)])


# The endings of the recipes' names; LSH has four rounds, as in the paper.
MODELS = ("bilstm", "softmax", "lsh", "linear")


def speech(claim: Claim, options: Options) -> Finding:
    """Table 3: error rate and seconds per epoch of small models, on the recordings in --data."""
    commands = (
        "At the paper's size, on your recordings: mnemos train speech-linear --data.path FOLDER "
        "(or speech-softmax, speech-lsh, speech-bilstm)."
    )
    found = Finding([], [commands])
    if options.recipes_only:
        return found
    if options.data is None:
        raise InputError(
            "--data: expected a folder of LABEL_SPEAKER_TAKE.wav files, such as the Free Spoken Digit Dataset, found "
            "none; add --data FOLDER"
        )
    recipes = []
    for name in MODELS:
        recipe = registry.load("recipe", f"spoken-digits-{name}")()
        data: Any = recipe.data
        steps = options.steps or recipe.train.steps
        train = replace(recipe.train, steps=steps, eval_every=max(1, min(recipe.train.eval_every, steps // 4)))
        recipes.append(replace(recipe, data=replace(data, path=str(options.data)), train=train))
    steps = recipes[0].train.steps
    comparison = train_and_compare(options, "speech", recipes)
    table = Table(
        f"Strings of spoken words, {steps:,} updates. The paper's rates are for phonemes of another data set.",
        ["", "token error rate, %", "seconds per epoch", "paper phoneme error rate, %", "paper seconds per epoch"],
    )
    for name, recipe, row in zip(MODELS, recipes, comparison["rows"], strict=True):
        theirs = claim.values["lsh-4" if name == "lsh" else name]
        epochs = [Result.read(run).epoch_seconds or 0.0 for run in runs_of(comparison, recipe)]
        table.add(name, spread(row["mean"], row["std"]), sum(epochs) / len(epochs), *theirs)
    found.tables.append(table)
    found.notes.append(caution(options))
    found.runs += runs(comparison)
    found.files.append(write_report(comparison))
    return found
