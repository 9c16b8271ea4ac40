"""The report section on the controls of the state: numbers, figure and reasons, and what is refused."""

import json
import re

import pytest
from refusals import refuses
from synthetic_runs import read, write_run

from mnemos.lab.report.memory_use import rounded, section
from mnemos.lab.report.read import read_run, results_of


def entry(accuracy, segments=3):
    return {"scores": {"accuracy": accuracy, "loss": 1.0}, "by_segment": [accuracy] * segments}


def measured(shift=0.0, **changes):
    slots = {"name": "slots", "emptied": entry(0.25 + shift), "exchanged": entry(0.5), "frozen": entry(0.375)}
    found = {
        **{"left": None, "split": "test", "rows": 8, "segments": [2, 3, 4], "cut": None, "targets": 96},
        **{"metric": "accuracy", "carried": entry(0.5), "memories": [slots]},
    }
    return found | changes


def run_with(folder, memory, name="demo", seed=0):
    run = write_run(folder, name, seed)
    layers = {"pictures": None, "left": "the model has no gated cache", "sizes": {}, "middle": None, "layers": []}
    (run / "explain.json").write_text(json.dumps({"memory": memory, **layers}))
    return run


def part(runs):
    return re.sub(r"\s+", " ", section(read(runs)))


def test_the_section_says_what_each_control_changes_and_claims_dependence_only(tmp_path):
    found = part([run_with(tmp_path / "a", measured())])
    assert "8 rows at once, 96 targets in 3 segments" in found, "the figure"
    assert found.count('class="chart"') == 1
    assert re.findall(r'<text text-anchor="middle"[^>]*>(\d)<', found) == ["2", "3", "4"], "a tick a segment"
    assert re.findall(r'<td data-head="(?:emp|exch|fro).*?">(.*?)<', found) == ["−0.250", "+0.000", "−0.125"]


def test_one_segment_has_a_table_and_no_curve(tmp_path):
    slots = {"name": "slots", **dict.fromkeys(("emptied", "exchanged", "frozen"), entry(0.25, 1))}
    found = part([run_with(tmp_path / "a", measured(segments=[2], carried=entry(0.5, 1), memories=[slots]))])
    assert "<figure" not in found
    assert re.findall(r'<td data-head="(?:emp|exch|fro).*?">(.*?)<', found) == ["−0.250"] * 3


def test_several_seeds_give_an_interval(tmp_path):
    runs = [run_with(tmp_path / str(s), measured(shift), seed=s) for s, shift in enumerate((0.0, 0.01, -0.01))]
    found = part(runs)
    comparison = results_of([read_run(run, run.name) for run in runs])
    difference = comparison.memory_effect("demo", "slots", "emptied")
    assert difference.difference == pytest.approx(-0.25)
    assert difference.interval[0] == pytest.approx(-0.25 - 4.302653 * 0.01 / 3**0.5)
    assert "−0.275 to −0.225" in found
    assert [difference.finding(higher) for higher in (True, False)] == ["worse", "better"]


def test_a_memory_that_no_target_reads_over_a_cut_is_not_called_unused(tmp_path):
    window = {"name": "window", **dict.fromkeys(("emptied", "exchanged", "frozen"), entry(0.5))}
    blind = measured(cut=130, memories=[window])
    found = part([run_with(tmp_path / "a", blind)])
    assert re.findall(r'<td data-head="(?:emp|exch|fro).*?">(.*?)<', found) == []
    assert "demo, window not tested: rows were cut into segments of 130 tokens" in found
    for i, other in enumerate((measured(cut=130), measured(memories=[window]))):  # a control changes a score; no cut
        assert "not tested" not in part([run_with(tmp_path / f"b{i}", other)])


def test_an_interval_is_rounded_once():
    assert [rounded(one) for one in (-0.62749, -0.627496, -0.62751)] == ["−0.627", "−0.627", "−0.628"]
    assert rounded(-0.00004) == "+0.000"


def test_a_control_that_lacks_the_metric_has_no_change(tmp_path):
    memory = measured()
    del memory["memories"][0]["emptied"]["scores"]["accuracy"]
    found = part([run_with(tmp_path / "a", memory)])
    assert re.findall(r'<td data-head="(?:emp|exch|fro).*?">(.*?)<', found) == ["+0.000", "−0.125"]
    less = {"scores": {"loss": 1.0}, "by_segment": [0.5] * 3}
    assert "controls" in part([run_with(tmp_path / "b", measured(carried=less))]), "nothing has the metric"


def test_runs_without_controls_have_no_section(tmp_path):
    runs = [write_run(tmp_path / "demo"), write_run(tmp_path / "demo-cached", "demo-cached")]
    assert part(runs) == ""


def test_what_is_malformed_is_refused(tmp_path):
    refuses(r"memory\.memories: expected .*, found 3", read_run, run_with(tmp_path / "a", measured(memories=3)), "a")
