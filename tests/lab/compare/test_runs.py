"""Several runs at a time: a signal ends them all, saved, with one line that says how the command continues."""

import os
import signal
import threading
from pathlib import Path

import pytest

from mnemos.lab.compare import runs as module
from mnemos.lab.compare.runs import RunsLeft, child_of_comparison
from mnemos.lab.errors import Interrupted, TrainingFailed
from mnemos.lab.run import progress
from mnemos.lab.run.progress import PLACE, FirstRun, LogProgress, Place
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
        monkeypatch.setattr(module, "train_apart", train)
        runs = [(recipe(name), tmp_path / "c" / name / "seed-0") for name in "abcd"]
        with pytest.raises(Interrupted) as found:
            module.train_several(runs, jobs=2)
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

    monkeypatch.setattr(module, "train_apart", train)
    monkeypatch.setattr(module.multiprocessing, "active_children", lambda: stopped.set() or [])
    with pytest.raises(Interrupted, match="the same command continues"):
        module.train_several([(recipe(name), tmp_path / name) for name in "ab"], jobs=2, keep_going=True)
    assert capsys.readouterr().out == ""


def test_a_child_that_is_interrupted_leaves_the_line_to_its_parent(capsys, monkeypatch):
    monkeypatch.setattr(module, "_stop_with_parent", lambda: None)  # the tests have no parent of their own
    with pytest.raises(SystemExit) as end, child_of_comparison():
        raise Interrupted("runs/c/a/seed-0: interrupted; continue with --resume")
    assert end.value.code == 130
    assert capsys.readouterr().err == ""


def test_the_estimate_counts_each_recipe_with_its_own_cost():
    time = 0.0
    left = RunsLeft(["a", "b", "a", "b", "a"], jobs=2, now=lambda: time)
    assert left.done("a", None) == "1 of 5 runs, 0:00:00", "nothing is known yet"
    time = 10.0
    assert left.done("a", 0.0) == "2 of 5 runs, 0:00:10, about 0:00:15 left", "three runs of 10 s, two at a time"
    time = 100.0
    assert left.done("b", 10.0) == "3 of 5 runs, 0:01:40, about 0:00:50 left"
    left.without(["b"])
    assert left.done("a", 90.0) == "4 of 4 runs, 0:01:40"


def test_the_first_run_that_begins_is_timed():
    left = RunsLeft(["a", "b", "a", "b"], jobs=2)
    left.done("a", None)
    places = [Place(2, 4, 2, first=True, new=True), Place(3, 4, 2, new=True), Place(4, 4, 2)]
    assert [left.started(name) for name in "aba"] == places, "the first run of all, and the first of each recipe"


@pytest.mark.parametrize("quiet", [False, True])
def test_the_first_run_says_how_long_all_will_take(monkeypatch, capsys, quiet):
    seconds = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False)
    token = PLACE.set(Place(2, 8, 2, first=True))
    try:
        display = progress.progress(quiet, "text", 100, 0)
        with display:
            for step in range(1, 11):  # half a second each
                display.updated(step, {"loss": 1.0, "lr": 1.0}, lambda: 0)
                seconds[0] += 0.5
        PLACE.set(Place(3, 8, 2))
        other = progress.progress(quiet, "text", 100, 0)
    finally:
        PLACE.reset(token)
    said = capsys.readouterr()
    assert said.out == "the updates of this run will take about 0:00:50, those of 7 runs like it 0:03:20\n"
    assert isinstance(display, FirstRun)
    assert not isinstance(other, FirstRun)
    assert quiet or " of training left " in said.err
    assert quiet or (said.err.startswith("[2/8] text 1/100") and isinstance(other, LogProgress))
