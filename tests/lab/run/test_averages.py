"""The average of the weights in a run's last checkpoints: scored, kept, resumed."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from train_standins import train
from trained_runs import equal, numbers, stopped, text_recipe, texts, weights

import mnemos
from mnemos.lab.cli import main
from mnemos.lab.errors import Interrupted
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.run import checkpoint
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.weights import final_weights, trained_model


def of(recipe, **settings):
    return replace(recipe, train=replace(recipe.train, **settings))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """7 updates of a model with a cache, which is no parameter; a checkpoint after every second."""
    made = text_recipe(texts(tmp_path_factory.mktemp("averages") / "texts", "abcd"), steps=7, eval_every=4)
    return replace(made, model=replace(made.model, cache=mnemos.GRC(preset="paper", length=8)))


@pytest.fixture(scope="module")
def averaged(base, tmp_path_factory):
    """The recipe with its sizes, the result, the folder."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    result = train(of(base, average=3, keep=1), folder, quiet=True)
    return read_recipe(folder), result, folder


def test_the_average_is_the_mean_of_the_weights_and_the_newest_of_the_rest_and_is_scored(averaged):
    recipe, result, folder = averaged
    kept = [4, 6, 7]
    assert checkpoint.steps(folder / "checkpoints") == kept[::-1] == result["averaged_steps"]
    saved = [weights(folder, step) for step in kept]
    parameters = dict(recipe.model.build().named_parameters(remove_duplicate=False))
    assert any("cache" in name for name in set(saved[0]) - set(parameters))
    found = final_weights(folder)
    assert set(found) == set(saved[0])
    for name, value in found.items():
        mean = torch.stack([one[name].double() for one in saved]).sum(0) / 3
        assert torch.equal(value, mean.to(value.dtype) if name in parameters else saved[-1][name]), name
    assert any(not torch.equal(found[name], saved[-1][name]) for name in parameters)
    task = recipe.data.build()
    for split in ("valid", "test"):
        scores = evaluate(trained_model(folder, recipe), task.batches(split, recipe.train.batch_size), task)
        assert scores["loss"] == result[split]["loss"]
    assert result["valid"]["loss"] != numbers(folder, "valid")[-1]["loss"], "of the last update"


def test_an_interrupted_run_has_the_same_average(averaged, tmp_path):
    """Though the interruption saves a checkpoint, of update 5."""
    recipe, result, folder = averaged
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "run", quiet=True, on_evaluation=lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[0] == 5
    again = train(recipe, tmp_path / "run", resume=True, quiet=True)
    assert [again.get(key) for key in ("test", "averaged_steps")] == [
        result.get(key) for key in ("test", "averaged_steps")
    ]
    equal(final_weights(tmp_path / "run"), final_weights(folder))


def test_a_resumed_and_a_longer_run_average_the_checkpoints_of_a_whole_one(averaged, tmp_path):
    recipe, result, folder = averaged
    run = stopped(folder, tmp_path / "run", 6, 7)
    again = train(recipe, run, resume=True, quiet=True)
    assert (again["averaged_steps"], again["test"]) == ([7, 6, 4], result["test"])
    equal(final_weights(run), final_weights(folder))
    longer = train(of(recipe, steps=8), run, resume=True, quiet=True, longer=True)
    assert longer["averaged_steps"] == [8, 6, 4]  # as a run of 8 updates has
    assert checkpoint.steps(run / "checkpoints", "averaged") == [8]


def test_the_command_writes_the_mean_as_a_model(averaged, tmp_path, output, refused):
    recipe, result, folder = averaged
    same, two = tmp_path / "same", tmp_path / "two"
    assert main(["average", str(folder), "--last", "3", "--out", str(same)]) == 0
    equal(mnemos.load(same).state_dict(), final_weights(folder))  # the run averages three too
    said = output("eval", same)
    assert f"  as trained  loss {result['test']['loss']:.4f}" in said
    assert "  emptied     loss " in said
    assert main(["average", str(folder), "--last", "2", "--out", str(two)]) == 0
    name = next(iter(dict(recipe.model.build().named_parameters())))
    mean = (weights(folder, 6)[name].double() + weights(folder, 7)[name].double()) / 2
    assert torch.equal(mnemos.load(two).state_dict()[name], mean.to(torch.float32))
    assert "expected a new folder" in refused("average", folder, "--last", "2", "--out", two)
    assert "expected 4 checkpoints, found 3" in refused("average", folder, "--last", "4")
    assert "--last: expected at least 1 checkpoint, found 0" in refused("average", folder, "--last", "0")
