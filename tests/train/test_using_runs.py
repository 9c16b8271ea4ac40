"""What one does with a finished run: load its model, score it on other data, start from it, extend it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mnemos
from mnemos import InputError, registry
from mnemos.cli import main
from mnemos.data.text import TextConfig
from mnemos.train.recipe import Recipe
from mnemos.train.session import evaluate_run, run


def texts(folder: Path, letters: str) -> str:
    for i, letter in enumerate(letters):
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.txt").write_text(f"{letter} and {i} " * 300)
    return str(folder)


def recipe(folder: str, **train: object) -> Recipe:
    base = registry.load("recipe", "text-linear")()
    settings = {"steps": 4, "eval_every": 2, "batch_size": 2, "log_every": 1, "checkpoint_every": 2}
    return replace(
        base,
        model=replace(base.model, dim=16, layers=1, num_heads=2, mlp=16),
        data=TextConfig(folder, segment=32),
        train=replace(base.train, **settings | {"accelerator": "cpu"} | train),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("use")
    run(recipe(texts(folder / "texts", "abcd")), folder / "run", quiet=True)
    return folder / "run"


def test_a_model_is_loaded_from_its_run(finished, tmp_path):
    of_run, of_model = mnemos.load(finished), mnemos.load(finished / "model")
    assert all(torch.equal(a, b) for a, b in zip(of_run.parameters(), of_model.parameters(), strict=True))
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(InputError, match=r"expected a finished run .* --resume"):
        mnemos.load(tmp_path)


def test_a_run_is_scored_on_other_data(finished, tmp_path, capsys):
    own = evaluate_run(finished)["as trained"]
    other = texts(tmp_path / "other", "xyzuvw")
    assert main(["eval", str(finished), "--data.path", other, "--data.held_out=0.3"]) == 0
    said = capsys.readouterr().out
    assert "test   2 files" in said
    assert f"loss {own['loss']:.4f}" not in said.split("test split of")[-1]
    assert json.loads((finished / "recipe.json").read_text())["data"]["path"] != other
    for words, expected in (
        (["--model.dim", "8"], "settings of the data"),
        (["--data.pth", other], "did you mean --data.path"),
        (["--data.segment", "64"], "model.max_length"),
    ):
        assert main(["eval", str(finished), *words]) == 2
        assert expected in capsys.readouterr().err
