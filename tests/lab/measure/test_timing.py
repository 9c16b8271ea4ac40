import pytest

from mnemos.lab.measure import timing


def test_rounds_take_turns_and_the_order_rotates(monkeypatch):
    monkeypatch.setattr(timing, "LEAST", 0.0)
    said = []
    runs = {name: lambda name=name: said.append(name) for name in "abc"}
    times = timing.race(runs, 3)
    assert "".join(said) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(each) for name, each in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_short_call_is_repeated_and_its_time_is_that_of_one():
    times = []  # of the calls, a sixteenth of a second each
    assert timing.race({"run": lambda: times.append(1)}, 1, lambda: len(times) / 16) == {"run": [1 / 16]}
    assert len(times) == 1 + 3, "one that is not timed, and those of 0.15 seconds"


def test_a_ratio_is_taken_round_by_round():
    times = {"host": [1.0, 10.0, 2.0], "cached": [2.0, 20.0, 4.0]}
    assert timing.ratio(times, "cached", "host") == pytest.approx((2.0, 2.0, 2.0))
    assert timing.ratio({"host": [2.0], "cached": [3.0]}, "cached", "host") == (1.5, 1.5, 1.5)
    assert timing.ratio({"a": [1.0] * 4, "b": [1.0, 2.0, 3.0, 4.0]}, "b", "a").median == 2.5
