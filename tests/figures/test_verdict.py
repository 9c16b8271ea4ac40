import math

import pytest

from mnemos.figures.results import Comparison, Control, Row
from mnemos.figures.verdict import difference, verdict

PLAIN = {"mean": 0.500, "std": 0.010, "parameters": 70_000}
EQUAL = {"mean": 0.505, "std": 0.010, "parameters": 91_000}
CACHED = {"mean": 0.600, "std": 0.010, "parameters": 91_400}


def made(cached=CACHED, plain=PLAIN, equal=EQUAL, emptied=None, seeds=5, majority=None, higher=True):
    arms = {"plain": plain, "cached": cached, "equal": equal}
    rows = tuple(Row(n, a["mean"], a["std"], seeds, a["parameters"]) for n, a in arms.items() if a)
    controls = (Control("cached", "emptied", emptied, 0.010, seeds),) if emptied is not None else ()
    if emptied is None:
        controls = (Control("cached", "closed", 0.1, 0.01, seeds),)
    return Comparison("accuracy" if higher else "loss", higher, majority, rows, controls, {}, "test")


def test_the_memory_pays():
    said = verdict(made(emptied=0.45))
    assert said[0].endswith("here the memory itself pays.")
    assert "better than plain, the smaller model without a memory" in said[1]
    assert "better than equal, of equal parameters and no memory" in said[1]
    assert "Emptying the cache at evaluation hurts (−0.150" in said[1]


def test_better_than_equal_but_as_good_when_emptied():
    assert verdict(made(emptied=0.601))[0].endswith("the gain is not its memory's.")


def test_better_than_plain_alone_is_the_parameters():
    said = verdict(made(equal=EQUAL | {"mean": 0.598}, emptied=0.599))
    assert said[0].startswith("The gain of cached is no more than equal parameters give")
    assert "used" not in said[0]


def test_used_but_no_better():
    said = verdict(made(equal=EQUAL | {"mean": 0.598}, emptied=0.3))
    assert said[0].endswith("Its cache is used, but equal parameters without one do no worse.")


def test_within_the_spread_is_no_gain():
    said = verdict(made(cached=CACHED | {"mean": 0.506}, emptied=0.505))
    assert said[0] == "No gain is shown for the memory of cached."
    assert "within the spread between seeds" in said[1]


def test_worse_is_said():
    said = verdict(made(cached=CACHED | {"mean": 0.400}, emptied=0.400))
    assert said[0] == "No gain is shown for the memory of cached."
    assert "It is worse than plain" in said[1]


def test_without_an_equal_arm_or_an_emptied_cache_the_question_is_open():
    assert "no arm of equal parameters was run" in verdict(made(equal=None, emptied=0.45))[0]
    said = verdict(made())
    assert said[0].endswith("an emptied cache would tell.")
    assert "The cache was not emptied at evaluation." in said[1]


def test_one_seed_claims_nothing():
    said = verdict(made(emptied=0.2, seeds=1))
    assert said[0] == ("Every arm was run with one seed: there is no spread to judge by, and nothing can be claimed.")
    assert not any(word in " ".join(said) for word in ("pays", "better than", "hurts", "No gain"))
    assert "It is ahead of plain" in said[1]


def test_a_lower_loss_is_better():
    cached, other = CACHED | {"mean": 1.0}, {"mean": 1.2, "std": 0.010, "parameters": 91_000}
    said = verdict(made(cached=cached, plain=None, equal=other, emptied=1.5, higher=False))
    assert said[0].endswith("here the memory itself pays.")
    assert "(−0.200, 95% interval −0.2" in said[1]
    assert "hurts (+0.500" in said[1]


def test_no_better_than_the_majority_class():
    assert "cached does no better than" in verdict(made(cached=CACHED | {"mean": 0.1}, majority=0.106))[-1]
    assert verdict(made(majority=0.106))[-1].startswith("For scale")


def test_without_results_or_counterparts():
    nothing = Row("a", math.nan, math.nan, 0)
    assert "nothing to say" in verdict(Comparison("accuracy", True, None, (nothing,), (), {}, "test"))[0]
    rows = (Row("a", 0.5, 0.01, 5), Row("b", 0.7, 0.01, 5))
    said = verdict(Comparison("accuracy", True, None, rows, (), {}, "test"))
    assert said[0].startswith("b reaches a test accuracy of 0.700")
    assert "It is better than a (0.500" in said[0]


def test_interval_is_welch_s():
    # Worked by hand: se² = .034²/3 + .007²/3, 2.17 degrees of freedom (taken as 2), t = 4.303.
    a, b = Row("a", 0.559, 0.007, 3), Row("b", 0.512, 0.034, 3)
    d = difference(a, b, higher_is_better=True)
    assert d.value == pytest.approx(0.047)
    assert (d.low, d.high) == (pytest.approx(-0.0392, abs=2e-4), pytest.approx(0.1332, abs=2e-4))
    assert d.says == "alike"
    assert difference(b, a, higher_is_better=False).value == pytest.approx(0.047)


def test_many_seeds_approach_the_normal_interval():
    a, b = Row("a", 1.0, 1.0, 31), Row("b", 0.0, 1.0, 31)
    d = difference(a, b, higher_is_better=True)
    assert d.high - d.value == pytest.approx(2.0003 * math.sqrt(2 / 31), rel=1e-3)  # t at 60 degrees of freedom
