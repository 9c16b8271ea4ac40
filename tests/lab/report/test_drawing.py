import math

import numpy as np

from mnemos.lab.report.charts import Series
from mnemos.lab.report.curves import every_nth
from mnemos.lab.report.gated_caches import gate_chart, grey
from mnemos.lab.report.markup import decimal, duration, listed, memory, operations, short, shortened
from mnemos.lab.report.run_records import GateCurves


def test_long_curves_of_seeds_share_their_steps():
    """Where one seed has more records than the other, the mean of both is that of equal steps."""
    steps = [np.arange(10, 10010, 10), np.arange(10, 7010, 10)]
    long, short = [step[every_nth(steps, 400)] for step in steps]
    assert len(long) <= 400
    assert long[-1] == steps[0][-1], "the curve ends where the run does"
    np.testing.assert_array_equal(long[: len(short)], short)
    assert every_nth(steps, 1000) == slice(0, None, 1), "short curves are their records"


def test_the_gates_of_seeds_are_drawn_at_equal_updates():
    """Seeds with other numbers of records: their mean exists at every point of the shorter one."""
    runs, series = [np.arange(10, 10 * n + 10, 10) for n in (1000, 700)], [Series("a", "x")]
    gates = [GateCurves(s, ("a",), np.full((len(s), 1, 30), 0.5), {"cache.rms": s[:, None] / 1}) for s in runs]
    for chart in (gate_chart("m", series, gates, key, ["seed 5", "seed 7"]) for key in ("mix", "cache.rms")):
        points = list(zip(chart.columns["r"], chart.columns["x0"], strict=True))
        long, short = ({x for r, x in points if r == run} for run in (0, len(chart.runs) - 1))
        assert short < long
        assert 100 < len(short) <= 200
    assert chart.runs == ["seed 5", "seed 7"]


def test_numbers_as_a_paper_prints_them():
    assert [decimal(v) for v in (0.5594, -0.002, 12.345, 345.67, math.nan, -math.inf)] == [
        "0.559", "−0.002", "12.35", "345.7", "–", "−∞",
    ]  # fmt: skip
    assert decimal(0.047, signed=True) == "+0.047"
    assert decimal(-0.0001) == "−0.0001"
    assert [duration(v) for v in (1.234, 119.6, 7322, math.nan)] == ["1.23 s", "2 min 00 s", "2 h 02 min", "–"]
    assert [memory(311 * 2**20), operations(4.2e9), operations(950)] == ["311 MiB", "4.2 G", "950"]
    assert [operations(v) for v in (999.6, 999_400, 999_600)] == ["1 K", "999 K", "1 M"]
    assert [memory(v * 1024) for v in (999, 999.6, 1023, 1024)] == ["999 KiB", "1,000 KiB", "1,023 KiB", "1 MiB"]
    assert [listed(["a"]), listed(["a", "b", "c"]), listed([])] == ["a", "a, b and c", ""]
    assert short("x" * 30) == "x" * 23 + "…"


def test_names_lose_what_all_share():
    assert shortened(["host.blocks.0.attn.grc", "host.blocks.11.attn.grc"]) == ["blocks.0", "blocks.11"]
    assert shortened(["a.block.0.1.attention", "a.block.1.0.attention"]) == ["block.0.1", "block.1.0"]
    assert shortened(["only.one"]) == ["only.one"]
    assert shortened(["a", "a.b"]) == ["a", "a.b"]
    assert shortened(["x.a.y", "x.b.y", "x.a.z.y"]) == ["a", "b", "a.z"]
    assert shortened([]) == []


def test_maps_are_scaled_each_by_itself():
    one = np.array([[-2.0, 0.0], [1.0, 2.0]])
    np.testing.assert_array_equal(grey(one)[..., 0], [[0, 128], [191, 255]])
    np.testing.assert_array_equal(grey(1e-6 * one + 7), grey(one))
    assert (grey(np.ones((2, 3))) == 128).all()
    assert (grey(np.array([[math.nan, 1.0]])) == 128).all()
