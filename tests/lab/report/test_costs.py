"""What a report says about costs, further metrics and what was made equal."""

import json
import re

from synthetic_runs import edited, write_comparison, write_run

from mnemos.lab.report.costs import section
from mnemos.lab.report.read import read, read_results
from mnemos.lab.report.scores import section as results

EQUAL = {"equal": "time", "budget": 60.0, "unit": "seconds", "first": "demo", "clock": "CPU time", "minutes": 1.0}


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


def test_columns_name_their_units(tmp_path):
    folder = write_comparison(tmp_path / "c", seeds=(0,), unit="frames")
    assert "frames read" not in section(read_results(folder)), "a column in which nothing is known"
    for place in folder.rglob("result.json"):
        edited(place, tokens=7000, scored_rows={"valid": 60, "test": 60})
        lines = [json.loads(line) for line in (place.parent / "metrics.jsonl").read_text().splitlines()]
        lines = [line | {"seconds": 1.5} if line["kind"] == "valid" else line for line in lines]
        (place.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_results(folder)
    assert cells(section(found))[0][2] == "frames read"
    head, *rows = cells(section(found))[:4]
    assert {row[head.index("rows/s")] for row in rows} == {"40"}  # those that were scored, and not the whole split
    assert [row[head.index("per update")] for row in rows] == ["0.0208 s1.00×", "0.0244 s1.17×", "0.0208 s1.00×"]
