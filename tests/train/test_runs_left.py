"""The time that several runs will take."""

from mnemos.train.runs_left import RunsLeft


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
