"""What a report says about costs, further metrics and what was made equal."""

import json
import re

from synthetic_runs import edited, read, write_comparison, write_run

from mnemos.lab.report.read import read_results
from mnemos.lab.report.scores import costs as section
from mnemos.lab.report.scores import section as results


def cells(page: str) -> list[list[str]]:
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", page)]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in rows]


def test_all_metrics_of_the_test_split_are_in_the_results(tmp_path):
    run = write_run(tmp_path / "run", "demo")
    result = json.loads((run / "result.json").read_text())
    assert "Other metrics" not in results(read([run]))
    described = {"chrF": {"higher_is_better": True, "about": "F-score."}, "loss": {}}
    edited(run / "result.json", metrics=result["metrics"] | described, test=result["test"] | {"chrF": 31.257})
    found = results(read([run]))
    assert [row for row in cells(found) if len(row) == 2] == [["variant", "chrF"], ["demo", "31.26"]]
    assert "ChrF: F-score." in found


def test_a_metric_that_is_not_a_number_stays_in_the_mean(tmp_path):
    for i, (name, value) in enumerate([("demo", 5.0), ("demo", float("nan")), ("demo-cached", 6.0)]):
        run = write_run(tmp_path / str(i), name, i)
        result = json.loads((run / "result.json").read_text())
        described = {"metrics": result["metrics"] | {"ppl": {"higher_is_better": False}, "chrF": {}}}
        edited(run / "result.json", **described, test=result["test"] | {"ppl": value, "chrF": 9.0})
    found = cells(results(read(sorted(tmp_path.iterdir()))))
    assert [row[:2] for row in found[1:3]] == [["demo", "–"], ["demo-cached", "6.000"]]


def test_columns_name_their_units(tmp_path):
    folder = write_comparison(tmp_path / "c", seeds=(0,), unit="frames")
    assert "frames read" not in section(read_results(folder)), "a column in which nothing is known"
    found = json.loads((folder / "comparison.json").read_text())
    edited(folder / "comparison.json", rows=[row | {"tokens": 7000, "steps": 2500} for row in found["rows"]])
    head, *rows = cells(section(read_results(folder)))[:4]
    assert {row[head.index("frames read")] for row in rows} == {"7,000"}
    assert [row[head.index("per update")] for row in rows] == ["0.0208 s1.00×", "0.0244 s1.17×", "0.0208 s1.00×"]
