"""A disk that a run fills, and two processes in one folder; `make soak` has more of them, and fifty kills of a run."""

import itertools
import time

import processes
import pytest
import soak_faults
from train_standins import train

from mnemos.lab.cli import main
from mnemos.lab.run import folder

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def from_the_server(forks, monkeypatch):
    """The tests' own process has threads: it must not be forked."""
    monkeypatch.setattr(soak_faults.Child, "context", processes.CONTEXT)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["disks", "races"])
def test_the_run_goes_on_as_if_nothing_had_been(tmp_path, kind):
    count, failed = getattr(soak_faults, kind)(tmp_path, 2, lambda _: None)
    assert not failed
    if isinstance(count, str):
        pytest.skip(count)
    assert count == 2


def test_a_clock_that_jumps_changes_no_number(tmp_path, monkeypatch):
    train(soak_faults.SHORT.recipe(), tmp_path / "steady", quiet=True)
    jumps = itertools.cycle([4e9, 0.0, 1e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    dates = itertools.cycle(["2100-01-01T00:00:00", "1970-01-01T00:00:00"])
    monkeypatch.setattr(folder, "now", lambda: next(dates))
    train(soak_faults.SHORT.recipe(), tmp_path / "jumping", quiet=True)
    (tmp_path / "jumping/result.json").unlink()
    train(soak_faults.SHORT.recipe(), tmp_path / "jumping", resume=True, quiet=True)
    assert soak_faults.numbers(tmp_path / "jumping") == soak_faults.numbers(tmp_path / "steady")


def test_data_that_are_gone_are_one_line_and_back_the_run_goes_on(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("the cat sat on the mat. " * 1000)
    few = "--model.dim 8 --model.layers 1 --model.num-heads 2 --model.mlp 8 --data.segment 16 --train.batch-size 2"
    few += " --train.steps 2 --train.checkpoint-every 1 --train.valid-rows 2 --train.test-rows 2"
    few += " --train.accelerator cpu"
    run = str(tmp_path / "run")
    assert main(["train", "text", "--data.path", str(tmp_path / "data"), *few.split(), "--out", run]) == 0
    (tmp_path / "run/result.json").unlink()
    (tmp_path / "data").rename(tmp_path / "gone")
    capsys.readouterr()
    assert main(["train", "--resume", run]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "gone").rename(tmp_path / "data")
    assert main(["train", "--resume", run]) == 0
