"""Several runs at a time: a signal ends them all, saved, with one line that says how the command continues."""

import os
import signal
import threading
from pathlib import Path

import pytest

from mnemos.errors import Interrupted, TrainingFailed
from mnemos.lab.compare import apart, several
from mnemos.lab.compare.apart import child_of_comparison
from mnemos.lab.run.recipe import Recipe


def recipe(name: str) -> Recipe:
    return Recipe(None, None, name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_runs_with_one_line(monkeypatch, tmp_path, number):
    began, ended = [], threading.Barrier(2)

    def train(given: Recipe, place: Path, quiet: bool) -> None:
        began.append(given.name)
        if ended.wait(10) == 0:
            os.kill(os.getpid(), number)
        raise Interrupted(f"{place}: interrupted")

    def unhandled(*_: object) -> None:
        raise AssertionError("the signal ended the command")

    before = {each: signal.signal(each, unhandled) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        monkeypatch.setattr(several, "train_apart", train)
        runs = [(recipe(name), tmp_path / "c" / name / "seed-0") for name in "abcd"]
        with pytest.raises(Interrupted) as found:
            several.train_several(runs, jobs=2)
        assert signal.getsignal(number) is unhandled, "the handlers are those of before"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if "the same command continues" not in str(found.value):  # the thread's own error may come first
        assert str(found.value).endswith("seed-0: interrupted")
    assert len(began) == 2, "no other run begins"


def test_a_run_that_is_stopped_while_it_starts_is_not_told_as_a_failure(capsys, monkeypatch, tmp_path):
    """A child without its handlers yet is ended by the signal: it has no code of an interruption."""
    stopped, ended = threading.Event(), threading.Barrier(2)

    def train(given: Recipe, place: Path, quiet: bool) -> None:
        if ended.wait(10) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(10)
        raise TrainingFailed(f"{place}: the run failed with exit code -15")

    monkeypatch.setattr(several, "train_apart", train)
    monkeypatch.setattr(several.multiprocessing, "active_children", lambda: stopped.set() or [])
    with pytest.raises(Interrupted, match="the same command continues"):
        several.train_several([(recipe(name), tmp_path / name) for name in "ab"], jobs=2, keep_going=True)
    assert capsys.readouterr().out == ""


def test_a_child_that_is_interrupted_leaves_the_line_to_its_parent(capsys, monkeypatch):
    monkeypatch.setattr(apart, "_stop_with_parent", lambda: None)  # the tests have no parent of their own
    with pytest.raises(SystemExit) as end, child_of_comparison():
        raise Interrupted("runs/c/a/seed-0: interrupted; continue with --resume")
    assert end.value.code == 130
    assert capsys.readouterr().err == ""
