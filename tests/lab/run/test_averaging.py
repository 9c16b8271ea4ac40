"""The average of a run's last checkpoints: the mean of the weights, whatever interrupted the run; kept and scored."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from train_standins import train

import mnemos
from mnemos import registry
from mnemos.lab.cli import main
from mnemos.lab.errors import Interrupted
from mnemos.lab.evaluate.scores import evaluate
from mnemos.lab.run import checkpoint
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.weights import average, final_weights, parameter_names, trained_model
from mnemos.types import InputError


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run of 7 updates with a cache, averaged over its last 3 checkpoints of every second update."""
    folder = tmp_path_factory.mktemp("averaged")
    texts = folder / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(f"the cat {i} sat on the mat. " * 60)
    recipe = registry.load("recipe", "text-cached")()
    recipe = replace(
        recipe,
        model=replace(recipe.model, dim=16, layers=1, num_heads=2, mlp=16, cache=mnemos.GRC(preset="paper", length=8)),
        data=replace(recipe.data, path=str(texts), segment=128, held_out=0.1),
        optim=replace(recipe.optim, lr=0.05, schedule=replace(recipe.optim.schedule, warmup=0)),
        train=replace(
            recipe.train, steps=7, batch_size=4, average=3, keep=1, checkpoint_every=2, eval_every=4, accelerator="cpu"
        ),
    )
    result = train(recipe, folder / "run", quiet=True)
    return read_recipe(folder / "run"), result, folder / "run"


def test_the_average_is_the_mean_of_the_weights_and_the_newest_of_the_rest(averaged):
    recipe, result, folder = averaged
    kept = [4, 6, 7]
    assert checkpoint.steps(folder / "checkpoints") == kept[::-1] == result["averaged_steps"]
    saved = [checkpoint.read(checkpoint.path_of(folder / "checkpoints", step))["model"] for step in kept]
    parameters = parameter_names(recipe.model.build())
    buffers = set(saved[0]) - parameters
    assert any("cache" in name for name in buffers)
    found = final_weights(folder)
    assert set(found) == set(saved[0])
    for name, value in found.items():
        mean = torch.stack([one[name].double() for one in saved]).sum(0) / 3
        assert torch.equal(value, mean.to(value.dtype) if name in parameters else saved[-1][name]), name
    assert any(not torch.equal(found[name], saved[-1][name]) for name in parameters)


def test_the_averaged_model_is_scored(averaged):
    recipe, result, folder = averaged
    task = recipe.data.build()
    for split in ("valid", "test"):
        found = evaluate(trained_model(folder, recipe), task.batches(split, 4), task)
        assert found["loss"] == result[split]["loss"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert result["valid"]["loss"] != next(line["loss"] for line in lines[::-1] if line["kind"] == "valid")


def test_a_resumed_run_has_the_same_average(averaged, tmp_path):
    recipe, result, folder = averaged
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    for step in (6, 7):
        checkpoint.path_of(tmp_path / "run" / "checkpoints", step).unlink()
    again = train(recipe, tmp_path / "run", resume=True, quiet=True)
    assert again["averaged_steps"] == [7, 6, 4]
    assert again["test"] == result["test"]
    one, other = final_weights(folder), final_weights(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)
    recipe = replace(recipe, train=replace(recipe.train, steps=8))
    longer = train(recipe, tmp_path / "run", resume=True, quiet=True, longer=True)
    assert longer["averaged_steps"] == [8, 6, 4]  # as a run of 8 updates has
    assert checkpoint.steps(tmp_path / "run" / "checkpoints", "averaged") == [8]


def test_a_checkpoint_that_an_interruption_saves_is_not_averaged(averaged, tmp_path):
    recipe, result, folder = averaged

    def stop(model, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "run", quiet=True, on_evaluation=stop)
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[0] == 5
    again = train(recipe, tmp_path / "run", resume=True, quiet=True)
    assert again["averaged_steps"] == result["averaged_steps"]
    one, other = final_weights(folder), final_weights(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_command_writes_a_model(averaged, tmp_path, capsys):
    recipe, _, folder = averaged
    out = tmp_path / "model"
    assert main(["average", str(folder), "--last", "2", "--out", str(out)]) == 0
    found = mnemos.load(out).state_dict()
    mean = average(folder / "checkpoints", 2, parameter_names(recipe.model.build()))
    assert mean.steps == [7, 6]
    assert all(torch.equal(found[name], value) for name, value in mean.weights.items())
    assert (out / "preprocessing.json").is_file()
    for arguments, said in (
        (["--last", "2", "--out", str(out)], "expected a new folder"),
        (["--last", "9"], "expected 9 checkpoints, found 3"),
        (["--last", "0"], "expected at least 1"),
    ):
        assert main(["average", str(folder), *arguments]) == 2
        assert said in capsys.readouterr().err


def test_settings_that_do_not_go_together(averaged, tmp_path):
    recipe, *_ = averaged
    for settings, said in (
        (replace(recipe.train, keep_best=True), "0 beside train.keep_best, found 3"),
        (replace(recipe.train, average=-1), "at least 0, found -1"),
    ):
        with pytest.raises(InputError, match=rf"train\.average: expected {said}"):
            train(replace(recipe, train=settings), tmp_path / "run", quiet=True)
    with pytest.raises(InputError, match="expected checkpoints to average, found none"):
        average(tmp_path, 2, set())
