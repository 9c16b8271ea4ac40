"""Every registered recipe fits together, and those small enough learn something in a few updates."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mnemos import registry
from mnemos.data.images import MNISTConfig
from mnemos.data.listops import ListOpsConfig
from mnemos.train.checks import check_settings, check_task
from mnemos.train.recipe import Recipe
from mnemos.train.session import run

SHARED = Path(__file__).parents[2] / "../shared/data"


def small(name: str) -> Recipe:
    """The recipe with its data cut down to what a test can wait for; its model as it is."""
    recipe = registry.load("recipe", name)()
    data = recipe.data
    if isinstance(data, ListOpsConfig):
        data = dataclasses.replace(data, train_size=64, valid_size=8, test_size=8)
    elif isinstance(data, MNISTConfig):
        if not (SHARED / "mnist").is_dir():
            pytest.skip("MNIST's files are not here")
        data = dataclasses.replace(data, path=str(SHARED / "mnist"))
    return dataclasses.replace(recipe, data=data)


@pytest.mark.parametrize("name", registry.names("recipe"))
def test_model_and_task_fit(name):
    recipe = small(name)
    assert recipe.name == name
    check_settings(recipe, processes=1)
    task = recipe.data.build()
    check_task(recipe, task)
    batch = task.train_batch(0, 2, 0)
    with torch.device("meta"):  # shapes alone: the paper's size takes seconds
        model = recipe.model.build()
    inputs, mask = batch.inputs.to("meta"), None if batch.mask is None else batch.mask.to("meta")
    logits, _ = model.eval()(inputs, None, mask)
    assert logits.shape[:-1] == batch.targets.shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "text-linear", "text-cached", "recall", "digits", "copy"])
def test_a_starter_learns(name, tmp_path):
    recipe = small(name)
    model = dataclasses.replace(recipe.model, layers=1, width=32, mlp=32, heads=2)
    data = recipe.data
    if name.startswith("text"):
        for i in range(4):
            (tmp_path / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog; " * 40)
        data = dataclasses.replace(data, path=str(tmp_path), segment=64)
    train = dataclasses.replace(recipe.train, steps=60, batch_size=8, eval_every=60, log_every=20, accelerator="cpu")
    optim = dataclasses.replace(recipe.optim, rate=1e-2)
    recipe = dataclasses.replace(recipe, model=model, data=data, train=train, optim=optim)
    run(recipe, tmp_path / "run", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert losses[-1] < losses[0]
