"""Runs of text with a memory, from training to report: Memformer's slots, and a gated cache per stream."""

import json
import math
import random

import pytest
from train_standins import train
from trained_runs import lines, numbers, result, stopped, trained

from mnemos.lab.report import report
from mnemos.lab.run.recipe import RolloutConfig
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.trained import evaluate_run
from mnemos.memory.gated_cache import GRC
from mnemos.memory.slots import SlotsConfig

WORDS = ["the", "a", "cat", "dog", "<b>sees</b>", "&", "runs"]
SMALL = {"dim": 16, "num_heads": 2, "mlp": 16}


def test_memformer_is_trained_resumed_and_writes(tmp_path, output):
    """Segments of 24 tokens are no divisor of the data's 64: states are carried from inside a segment."""
    for split, repeats in (("train", 3), ("valid", 20), ("test", 20)):
        (tmp_path / "text" / split).mkdir(parents=True)
        for i in range(8 if split == "train" else 1):
            sentence = f"{split} {i} is what this document says again and again. "
            (tmp_path / "text" / split / f"{i}.txt").write_text(sentence * repeats)
    model = SMALL | {"encoder_layers": 1, "decoder_layers": 1, "segment": 24, "memory": SlotsConfig(slots=4)}
    data = {"path": str(tmp_path / "text"), "segment": 64}
    settings = {"steps": 4, "batch_size": 4, "accumulate": 2, "log_every": 2, "eval_every": 4, "checkpoint_every": 2}
    settings |= {"rollout": RolloutConfig(segments=2), "valid_rows": 4, "test_rows": 4}
    whole = trained("text-memformer", tmp_path / "whole", model, data, **settings)
    train(read_recipe(whole), stopped(whole, tmp_path / "resumed", 4), resume=True, quiet=True)
    assert numbers(tmp_path / "resumed") == numbers(whole)
    assert output("sample", whole, "--length", "8", "--prompt", "1 is").startswith("1 is")


def test_a_run_of_text_says_what_its_memory_did(tmp_path, capsys):
    draw = random.Random(0)
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(250)))
    model = SMALL | {"layers": 1, "cache": GRC(scope="stream", length=4, block=8)}
    data = {"path": str(tmp_path), "segment": 32, "longest": 1000}
    place = trained("text-cached", tmp_path / "run", model, data, batch_size=4)
    ended = result(place)
    test = ended["test"]
    assert ended["metric"] == "bits per byte"
    assert test["bits per byte"] == pytest.approx(test["loss"] / math.log(2))
    scored = [one for one in lines(place) if one["kind"] != "gates"]
    assert all(one["bits per byte"] == pytest.approx(one["loss"] / math.log(2)) for one in scored)
    assert set(ended["controls"]) == {"closed"}, "the model stores no content that could be emptied"
    found = json.loads((place / "explain.json").read_text())["memory"]
    assert [entry["name"] for entry in found["memories"]] == ["whole state", "keys and values", "cache"]
    assert found["metric"] == "bits per byte"

    evaluate_run(place)
    printed = capsys.readouterr().out
    carried, emptied = found["carried"]["scores"], found["memories"][2]["emptied"]["scores"]
    name = "bits per byte"
    assert f"{carried[name]:.4f} {name}" in printed
    assert f"{emptied[name]:.4f} {name} ({emptied[name] - carried[name]:+.4f})" in printed

    page = report([place]).read_text()
    assert ended["texts"][0]["given"] in (tmp_path / "valid.txt").read_text()
    assert "&lt;b&gt;sees" in page
    assert "<b>sees" not in page


def test_controls_are_scored_in_the_arithmetic_of_the_score(tmp_path):
    """A branch with a closed gate is never read, so no control of it changes anything: also not by rounding."""
    model = SMALL | {"layers": 1, "cache": GRC(length=4, gate_init=-60.0)}
    data = {"train_size": 8, "valid_size": 8, "test_size": 32}
    place = trained("short-listops-cached", tmp_path / "run", model, data, batch_size=4, precision="bf16-mixed")
    ended = result(place)
    assert ended["controls"] == dict.fromkeys(("emptied", "exchanged", "closed"), ended["test"])
