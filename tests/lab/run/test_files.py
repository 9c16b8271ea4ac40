"""The files of a run's folder are read as they were written."""

import json
import math
from dataclasses import replace

import pytest
import torch
from train_standins import Toys

from mnemos.lab.run import checkpoint
from mnemos.lab.run.files import Measurement, Provenance, Result
from mnemos.lab.run.learner import Best
from mnemos.lab.run.run import Run
from mnemos.lab.tasks.metrics import ACCURACY
from mnemos.types import InputError

# With null for a score that was not finite.
WRITTEN = {
    **{"recipe": "toy", "seed": 3, "steps": 4, "test": {"loss": 1.5, "accuracy": None}, "valid": {"loss": 2.0}},
    **{"scored_rows": {"valid": 8, "test": 8}, "metric": "accuracy", "metrics": {}, "reference": {"a guess": 0.1}},
    **{"majority": None, "parameters": 12, "seconds": 1.25, "peak_bytes": 0, "tokens": 96, "unit": "tokens"},
    **{"update_flops": 10.0, "epoch_seconds": None, "best_step": 2, "flops": 5, "state_bytes": 0},
    **{"controls": {"emptied": {"loss": 1.75}}, "along": {"metric": "loss", "x": "place", "values": [[0, 1.0]]}},
}


def test_a_result_is_read_and_written_back(tmp_path):
    (tmp_path / Result.FILE).write_text(json.dumps(WRITTEN))
    found = Result.read(tmp_path)
    assert (found.split, found.score("loss"), found.score("loss", "emptied"), found.best_step) == ("test", 1.5, 1.75, 2)
    assert math.isnan(found.score("accuracy")), "null in the file"
    assert found.artifacts == {"along": WRITTEN["along"]}
    assert (found.rollout_segments, found.stopped_early, found.before, found.assessed) == (1, False, {}, True)
    found.write(tmp_path)
    written = json.loads((tmp_path / Result.FILE).read_text())
    assert math.isnan(written["test"].pop("accuracy"))
    assert written == WRITTEN | {"test": {"loss": 1.5}}


@pytest.mark.parametrize(
    "wrong", [*({"seconds": True}, {"along": {}}), *({"controls": {"emptied": 5}}, {"controls": {"emptied": None}})]
)
def test_a_result_with_another_entry_is_refused(tmp_path, wrong):
    (tmp_path / Result.FILE).write_text(json.dumps(WRITTEN | wrong))
    with pytest.raises(InputError, match=r"result\.json: expected \".*found .*; start a new run"):
        Result.read(tmp_path)


def test_the_last_of_a_runs_data_counts_and_what_is_not_known_is_kept(tmp_path):
    resumed = [{"step": 2, "data": {"sha256": "b"}}, {"step": 4}]
    written = {
        "commit": None,
        "dirty": None,
        "data": {"sha256": "a"},
        "resumed": resumed,
        "finished": None,
        "host": "x",
    }
    (tmp_path / Provenance.FILE).write_text(json.dumps(written))
    found = Provenance.read(tmp_path)
    assert found.latest("data") == {"sha256": "b"}
    assert found.latest("weights") is None
    replace(found, finished="now").write(tmp_path)
    assert json.loads((tmp_path / Provenance.FILE).read_text()) == written | {"finished": "now"}


def test_a_run_assesses_the_model_that_it_trained(tmp_path, monkeypatch):
    """It is built once; a run that was killed before it was assessed is assessed from its checkpoint, and equals it."""
    recipe, built = Toys(train={"steps": 4, "checkpoint_every": 2}).recipe(), []
    build = type(recipe.model).build
    monkeypatch.setattr(type(recipe.model), "build", lambda self: built.append(torch.empty(0).device) or build(self))
    run = Run.open(recipe, tmp_path / "run", quiet=True)
    assert not Result.exists(tmp_path / "run")
    trained = run.train()
    assert (trained.steps, trained.assessed) == (4, False)
    assessed = run.assess()
    assert [device.type for device in built] == ["meta", "cpu", "cpu"], "for the checks; once; to save, without values"
    assert assessed.assessed
    assert Result.read(tmp_path / "run") == assessed
    assert {one.kind for one in Measurement.read_all(tmp_path / "run")} == {"train", "valid"}
    trained.write(tmp_path / "run")
    again = Run.open(recipe, tmp_path / "run", resume=True, quiet=True)
    assert again.train() == trained
    assert replace(again.assess(), seconds=0) == replace(assessed, seconds=0)


def test_what_is_drawn_between_opening_and_training_changes_nothing(tmp_path):
    found = []
    for draws in (0, 5):
        run = Run.open(Toys(train={"steps": 2}).recipe(), tmp_path / str(draws), quiet=True)
        torch.rand(draws)
        run.train()
        saved = checkpoint.read(checkpoint.path_of(tmp_path / str(draws) / "checkpoints", 2))
        found.append(checkpoint.digest(*checkpoint.encode(saved["generators"])))
    assert found[0] == found[1]


def test_a_score_that_is_not_finite_is_never_the_best():
    none = Best().after(2, {"accuracy": math.nan}, ACCURACY)
    assert (none.step, none.since) == (0, 1)
    best = none.after(4, {"accuracy": 0.25}, ACCURACY).after(6, {"accuracy": math.inf}, ACCURACY)
    assert (best.step, best.score, best.since) == (4, 0.25, 1)
