"""Table 3: speech recognition with CTC, on strings of spoken digits instead of Wall Street Journal sentences."""

import json
from dataclasses import replace
from typing import Any

from mnemos import registry
from mnemos.lab.compare.compare import compare
from mnemos.lab.report import report
from mnemos.types import InputError

from ..claim import Claim
from ..findings import Finding, Table, spread
from ..reproduce import Options
from ..small_runs import caution, runs

MODELS = (
    "bilstm",
    "softmax",
    "lsh",
    "linear",
)  # the endings of the recipes' names; LSH has four rounds, as in the paper


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
    folder = options.out / "runs" / f"speech-{steps}"
    comparison = {**compare(recipes, folder, options.seeds, quiet=True), "folder": folder}
    table = Table(
        f"Strings of spoken words, {steps:,} updates. The paper's rates are for phonemes of another data set.",
        ["", "token error rate, %", "seconds per epoch", "paper phoneme error rate, %", "paper seconds per epoch"],
    )
    for name, recipe, row in zip(MODELS, recipes, comparison["rows"], strict=True):
        theirs = claim.values["lsh-4" if name == "lsh" else name]
        places = [folder / place for place in comparison["runs"][recipe.name]]
        epochs = [json.loads((place / "result.json").read_text())["epoch_seconds"] for place in places]
        table.add(name, spread(row["mean"], row["std"]), sum(epochs) / len(epochs), *theirs)
    found.tables.append(table)
    found.notes.append(caution(options))
    found.runs += runs(comparison)
    found.files.append(report([folder], folder / "report.html"))
    return found
