"""The curve of a metric along an axis of the task."""

import json
import math
import re

import pytest
from synthetic_runs import edited, read, write_run

from mnemos.lab.compare.comparison import read_comparison, summarise
from mnemos.lab.report.curves import by_x_figure, by_x_table, read_by_x
from mnemos.lab.run.files import Result


def section(results):
    return by_x_figure(results) + by_x_table(results)


ALONG = {"metric": "accuracy", "x": "words back", "chance": 0.1}


def run(folder, name, values, seed=0, **changes):
    write_run(folder, name, seed)
    edited(folder / "result.json", state_bytes=4096, along={**ALONG, "values": values, **changes})
    return folder


def test_variants_and_seeds_are_drawn_and_listed(tmp_path):
    folders = [
        run(tmp_path / "a0", "demo", [[32, 1.0], [512, 0.25]]),
        run(tmp_path / "a1", "demo", [[32, 0.5], [512, 0.75]], seed=1),
        run(tmp_path / "b", "demo-<b>", [[32, 1.0]]),
        write_run(tmp_path / "c", "demo-wider"),
    ]
    comparison = read(folders)
    found = read_by_x(comparison)
    assert [found.rows["demo"][x].mean for x in found.xs] == [0.75, 0.5]
    assert (found.rows["demo-<b>"][32].mean, found.xs, found.chance) == (1.0, [32, 512], 0.1)
    html = section(comparison)
    assert "0.750 ± 0.354" in html
    assert "0.500 ± 0.354" in html
    assert "demo-&lt;b&gt;" in html
    assert "<b>" not in html
    assert "words back" in html
    assert html.count("a guess (0.100)") == 1, "the legend names the dotted line"


def test_a_share_of_few_rows_has_its_interval(tmp_path):
    results = read([run(tmp_path / "a", "demo", [[32, 1.0], [512, 0.5]], rows=[18, 18])])
    data = json.loads(re.search(r'class="chart-data">(.*?)</script>', by_x_figure(results))[1])
    low, high = data["columns"]["low"], data["columns"]["high"]
    assert (low, high) == (pytest.approx([0.82412, 0.29032], abs=1e-4), pytest.approx([1, 0.70968], abs=1e-4))
    assert "Wilson" in by_x_figure(results)


def test_intervals_of_a_later_variant_keep_the_points_before(tmp_path):
    """Two seeds have no intervals of rows; one seed of another variant has."""
    folders = [run(tmp_path / str(seed), "demo", [[32, 0.5]], seed, rows=[18]) for seed in (0, 1)]
    figure = by_x_figure(read([*folders, run(tmp_path / "b", "demo-cached", [[32, 1.0], [64, 0.0]], rows=[18, 18])]))
    columns = json.loads(re.search(r'class="chart-data">(.*?)</script>', figure)[1])["columns"]
    assert (columns["low"][:2], columns["high"][:2]) == ([0.5, 0.5], [0.5, 0.5])
    assert columns["low"][2] < columns["y"][2] == 1
    assert len({len(values) for values in columns.values()}) == 1


def test_a_score_that_is_not_a_number_is_a_gap(tmp_path):
    results = read([run(tmp_path / "a", "demo", [[32, 1.0], [64, 0.5], [512, math.nan]], rows=[18] * 3)])
    Result.read(tmp_path / "a").write(tmp_path / "a")
    for found in (results, read([tmp_path / "a"])):
        assert [one.mean for one in found.rows[0].along.values] == [1.0, 0.5, pytest.approx(math.nan, nan_ok=True)]
        data = json.loads(re.search(r'class="chart-data">(.*?)</script>', by_x_figure(found))[1])
        assert data["columns"]["y"] == [1, 0.5, None]


def test_runs_without_an_axis_have_no_section(tmp_path):
    assert section(read([write_run(tmp_path / "run")])) == ""
    assert section(read([run(tmp_path / "none", "demo", [])])) == "", "an axis without values"
    other = run(tmp_path / "other", "demo-cached", [[1, 0.5]], x="bytes")
    first = run(tmp_path / "first", "demo", [[1, 0.5]])
    assert list(read_by_x(read([first, other])).rows) == ["demo"]


def test_the_bounds_of_a_metric_are_its_own_and_not_those_of_its_name(tmp_path):
    """An accuracy in per cent, of a task that is not ours."""
    places = [run(tmp_path / str(seed), "demo", [[32, 1.0]], seed=seed) for seed in (0, 1)]
    for place, score in zip(places, (0.2, 0.9), strict=True):
        edited(place / "result.json", test={"loss": 1.0, "accuracy": score})
    assert summarise({"demo": places}, tmp_path).rows[0].interval == (0, 1)
    for place in places:
        edited(place / "result.json", metrics={"accuracy": {"higher_is_better": True, "bounds": [0, None]}})
    summarise({"demo": places}, tmp_path).write(tmp_path)
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["bounds"] == [0, None]
    assert read_comparison(tmp_path).bounds == read(places).bounds == (0, math.inf)
    assert read_comparison(tmp_path).rows[0].interval[1] > 1
