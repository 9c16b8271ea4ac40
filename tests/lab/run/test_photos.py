"""Runs on photos: trained, resumed exactly, interrupted with their workers, evaluated, and the classes of files."""

import multiprocessing
import os
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
from PIL import Image
from train_standins import train
from trained_runs import equal, numbers, result, weights

import mnemos
from mnemos import InputError, registry
from mnemos.lab.cli import main
from mnemos.lab.errors import Interrupted
from mnemos.lab.evaluate.predict import predict
from mnemos.lab.run import checkpoint, loop
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.session import run
from mnemos.lab.run.trained import evaluate_run
from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.photos import PhotosConfig
from mnemos.libraries import timm

NAMES = ("cat", "cow", "dog", "emu", "fox", "owl")


def photos(folder: Path, names: tuple[str, ...] = NAMES, seed: int = 0) -> Path:
    """Six photos of noise for each name; the later it comes, the darker they are."""
    random = np.random.default_rng(seed)
    for i, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for k in range(6):
            pixels = random.integers(0, 255, (40, 30, 3)) // (i + 1)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{k}.png")
    return folder


def recipe(folder: Path, workers: int = 0, augment: str = "light", **settings) -> Recipe:
    """photos-vit-cached, small, with a rate of their own for the gates; its sizes come from the photos."""
    made = registry.load("recipe", "photos-vit-cached")()
    settings = {"steps": 12, "batch_size": 4, "log_every": 4, "eval_every": 6, "checkpoint_every": 3, **settings}
    return replace(
        made,
        model=replace(made.model, image=0, classes=0, patch=8, dim=16, depth=1, num_heads=2, dropout=0.1),
        data=replace(made.data, folder=str(folder), size=16, workers=workers, augment=AugmentConfig(augment)),
        optim=OptimConfig(lr=2e-2, gate_lr_scale=5.0, schedule=ScheduleConfig("cosine", warmup=3)),
        train=replace(made.train, accelerator="cpu", **settings),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    timm()
    folder = tmp_path_factory.mktemp("photos")
    run(recipe(photos(folder / "photos"), steps=40), folder / "run", quiet=True)
    return folder / "run"


def test_a_run_on_photos(finished, capsys, monkeypatch):
    found, asked = result(finished), read_recipe(finished)
    assert set(found["test"]) == set(found["valid"]) == {"loss", "accuracy", "top5"}
    assert (found["tokens"], asked.model.classes, asked.model.image) == (40 * 4, 6, 16), "tokens: images"
    losses = [line["loss"] for line in numbers(finished, "train")]
    assert losses[-1] < 0.8 * losses[0]
    (batch,) = asked.data.build().batches("test", 99)
    five = mnemos.load(finished)(batch.inputs)[0].topk(5).indices
    assert found["test"]["top5"] == pytest.approx((five == batch.targets[:, None]).any(1).float().mean().item())
    assert found["test"]["accuracy"] <= found["test"]["top5"] <= 1
    monkeypatch.setattr("mnemos.lab.run.progress.INTERVAL", 0.0)
    assert evaluate_run(finished)["as trained"] == pytest.approx(found["test"])
    said = capsys.readouterr()
    assert f"top-5 {found['test']['top5']:.4f}" in said.out
    assert f"{asked.name} evaluating test" in said.err


class StopError(Exception):
    pass


@pytest.mark.parametrize(("policy", "workers"), [("timm", 1), pytest.param("light", 0, marks=pytest.mark.exhaustive)])
def test_resume_is_exact(finished, tmp_path, monkeypatch, workers, policy):
    """Dropout, augmentation and gates with a rate of their own; broken off in update 5, saved after 3."""
    folder, before = finished.parent / "photos", set(multiprocessing.active_children())
    train(recipe(folder, augment=policy, steps=7), tmp_path / "whole", quiet=True)
    original = loop.set_lr

    def breaking(optimiser, optim, step, *rest):
        if step == 5:
            raise StopError
        return original(optimiser, optim, step, *rest)

    asked = recipe(folder, workers, policy, steps=7)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "set_lr", breaking)
        with pytest.raises(StopError) as held:  # with it, the frames of the run
            train(asked, tmp_path / "run", quiet=True)
    assert set(multiprocessing.active_children()) <= before, "no process is left behind"
    del held
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[0] == 3
    train(asked, tmp_path / "run", resume=True, quiet=True)
    assert set(multiprocessing.active_children()) <= before
    equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def work(folder: str, recipe: Recipe) -> None:
    """Train in a process of its own; exit code 130 where it was interrupted."""
    try:
        train(recipe, folder, quiet=True)
    except Interrupted:
        raise SystemExit(130) from None


def test_a_terminals_interrupt_reaches_the_workers_and_saves(finished, tmp_path, forks):
    """Ctrl-C goes to every process of the terminal; the run saves, and ends."""
    asked = recipe(finished.parent / "photos", 1, log_every=1, eval_every=30, checkpoint_every=30, steps=30)
    process = processes.Process(work, str(tmp_path / "run"), asked)
    metrics = tmp_path / "run" / "metrics.jsonl"
    processes.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    os.killpg(process.pid, signal.SIGINT)
    done = process.wait(60)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    (step,) = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert 0 < step < 30


def test_files_have_the_classes_that_evaluation_finds(finished, output):
    (batch,) = read_recipe(finished).data.build().batches("test", 99)
    logits, _ = mnemos.load(finished)(batch.inputs)
    wanted = {tuple(round(p, 4) for p in sorted(row, reverse=True)) for row in logits.softmax(-1).tolist()}
    found = list(predict(finished, [finished.parent / "photos"], top=6))
    given = {tuple(round(one["probability"], 4) for one in each.details["classes"]) for each in found}
    assert (len(found), len(wanted & given), len(wanted)) == (36, 6, 6)
    assert {one["name"] for one in found[0].details["classes"]} == {*NAMES}
    file = finished.parent / "photos/dog/3.png"
    assert re.fullmatch(
        rf"{file}: ([a-z]{{3}}) 0\.\d+  ([a-z]{{3}}) 0\.\d+\n", output("predict", finished, file, "--top", "2")
    )
    (one,) = predict(finished / "model", [file], top=1)
    assert one.details["classes"][0]["probability"] > 1 / 6
    assert torch.is_grad_enabled()


def test_what_cannot_be_predicted_is_one_line(finished, tmp_path, capsys, output, refused):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "empty").mkdir()
    assert "nowhere.png: expected a readable file" in refused("predict", finished, tmp_path / "nowhere.png")
    assert "empty: expected images" in refused("predict", finished, tmp_path / "empty")
    assert "expected a run, with recipe.json" in refused("predict", tmp_path / "empty", tmp_path / "empty")
    good = [str(finished.parent / f"photos/{name}.png") for name in ("cat/0", "dog/1")]
    alone = output("predict", finished, *good)
    assert main(["predict", str(finished), good[0], str(tmp_path / "broken.png"), good[1]]) == 1
    said = capsys.readouterr()
    assert said.out == alone, "the photos of the batch that can be read"
    assert said.err.startswith(f"mnemos: {tmp_path}/broken.png: expected an image")
    assert said.err.count("\n") == 1
    with pytest.raises(InputError, match=r"--length: expected --top for a model of images"):
        predict(finished, [], length=3)


def test_other_photos_are_scored_whole_and_say_what_their_splits_hold(finished, tmp_path, output, refused):
    scored = partial(output, "eval", finished, "--data.folder")
    not_scored = partial(refused, "eval", finished, "--data.folder")
    assert "a class of the training data, found 'doe'" in not_scored(photos(tmp_path / "does", ("cat", "cow", "doe")))
    cats = not_scored(photos(tmp_path / "one", ("cat",)) / "cat")
    assert "class folders with images, found images and no folder; name the folder above" in cats
    (tmp_path / "none").mkdir()
    assert "class folders with images, found none" in not_scored(tmp_path / "none")
    assert "test" in scored(finished.parent / "photos", "--data.held_out", "0.4")
    other, splits = photos(tmp_path / "other", seed=1), tmp_path / "splits"
    assert scored(other).splitlines()[0] == f"scored: all, 36 photos of 6 classes: {other}"
    shutil.copytree(finished.parent / "photos/dog", tmp_path / "dogs/dog")
    assert "files that the run has read" in scored(tmp_path / "dogs"), "of one class alone"
    shutil.copytree(other, splits / "val")
    assert f"scored: the test split, 36 photos of 6 classes: {splits}/val\n" in scored(splits)
    (splits / "val").rename(splits / "test")
    assert f"classes: {splits}/test\n" in scored(splits)
    assert "expected a folder for the valid split, found test; choose" in not_scored(splits, "--split", "valid")
    shutil.copytree(photos(tmp_path / "third", seed=2), splits / "train")
    (splits / "train/dog/0.png").unlink()
    assert PhotosConfig(str(splits), size=16).build().about == (
        f"train  29 photos of 6 classes: {splits}/train: cat, cow, dog, emu and 2 more",
        f"valid  6 photos of 6 classes: {splits}/train",
        f"test   36 photos of 6 classes: {splits}/test",
    )
