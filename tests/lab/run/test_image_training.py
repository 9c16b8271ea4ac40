import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace

import processes
import pytest
import torch
from conv_standins import CLASSES, BlobsConfig, ConvConfig, recipe
from train_standins import train

import mnemos
from mnemos import registry
from mnemos.lab.compare.compare import compare
from mnemos.lab.errors import Interrupted
from mnemos.lab.run import checkpoint, loop
from mnemos.lab.run.checks import complete
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.session import run
from mnemos.lab.run.trained import evaluate_run
from mnemos.lab.tasks.augment import AugmentConfig
from mnemos.lab.tasks.images import DigitsConfig
from mnemos.libraries import timm
from mnemos.models.transformer import TransformerConfig
from mnemos.types import InputError

STILL = {"dropout": 0.0}


@pytest.fixture
def named():
    registry.register(ConvConfig)
    registry.register(BlobsConfig)
    yield
    registry.remove("model", "conv")
    registry.remove("data", "blobs")


def lines(folder, kind: str) -> list[dict]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in ("seconds", "kind")} for line in found if line["kind"] == kind]


def final(folder, step: int = 12) -> dict[str, torch.Tensor]:
    return checkpoint.read(checkpoint.path_of(folder / "checkpoints", step))["model"]


def test_a_run_on_images(tmp_path, named, capsys, monkeypatch):
    asked = recipe({"classes": 0, "image": 0, "channels": 0}, {"soft": True}, steps=40, eval_every=30)
    result = run(asked, tmp_path / "run")
    assert set(result["test"]) == set(result["valid"]) == {"loss", "accuracy", "top5"}
    assert result["test"]["accuracy"] <= result["test"]["top5"] <= 1
    assert result["tokens"] == 40 * 4, "images"
    # 2·outputs·(inputs a kernel) a convolution: 36 places of 6 channels, 9 of 8; then the classifier.
    assert result["flops"] == 2 * (36 * 6 * 27 + 9 * 8 * 54 + 8 * CLASSES)
    losses = [line["loss"] for line in lines(tmp_path / "run", "train")]
    assert losses[-1] < 0.8 * losses[0]
    written = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert (written["model"]["classes"], written["model"]["image"], written["model"]["channels"]) == (CLASSES, 12, 3)
    model = mnemos.load(tmp_path / "run" / "model")
    task = BlobsConfig().build()
    batch = next(task.batches("test", 9))
    five = model(batch.inputs)[0].topk(5).indices
    assert result["test"]["top5"] == pytest.approx((five == batch.targets[:, None]).any(1).float().mean().item())
    assert f"top-5 {result['test']['top5']:.4f}" in capsys.readouterr().out
    monkeypatch.setattr("mnemos.lab.run.progress.INTERVAL", 0.0)
    scores = evaluate_run(tmp_path / "run")
    assert scores["as trained"] == pytest.approx(result["test"])
    said = capsys.readouterr()
    assert f"top-5 {result['test']['top5']:.4f}" in said.out
    assert f"{asked.name} evaluating test" in said.err
    # A comparison leaves the same to the data, and finds its finished runs again.
    assert complete(asked, BlobsConfig().build()).model == ConvConfig()


class StopError(Exception):
    pass


@pytest.mark.parametrize(("policy", "workers"), [("timm", 1), pytest.param("light", 0, marks=pytest.mark.exhaustive)])
def test_resume_is_exact(tmp_path, monkeypatch, workers, policy):
    """Dropout, augmentation and gates with a rate of their own; broken off in update 8, saved after 6."""
    timm()
    data = {"augment": AugmentConfig(policy)}
    train(recipe(data=data, optim={"gate_lr_scale": 5.0}), tmp_path / "whole", quiet=True)
    original = loop.set_lr

    def breaking(optimiser, optim, step, *rest):
        if step == 8:
            raise StopError
        return original(optimiser, optim, step, *rest)

    asked = recipe(data={**data, "workers": workers}, optim={"gate_lr_scale": 5.0})
    monkeypatch.setattr(loop, "set_lr", breaking)
    with pytest.raises(StopError) as held:  # with it, the frames of the run
        train(asked, tmp_path / "run", quiet=True)
    monkeypatch.setattr(loop, "set_lr", original)
    assert not [c for c in multiprocessing.active_children() if c.daemon], "no process is left behind"
    del held
    assert checkpoint.steps(tmp_path / "run" / "checkpoints")[0] == 6
    train(asked, tmp_path / "run", resume=True, quiet=True)
    assert not [c for c in multiprocessing.active_children() if c.daemon]
    whole, again = final(tmp_path / "whole"), final(tmp_path / "run")
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    for kind in ("train", "valid"):
        assert lines(tmp_path / "run", kind) == lines(tmp_path / "whole", kind)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (recipe({"classes": 5}), "model.classes is 5, but the data needs 7; use model.classes 7"),
        (recipe(data={"workers": -1}), "data.workers: expected at least 0, found -1; raise it"),
        (recipe(data={"augment": AugmentConfig("timm", mixup=-1.0)}), "data.augment.mixup must be at least 0"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, asked, words):
    with pytest.raises(InputError, match=words) as error:
        train(asked, tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_tokens_and_images_are_not_confused(tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    for model, data, words in (
        (ConvConfig(), DigitsConfig(), "conv takes images, but the data digits gives tokens; .* data.layout image"),
        (TransformerConfig(vocab_size=17), BlobsConfig(), r"takes tokens, .* gives images; use another recipe$"),
    ):
        with pytest.raises(InputError, match=words):
            train(replace(recipe(), model=model, data=data), tmp_path / "run", quiet=True)


def test_a_comparison_fills_in_what_is_left_to_the_data(tmp_path, named, runs_here):
    runs = []
    runs_here(lambda recipe, folder: runs.append(recipe))
    with pytest.raises(InputError, match=r"result\.json: expected this file of a run, found none"):
        compare([recipe({"classes": 0})], tmp_path / "c", of_claim=True)
    assert runs[0].model.classes == CLASSES


def work(folder: str, recipe: Recipe, resume: bool = False) -> None:
    """Train in a process of its own; exit code 130 where it was interrupted."""
    try:
        train(recipe, folder, resume=resume, quiet=True)
    except Interrupted:
        raise SystemExit(130) from None


def test_a_terminals_interrupt_reaches_the_workers_and_saves(tmp_path, forks):
    """Ctrl-C goes to every process of the terminal; the run saves, ends, and goes on as if it had not been."""
    settings = {"steps": 30, "log_every": 1, "eval_every": 30, "checkpoint_every": 30}
    asked = recipe(data={"workers": 1}, **settings)
    process = processes.Process(work, str(tmp_path / "run"), asked)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 1):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    done = process.wait(60)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    stopped = checkpoint.steps(tmp_path / "run" / "checkpoints")
    assert len(stopped) == 1
    assert 0 < stopped[0] < 30
    alone = recipe(**settings)
    train(replace(asked, data=alone.data), tmp_path / "alone", quiet=True)
    train(asked, tmp_path / "run", resume=True, quiet=True)
    assert lines(tmp_path / "run", "train") == lines(tmp_path / "alone", "train")
