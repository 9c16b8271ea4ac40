"""Memformer in the trainer: documents whose segments are not the model's, carried, saved, gone on with and sampled."""

import dataclasses
import json
import shutil

import pytest

from mnemos import registry
from mnemos.lab.cli import main
from mnemos.lab.run import checkpoint
from mnemos.lab.run.session import run
from mnemos.memory.slots import SlotsConfig
from mnemos.models.memformer import MemformerConfig


def recipe(name: str, **data):
    found = registry.load("recipe", name)()
    model = MemformerConfig(
        vocab_size=found.model.vocab_size,
        dim=16,
        encoder_layers=1,
        decoder_layers=1,
        num_heads=2,
        mlp=16,
        segment=24,  # no divisor of the data's 64: states are carried from inside a segment
        memory=SlotsConfig(slots=4),
    )
    train = {
        "steps": 4,
        "batch_size": 4,
        "accumulate": 2,
        "eval_every": 2,
        "log_every": 2,
        "checkpoint_every": 2,
        "accelerator": "cpu",
    }
    return dataclasses.replace(
        found,
        model=model,
        data=dataclasses.replace(found.data, **data),
        train=dataclasses.replace(found.train, **train),
    )


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["kind"], line["step"], line["loss"]) for line in lines]


@pytest.mark.slow
def test_text_is_learned_resumed_and_written(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} is what this document says again and again. " * 24)
    whole = recipe("text", path=str(tmp_path / "text"), segment=64)
    run(whole, tmp_path / "whole", quiet=True)
    # As if it had been stopped after its second update.
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    (tmp_path / "resumed" / "result.json").unlink()
    checkpoint.path_of(tmp_path / "resumed" / "checkpoints", 4).unlink()
    run(None, tmp_path / "resumed", resume=True, quiet=True)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert main(["sample", str(tmp_path / "whole"), "--length", "8", "--prompt", "1 is"]) == 0
    assert capsys.readouterr().out.startswith("1 is")
