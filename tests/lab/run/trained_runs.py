"""Small trained runs of registered recipes, and what their folders have."""

import json
from dataclasses import replace
from pathlib import Path

from mnemos import registry
from mnemos.lab.run.recipe import OptimConfig, Recipe
from mnemos.lab.run.session import run
from mnemos.lab.tasks.text import TextConfig


def texts(folder: Path, letters: str) -> str:
    """A folder of a text of 1,200 bytes for each letter."""
    for i, letter in enumerate(letters):
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text(f"{letter} and {i} " * 150)
    return str(folder)


def text_recipe(folder: str, **train: object) -> Recipe:
    """text-linear, small, on a folder of texts."""
    base = registry.load("recipe", "text-linear")()
    settings = {"steps": 4, "eval_every": 2, "batch_size": 2, "log_every": 1, "checkpoint_every": 2}
    settings |= {"valid_rows": 0, "test_rows": 64}  # all: a longer run scores the rows that a shorter one does
    return replace(
        base,
        model=replace(base.model, dim=16, layers=1, num_heads=2, mlp=16),
        data=TextConfig(folder, segment=32),
        optim=OptimConfig(lr=0.01),
        train=replace(base.train, **settings | {"accelerator": "cpu"} | train),
    )


def trained(name: str, folder: Path, model: dict | None = None, data: dict | None = None, **train: object) -> Path:
    """A finished run of a recipe with other settings, of two updates."""
    recipe = registry.load("recipe", name)()
    settings = {"steps": 2, "batch_size": 2, "eval_every": 2, "accelerator": "cpu"} | train
    recipe = replace(
        recipe,
        model=replace(recipe.model, **(model or {})),
        data=replace(recipe.data, **(data or {})),
        train=replace(recipe.train, **settings),
    )
    run(recipe, folder, quiet=True)
    return folder


def lines(folder: Path, kind: str = "") -> list[dict]:
    """The lines of metrics.jsonl, or those of a kind."""
    read = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in read if kind in ("", line["kind"])]
