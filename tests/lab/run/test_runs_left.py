"""The time that several runs will take."""

import pytest

from mnemos.lab.compare.runs_left import RunsLeft
from mnemos.lab.run import progress
from mnemos.lab.run.progress import PLACE, FirstRun, LogProgress, Place


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
