"""Small trained runs of registered recipes, and what their folders have."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from mnemos import registry
from mnemos.lab.run import checkpoint
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
        data=TextConfig(folder, segment=64),
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


def numbers(folder: Path, kind: str = "") -> list[dict]:
    """The same lines without the time that they took."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines(folder, kind)]


def result(folder: Path) -> dict:
    """What result.json has, without time and memory."""
    found = json.loads((folder / "result.json").read_text())
    return {name: value for name, value in found.items() if name not in ("seconds", "peak_bytes")}


def weights(folder: Path, step: int = 0, part: str = "model") -> dict[str, Tensor]:
    """What the checkpoint of an update has, or the newest one."""
    return saved(folder, step)[part]


def saved(folder: Path, step: int = 0) -> dict:
    """The checkpoint of an update, or the newest one."""
    place = folder / "checkpoints"
    return checkpoint.read(checkpoint.path_of(place, step or checkpoint.steps(place)[0]))


def equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Fail unless both have the same names and values, bit for bit."""
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=0)


def stopped(run: Path, folder: Path, *steps: int) -> Path:
    """A copy of a finished run as if it had been stopped before it saved the checkpoints of these updates."""
    shutil.copytree(run, folder)
    (folder / "result.json").unlink()
    for step in steps:
        for kind in ("step", "averaged"):
            checkpoint.path_of(folder / "checkpoints", step, kind).unlink(missing_ok=True)
    return folder


def ended(folder: Path) -> str:
    """A digest of everything in the newest checkpoint that is not about time or memory."""
    tree = saved(folder)
    for key in ("seconds", "peak_bytes"):
        del tree["counters"][key]
    assert {"model", "optimiser", "generators", "states", "sums", "plateau"} <= set(tree)
    return checkpoint.digest(*checkpoint.encode(tree))


def same(folder: Path, reference: Path) -> None:
    """Fail unless two finished runs have the same lines, last checkpoint and result."""
    assert numbers(folder) == numbers(reference)
    assert ended(folder) == ended(reference)
    assert result(folder) == result(reference)
    assert not list(folder.rglob("*.tmp"))
