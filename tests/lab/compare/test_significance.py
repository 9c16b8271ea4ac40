"""Intervals, Welch's test and Holm's correction against hand-computed cases and simulated comparisons."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mnemos.lab.compare.comparison import Comparison, Control, MetricByX, Row, ScoreAt, show
from mnemos.lab.compare.significance import (
    NO_SPREAD,
    ONE_SEED,
    Difference,
    Spread,
    differences,
    holm,
    interval,
    paired,
    spread,
    welch,
    wilson,
)

T2 = 4.302652730  # the 97.5 % point of Student's t with two degrees of freedom


def test_bounds_of_another_metric_do_not_cut():
    """An accuracy in per cent is outside of the bounds of a share."""
    low, high = interval(Spread(86.26, 0.5, 3), (0.0, 1.0))
    assert low < 86.26 < high
    low, high = welch(Spread(86.26, 0.5, 3), Spread(80.0, 0.5, 3), (0.0, 1.0)).interval
    assert low < 6.26 < high


def test_differences_end_at_the_width_of_the_bounds():
    low, high = spread([1.0, 2.5]), spread([1.5, 3.5])
    assert welch(high, low, (1.0, 3.5)).interval == welch(low, high, (1.0, 3.5)).interval == (-2.5, 2.5)
    assert paired([0.5, 2.0], (1.0, 3.5)).interval == (-2.5, 2.5)


def test_wilson_s_interval_of_a_share():
    # (p + z²/2n ± z·√(p(1 − p)/n + z²/4n²)) / (1 + z²/n) with z = 1.96, and 9 of 18.
    z = 1.959963985
    reach = z * math.sqrt(0.25 / 18 + z * z / (4 * 18**2)) / (1 + z * z / 18)
    assert wilson(9, 18) == pytest.approx((0.5 - reach, 0.5 + reach))
    assert wilson(18, 18)[1] == 1
    assert wilson(0, 5)[0] == 0


def test_the_interval_of_a_mean():
    assert interval(spread([1, 2, 3])) == pytest.approx((2 - T2 / math.sqrt(3), 2 + T2 / math.sqrt(3)))
    assert interval(spread([0.5, 0.5])) is None  # equal seeds do not make the mean exactly known
    assert interval(spread([1.0])) is None
    assert interval(spread([1.0, math.nan])) is None
    assert interval(spread([1, 2, 3]), (1.5, math.inf)) == pytest.approx((1.5, 2 + T2 / math.sqrt(3)))


def test_welch_by_hand():
    # Variances 2 of two values each: standard error √2, two degrees of freedom, for which P(|t|) = 1 − |t|/√(2 + t²).
    found = welch(spread([0.0, 2.0]), spread([4.0, 6.0]))
    assert found.difference == -4
    assert found.interval == pytest.approx((-4 - T2 * math.sqrt(2), -4 + T2 * math.sqrt(2)))
    assert found.p == pytest.approx(1 - math.sqrt(8) / math.sqrt(10))
    # Unequal variances and numbers: v = 0.5/2 + (7/3)/3, t = −(19/6)/√v, degrees of freedom by Welch and Satterthwaite.
    v, w = 0.5 / 2, 7 / 9
    t, f = 19 / 6 / math.sqrt(v + w), (v + w) ** 2 / (v**2 / 1 + w**2 / 2)
    x = np.arange(0, t, 1e-5) + 0.5e-5
    density = math.gamma((f + 1) / 2) / (math.sqrt(f * math.pi) * math.gamma(f / 2)) * (1 + x**2 / f) ** (-(f + 1) / 2)
    assert welch(spread([1, 2]), spread([3, 5, 6])).p == pytest.approx(1 - 2e-5 * density.sum(), abs=1e-4)
    # se² = .034²/3 + .007²/3, 2.1692 degrees of freedom, t = 3.9964.
    found = welch(Spread(0.559, 0.007, 3), Spread(0.512, 0.034, 3))
    assert found.interval == pytest.approx((-0.0331, 0.1271), abs=1e-4)
    # One side has no spread: the other's standard error 1, one degree of freedom, for which P(|t| > 1) = 1/2.
    assert welch(spread([0.17, 0.17]), spread([0.17, 2.17])).p == pytest.approx(0.5)
    unknown = [([1, 1], [1, 1, 1]), ([1, 1], [0.5, 0.5]), ([1.0], [1, 2]), ([1, 2], [1.0]), ([1.0, math.inf], [1, 2])]
    assert all(welch(spread(a), spread(b)).interval is None for a, b in unknown)


def test_differences_of_the_same_models_are_taken_run_by_run():
    assert paired([0.0, 0.0]).interval == (0, 0), "the control changed no score"
    assert paired([0.1, 0.1]).interval is None, "equal differences of coarse scores are a coincidence"
    assert paired([0.2]).interval is None
    assert paired([1, 2, 3]).interval == pytest.approx((2 - T2 / math.sqrt(3), 2 + T2 / math.sqrt(3)))
    assert paired([]) is None
    assert paired([0.1, 0.2, -0.3]).difference == 0, "not the rounding error of their sum"
    assert (paired([1e6, 1e6 + 1e-4]).interval, paired([1e-6, 2e-6]).difference) == (None, 1.5e-6)
    for change in (math.nan, -math.inf):  # a model that a control breaks is not left out of the mean
        found = paired([change, 0.1, 0.2])
        assert (math.isnan(found.difference), found.interval) == (True, None)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def drawn(rng: np.random.Generator, means: dict[str, float]) -> dict[str, Spread]:
    return {name: spread(rng.normal(mean, 1, 5).tolist()) for name, mean in means.items()}


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_among_equal_rows_a_difference_is_shown_in_at_most_one_of_twenty_comparisons(count):
    rng = np.random.default_rng(0)
    false, uncorrected = 0, 0
    for _ in range(count):
        tests = differences(drawn(rng, dict.fromkeys("abcdef", 0.0)), "a")
        false += any(one.finding(True) in ("better", "worse") for one in tests.values())
        uncorrected += any(one.p < 0.05 for one in tests.values())
    assert false <= 0.05 * count
    assert uncorrected > 0.1 * count  # the test is able to fail


def test_true_differences_are_shown_in_the_metric_s_direction():
    tests = differences(drawn(np.random.default_rng(1), {"a": 0.0, "b": 0.0, "c": 6.0, "d": -6.0}), "a")
    assert [tests[name].finding(True) for name in "bcd"] == ["no significant difference", "better", "worse"]
    assert [tests[name].finding(False) for name in "cd"] == ["worse", "better"]
    for ends, p in (((0.1, 0.5), 0.05), ((0.0, 0.5), 0.01), ((-0.5, 0.0), 0.01)):
        assert Difference(0.3, ends, 0.001, p).finding(True) == "no significant difference"


def test_where_p_underflows_the_interval_is_the_strictest():
    far = Spread(1000.0, 1.0, 200)
    found = differences({"a": Spread(0.0, 1.0, 200), "b": far, "c": far, "one": Spread(0.0, math.nan, 1)}, "a")
    assert (found["b"].p, found["b"].p_holm, found["one"].interval) == (0, 0, None)
    assert found["b"].interval == welch(far, Spread(0.0, 1.0, 200), level=0.025).interval


def comparison(scores: dict[str, list[float]], against: str) -> Comparison:
    spreads = {name: spread(values) for name, values in scores.items()}
    tests = {name: test for name, test in differences(spreads, against).items() if test.interval}
    rows = tuple(Row(n, *one, interval=interval(one, (0.0, 1.0)), against=tests.get(n)) for n, one in spreads.items())
    return Comparison("accuracy", True, rows, bounds=(0.0, 1.0), against=against)


def shown(scores: dict[str, list[float]], capsys) -> str:
    show(comparison(scores, "plain"))
    return capsys.readouterr().out


def test_the_table_says_where_there_is_no_interval(capsys):
    for more in ([0.18, 0.19], [0.18, 0.18]):
        said = shown({"plain": [0.17, 0.17], "more": more}, capsys)
        assert "0.1700 to 0.1700" not in said
        assert NO_SPREAD in said
    assert "0.3732 to 1.0000" in shown({"plain": [0.17, 0.17], "more": [0.9, 0.99]}, capsys)
    said = shown({"plain": [0.5], "more": [0.8]}, capsys)
    assert ONE_SEED in said
    assert not any(words in said for words in ("better", "learning rate"))


def test_all_that_a_table_prints(capsys):
    scores = {"plain": [0.5, 0.51, 0.49], "more": [0.96, 0.99, 0.97], "same": [0.5, 0.52, 0.48], "one": [0.4]}
    made = comparison(scores, "plain")
    costs = {"parameters": 1234567, "flops": 2345678, "state_bytes": 1536, "seconds": 12.34, "peak_bytes": 5 * 2**20}
    costs |= {"steps": 1000, "tokens": 64000, "train_flops": 7.891e15, "rate": 1e-3}
    along = MetricByX("accuracy", "words back", (ScoreAt(32, 0.5, 0.25, 2), ScoreAt(0.5, 1.0, math.nan, 1)))
    rows = replace(made.rows[0], **costs), replace(made.rows[1], along=along), *made.rows[2:]
    controls = Control("more", "emptied", 0.25, 0.125, 3), Control("more", "closed", 0.75)
    equal = {"equal": "updates", "parameters": True, "early": ["one", "more"]}
    show(replace(made, rows=rows, unit="rows", controls=controls, reference={"a guess": 0.45}, equal=equal))
    low, high = welch(spread(scores["more"]), spread(scores["plain"]), level=0.025).interval  # the less of two p
    found = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert found[:7] == [
        "accuracy seeds 95 % interval difference to plain p (Holm) shown learning rate",
        "plain 0.5000 ± 0.0100 3 0.4752 to 0.5248 reference 1.0e-03",
        f"more 0.9733 ± 0.0153 3 0.9354 to 1.0000 +0.4733 ({low:+.4f} to {high:+.4f}) 1.35e-05 better",
        *("cache emptied 0.2500 ± 0.1250 3", "cache closed 0.7500 1"),
        "same 0.5000 ± 0.0200 3 0.4503 to 0.5497 +0.0000 (-0.0416 to +0.0416) 1 no significant difference",
        "one 0.4000 1 – –",
    ]
    assert found[7:] == [
        "a guess 0.4500",
        "equal updates of equal batches, and equal parameters (within 5 %); but train.patience stopped runs of one, "
        "more before that",
        "caches emptied (stored caches set to zero), closed (every gate closed, with the trained weights)",
        "No better than a guess, 0.450 accuracy: one 0.400.",
        "differences: Welch's t-test against plain, 95 % interval and p corrected over the rows by Holm; no difference "
        "is shown where p ≥ 0.05",
        "intervals end at 0 and 1: accuracy has no value beyond",
        "parameters steps rows read training TFLOP forward MFLOP/row state KiB seconds passed peak MiB",
        "plain 1,234,567 1,000 64,000 7.89e+03 2.35 1.5 12.3 5",
        *(f"{name} – – – – – – – –" for name in ("more", "same", "one")),
        "state KiB: what the model keeps of a row from one call to the next, after a row of the greatest length",
        *("accuracy by words back", "32 0.5", "more 0.5000 ± 0.2500 1.0000"),
    ]


def test_scores_that_are_not_finite_have_no_spread():
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)), 2)
    for values in ([math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0]):
        found = spread(values)
        assert (math.isnan(found.std), math.isfinite(found.mean), found.seeds) == (True, False, 2)
