"""Speech from recipe to report: what is trained, printed and shown is the token error rate."""

import pytest
from trained_runs import lines, result

from mnemos import load
from mnemos.lab.run.recipe_files import read_recipe
from mnemos.lab.run.session import run
from mnemos.lab.run.trained import evaluate_run

RATE = "token error rate"


def test_a_run_tells_its_token_error_rate(spoken_run, capsys):
    found = run(None, spoken_run, resume=True)
    assert f"{RATE} {found['test'][RATE]:.4f}" in capsys.readouterr().out
    for score in (found["test"], found["valid"], *lines(spoken_run)):
        assert score[RATE] == pytest.approx(1 - score["accuracy"])
    # Four updates of four strings of one or two words; eight recordings are trained on.
    assert found["epoch_seconds"] == pytest.approx(found["seconds"] / 4 * 8 / (4 * 1.5), rel=0.05, abs=2e-3)
    task = read_recipe(spoken_run).data.build()
    read = [task.train_batch(i, 4, 0) for i in range(4)]
    frames = (b.inputs.shape[:2].numel() if b.mask is None else int(b.mask.sum()) for b in read)
    assert result(spoken_run)["tokens"] == sum(frames)
    assert found["transcriptions"]
    assert set(" ".join(one["said"] for one in found["transcriptions"]).split()) <= {"low", "high"}
    assert evaluate_run(spoken_run)["as trained"][RATE] == pytest.approx(found["test"][RATE])
    batch = next(task.batches("test", 3))
    assert len(load(spoken_run / "model").transcribe(batch.inputs, batch.mask)) == 3
