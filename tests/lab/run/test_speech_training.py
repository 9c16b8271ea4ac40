"""Speech from recipe to report: what is trained, printed, compared and shown is the token error rate."""

from dataclasses import replace
from pathlib import Path

import pytest
from spoken_standins import write_recordings
from trained_runs import lines

from mnemos import load, registry
from mnemos.lab.run.recipe import Recipe
from mnemos.lab.run.session import run
from mnemos.lab.run.trained import evaluate_run

pytestmark = pytest.mark.usefixtures("forked_comparisons")

RATE = "token error rate"


def small(variant: str, folder: Path, steps: int = 4) -> Recipe:
    recipe = registry.load("recipe", f"spoken-digits-{variant}")()
    data = replace(recipe.data, path=str(folder), longest=2, test_takes=1, valid_takes=1, rows=6)
    model = replace(recipe.model, vocab_size=2, bands=40, layers=1, dim=16)
    if variant != "bilstm":
        model = replace(model, num_heads=2, mlp=32)
    train = replace(recipe.train, steps=steps, batch_size=4, log_every=2, eval_every=2, checkpoint_every=steps)
    return replace(recipe, model=model, data=data, train=replace(train, accelerator="cpu"))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory) -> Path:
    return write_recordings(tmp_path_factory.mktemp("spoken"), takes=4)


def test_a_run_tells_its_token_error_rate(spoken, tmp_path, capsys):
    recipe = small("linear", spoken)
    result = run(recipe, tmp_path / "run")
    assert f"{RATE} {result['test'][RATE]:.4f}" in capsys.readouterr().out
    for score in (result["test"], result["valid"], *lines(tmp_path / "run")):
        assert score[RATE] == pytest.approx(1 - score["accuracy"])
    # Four updates of four strings of one or two words; eight recordings are trained on.
    assert result["epoch_seconds"] == pytest.approx(result["seconds"] / 4 * 8 / (4 * 1.5), rel=0.05, abs=2e-3)
    task = recipe.data.build()
    assert result["tokens"] == sum(_frames(task.train_batch(i, 4, 0)) for i in range(4))
    assert result["transcriptions"]
    assert set(" ".join(one["said"] for one in result["transcriptions"]).split()) <= {"low", "high"}
    scores = evaluate_run(tmp_path / "run")
    assert scores["as trained"][RATE] == pytest.approx(result["test"][RATE])
    batch = next(task.batches("test", 3))
    assert len(load(tmp_path / "run" / "model").transcribe(batch.inputs, batch.mask)) == 3


def _frames(batch) -> int:
    return batch.inputs.shape[:2].numel() if batch.mask is None else int(batch.mask.sum())
