"""The rows of a comparison from the results of its runs, and the file that has them."""

import json
import math
from dataclasses import replace

import pytest
from refusals import refuses

from mnemos.lab.compare.baselines import Role
from mnemos.lab.compare.comparison import Comparison, MetricByX, Row, ScoreAt, controls_of, read_comparison, rows_of
from mnemos.lab.run.files import Result

COSTS = {"seconds": 1.0, "peak_bytes": 10, "steps": 4, "tokens": 7, "update_flops": 3.0}


def test_a_row_has_the_means_of_its_runs():
    along = {"metric": "accuracy", "x": "bytes", "values": [[8, 0.5], [2, 1.0]]}
    sizes = {"parameters": 9, "flops": 5, "state_bytes": 6}
    one = Result(test={"accuracy": 0.5}, controls={"closed": {"accuracy": 0.2}}, **sizes, **COSTS)
    other = Result(valid={"accuracy": 0.8}, seconds=3.0, peak_bytes=20, steps=8, tokens=9, update_flops=2.0)
    first = replace(one, artifacts={"along": along})
    second = replace(other, artifacts={"along": {**along, "x": "words", "values": [[8, 0.0]]}})
    results = {"a": [first, second], "b": [other, replace(one, seconds=None, update_flops=None)], "none": []}
    a, b, none = rows_of(results, "accuracy", "a", {"a": Role(("b", "gone"), "cache")}, {"a": ({"seed": 0},)}, (0.3, 1))
    assert (a.mean, a.seeds, a.std, a.interval) == (0.65, 2, pytest.approx(0.045**0.5), (0.3, 1))
    assert (a.seconds, a.peak_bytes, a.steps, a.tokens, a.train_flops) == (2, 15, 6, 8, 14)
    assert (a.parameters, a.flops, a.state_bytes, a.memory, a.baseline_of) == (9, 5, 6, "cache", ("b",))
    assert (a.runs, a.against, a.along.metric, a.along.x) == (({"seed": 0},), None, "accuracy", "bytes")
    one_seed, two_seeds = a.along.values
    assert (one_seed.x, one_seed.mean, repr(one_seed.std), one_seed.seeds) == (2, 1.0, "nan", 1)
    assert two_seeds == ScoreAt(8, 0.25, pytest.approx(0.125**0.5), 2)
    assert repr((b.seconds, b.steps, b.train_flops, b.parameters)) == "(nan, 6.0, nan, nan)", "not of some of the runs"
    assert (b.against.difference, b.against.interval, b.along, b.memory) == (0, (-0.7, 0.7), None, None)
    assert (none.seeds, none.against, repr(none.steps), none.interval) == (0, None, "nan", None)
    controls = controls_of({"a": [one, one], "b": [other, one], "none": []}, "accuracy")
    assert [(one.name, one.control, one.mean, one.seeds) for one in controls] == [("a", "closed", 0.2, 2)]


def test_what_is_written_is_read(tmp_path):
    along = MetricByX("accuracy", "words", (ScoreAt(4, 0.75, 0.25, 2), ScoreAt(8, 0.5, math.nan, 1)))
    others = (Row("b", 0, 0, 2, 9, baseline_of=names) for names in (("a",), ("a", "c")))
    rows = Row("a", 0.5, 0.1, 2, 9, along=along), *others
    made = Comparison("accuracy", True, rows, bounds=(0.0, float("inf")), against="a")
    made.write(tmp_path)
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["baseline_of"] for row in written["rows"]] == [None, "a", ["a", "c"]]
    assert repr(read_comparison(tmp_path)) == repr(made), "NaN too"
    (tmp_path / "comparison.json").write_text(json.dumps(written | {"rows": []}))
    refuses('expected "rows" to be a list of recipes, found none; compare again', read_comparison, tmp_path)
