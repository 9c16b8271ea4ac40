"""A run of text with a cache per stream, from training to report: its score, controls of its state, what it wrote."""

import json
import math
import random
from dataclasses import replace

import pytest

from mnemos.lab.recipes.text import text as text_recipe
from mnemos.lab.report import report
from mnemos.lab.run.session import run
from mnemos.lab.run.trained import evaluate_run
from mnemos.lab.tasks.text import TextConfig

WORDS = ["the", "a", "cat", "dog", "<b>sees</b>", "&", "runs"]


@pytest.mark.slow
def test_a_run_of_text_says_what_its_memory_did(tmp_path, capsys):
    draw = random.Random(0)
    for split in ("train", "valid", "test"):
        text = " ".join(draw.choice(WORDS) for _ in range(500))
        (tmp_path / f"{split}.txt").write_text(text)
    recipe = text_recipe("cached")
    model = replace(recipe.model, dim=16, layers=1, num_heads=2, mlp=16)
    recipe = replace(
        recipe,
        model=replace(model, cache=replace(model.cache, length=4, block=8)),
        data=TextConfig(str(tmp_path), segment=32, longest=1000),
        train=replace(recipe.train, steps=3, batch_size=4, eval_every=3),
    )
    place = tmp_path / "run"
    result = run(recipe, place, quiet=True)
    test = result["test"]
    assert result["metric"] == "bits per byte"
    assert test["bits per byte"] == pytest.approx(test["loss"] / math.log(2))
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert all(
        one["bits per byte"] == pytest.approx(one["loss"] / math.log(2)) for one in lines if one["kind"] != "gates"
    )
    assert set(result["controls"]) == {"closed"}, "the model stores no content that could be emptied"
    assert not (place / "caches.safetensors").exists()
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
    for part in ("Was the memory used?", "exchanged with another row", "Written text", "test bits per byte"):
        assert part in page
    assert "all zero" not in page
    assert result["texts"][0]["given"] in (tmp_path / "valid.txt").read_text()
    assert "&lt;b&gt;sees" in page
    assert "<b>sees" not in page
