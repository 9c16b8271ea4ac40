"""The moving average of a run's weights: its values, what is scored and kept, and that resuming it is exact."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from train_standins import train

from mnemos.lab.errors import Interrupted
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.run import checkpoint
from mnemos.lab.run.checks import check_settings
from mnemos.lab.run.recipe import OptimConfig, Recipe, TrainConfig
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.weights import final_weights, trained_model
from mnemos.lab.tasks.listops import ListOpsConfig
from mnemos.models.transformer import HeadConfig, TransformerConfig
from mnemos.types import InputError

RECIPE = Recipe(
    name="ema",
    model=TransformerConfig(
        vocab_size=0, dim=8, layers=1, num_heads=2, mlp=8, max_length=0, causal=False, head=HeadConfig(classes=10)
    ),
    data=ListOpsConfig(min_length=5, max_length=20, train_size=64, valid_size=16, test_size=16),
    optim=OptimConfig(lr=0.05),
    train=TrainConfig(steps=6, batch_size=4, ema=0.3, eval_every=3, checkpoint_every=1, keep=6, accelerator="cpu"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ema") / "run"
    return train(RECIPE, folder, quiet=True), folder


def saved(folder, step):
    return checkpoint.read(checkpoint.path_of(folder / "checkpoints", step))


def test_the_average_follows_its_equation_and_is_the_runs_model(run):
    result, folder = run
    steps = [saved(folder, step) for step in range(1, 7)]
    expected = steps[0]["model"]
    for t, one in enumerate(steps, 1):
        d = min(0.3, (t - 1) / (t + 8))
        expected = {name: d * expected[name] + (1 - d) * one["model"][name] for name in one["ema"]}
        for name, value in one["ema"].items():
            torch.testing.assert_close(value, expected[name])
    final = final_weights(folder)
    assert all(torch.equal(final[name], value) for name, value in steps[-1]["ema"].items())
    assert any(not torch.equal(final[name], value) for name, value in steps[-1]["model"].items())
    recipe = read_recipe(folder)
    task = recipe.data.build()
    for split in ("valid", "test"):
        assert evaluate(trained_model(folder, recipe), task.batches(split, 4), task)["loss"] == result[split]["loss"]


def test_training_is_that_without_an_average_and_resumes_exactly(run, tmp_path):
    result, folder = run
    train(replace(RECIPE, train=replace(RECIPE.train, ema=0.0)), tmp_path / "plain", quiet=True)
    plain, own = saved(tmp_path / "plain", 6)["model"], saved(folder, 6)["model"]
    assert all(torch.equal(plain[name], value) for name, value in own.items())

    def stop(model, step):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(RECIPE, tmp_path / "run", quiet=True, on_evaluation=stop)
    again = train(RECIPE, tmp_path / "run", resume=True, quiet=True)
    assert again["test"] == result["test"]
    one, other = final_weights(folder), final_weights(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_weights_are_those_of_the_average(tmp_path):
    recipe = replace(RECIPE, train=replace(RECIPE.train, keep_best=True))
    result = train(recipe, tmp_path / "run", quiet=True)
    best = saved(tmp_path / "run", result["best_step"])["ema"]
    final = final_weights(tmp_path / "run")
    assert all(torch.equal(final[name], value) for name, value in best.items())


@pytest.mark.parametrize("settings", [{"ema": 1.0}, {"ema": 0.5, "average": 2}, {"ema": 0.5, "strategy": "fsdp"}])
def test_settings_that_do_not_go_together(settings):
    with pytest.raises(InputError, match=r"train\.ema"):
        check_settings(replace(RECIPE, train=replace(RECIPE.train, **settings)), 1)
