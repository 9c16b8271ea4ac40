import json
import math
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
from safetensors.numpy import load_file, save_file
from synthetic_runs import edited, read, write_comparison, write_run

from mnemos import registry
from mnemos.config import to_dict
from mnemos.lab.compare.comparison import summarise
from mnemos.lab.report.read import read_tasks, task_differences
from mnemos.lab.report.run_records import read_metrics
from mnemos.lab.run.recipe import unwritten
from mnemos.types import InputError


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", "demo-cached")


def refused(folder, *words):
    with pytest.raises(InputError) as caught:
        read([folder])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def third(line):
    """A text with this as its third line."""
    return lambda text: "\n".join([*text.splitlines()[:2], line, *text.splitlines()[2:]]) + "\n"


GATES = '{"kind": "gates", "step": 60, "layers": [{"name": "a", "update": {"mean": "x"}}]}'


@pytest.mark.parametrize(
    ("file", "change", "word"),
    [
        ("metrics.jsonl", third("{oops"), "a measurement"),
        ("metrics.jsonl", third('{"kind": "train", "loss": 1.0}'), "a measurement"),
        ("metrics.jsonl", third(GATES), "update.mean"),
        ("run.json", lambda text: '{\n "name": "x",\n oops\n}', "JSON"),
        ("explain.json", lambda text: text.replace('"weight": 0.25', '"weight": true'), "layers[0].maps.weight"),
    ],
)
def test_what_is_malformed_is_named_by_file_and_place(run, file, change, word):
    path = run / file
    path.write_text(change(path.read_text()))
    said = refused(run, str(path), word)
    assert {"metrics.jsonl": "metrics.jsonl, line 3", "run.json": "line 3", "explain.json": "delete"}[file] in said


def test_a_last_line_that_is_cut_off_is_left_alone(run):
    path = run / "metrics.jsonl"
    before = len(read([run]).all_runs()[0].train["step"])
    path.write_text(path.read_text() + '{"kind": "train", "st')
    assert len(read([run]).all_runs()[0].train["step"]) == before
    path.write_text(path.read_text() + "\n")
    refused(run, "metrics.jsonl, line")


def test_of_a_step_written_twice_the_later_stands(tmp_path):
    path = tmp_path / "metrics.jsonl"
    losses = [(50, 3.0), (100, 2.0), (150, 9.0), (100, 1.5)]
    path.write_text("".join(json.dumps({"kind": "train", "step": s, "loss": v}) + "\n" for s, v in losses))
    train, valid, gates = read_metrics(tmp_path)
    np.testing.assert_array_equal(train["step"], [50, 100, 150])
    np.testing.assert_array_equal(train["loss"], [3.0, 1.5, 9.0])
    assert np.isnan(train["lr"]).all()
    assert valid["step"].size == 0
    assert gates is None


def test_gates_of_layers_with_different_heads(tmp_path):
    path = tmp_path / "metrics.jsonl"
    layers = [{"name": "a", "mix": [0.1, 0.2]}, {"name": "b", "mix": [0.3], "cache": {"rms": 2.0}}]
    path.write_text(json.dumps({"kind": "gates", "step": 7, "layers": layers}) + "\n")
    gates = read_metrics(tmp_path)[2]
    np.testing.assert_array_equal(gates.mix, [[[0.1, 0.2], [0.3, math.nan]]])
    np.testing.assert_array_equal(gates.values["cache.rms"], [[math.nan, 2.0]])


def test_what_is_no_run_is_refused(tmp_path):
    refused(tmp_path, "neither file")
    refused(tmp_path / "nowhere", "no such folder")
    run = write_run(tmp_path / "texts/recipe/seed-0")
    for folder in (tmp_path, tmp_path / "texts", run.parent):
        refused(folder, f"a folder of runs without comparison.json; name some of them, for example {run}, or")
    (run / "model").mkdir()
    refused(run / "model", f"a part of a run; name {run}")
    refuses("at least one", read, [])


def test_two_comparisons_of_a_task_and_a_run_beside_one_are_refused(tmp_path):
    folders = [write_comparison(tmp_path / n, variants=("demo",)) for n in "ab"]
    refuses("one comparison", read, folders)
    refuses("name the runs of the comparison in its place", read, [folders[0], folders[0] / "demo-0"])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"rows": [{"name": "a", "mean": "x"}]}, "rows[0].mean"),
        ({"controls": [{"name": "demo", "mean": 0.1, "std": 0.1, "seeds": 3}]}, "controls[0].control"),
        ({"runs": {"demo": ["gone"]}}, "'gone'"),
    ],
)
def test_malformed_comparison_names_file_and_place(tmp_path, fields, word):
    folder = write_comparison(tmp_path / "cmp", variants=("demo",), **fields)
    refused(folder, str(folder / "comparison.json"), word)


def test_arrays_that_do_not_fit_are_refused(run):
    path = run / "explain.safetensors"
    save_file({name: array for name, array in load_file(path).items() if name != "memory.1"}, path)
    refused(run, str(path), "'memory.1'", "none")
    (run / "samples.json").write_text("{}")
    path.write_bytes((run / "recipe.json").read_bytes())
    (run / "explain.json").unlink()
    refused(run, "samples.json: expected samples and samples.safetensors, found", "run mnemos sample on it again")


def test_runs_of_one_recipe_are_one_variant_and_others_another(tmp_path):
    folders = [write_run(tmp_path / f"a{s}", "demo", s) for s in (0, 1)]
    folders.append(write_run(tmp_path / "longer", "demo", 0, steps=3000))
    comparison = read(folders)
    assert comparison.names == ["demo", "demo (2)"]
    assert [row.seeds for row in comparison.rows] == [2, 1]
    tested = [json.loads((f / "result.json").read_text())["test"]["accuracy"] for f in folders[:2]]
    assert comparison.rows[0].mean == pytest.approx(np.mean(tested))
    assert comparison.rows[0].std == pytest.approx(np.std(tested, ddof=1))


@pytest.mark.parametrize(
    "change", ["data", "files", "files since", "rows", "batches", "start", "weights", "metric", "generator"]
)
def test_runs_of_different_tasks_are_never_one_comparison(tmp_path, change):
    """Unfinished runs belong to the task with their data; equal files in another folder are equal data."""
    runs = [write_run(tmp_path / name, "demo", i, finished=name != "c") for i, name in enumerate("abcd")]
    for run in runs:
        about = {"data": {"sha256": "1" if (change, run.name) == ("files", "b") else "2"}}
        data = {"is": "text", "path": run.name, "held_out": 0.1 if (change, run.name) == ("data", "b") else 0.2}
        if change == "generator":
            about, data["path"] = {"data": {"generated": {"version": 1 if run.name == "b" else 2}}}, ""
        if (change, run.name) == ("files since", "b"):
            about["resumed"] = [{"data": {"sha256": "1"}}, {}]
        part = change == "batches" or (change, run.name) == ("rows", "b")
        batch = 8 if run.name == "b" else 4  # which decides what a part is, and nothing else
        training = {"steps": 9, "test_rows": 100 if part else 0, "batch_size": batch}
        if (change, run.name) != ("start", "b"):  # the others start from one run, b from random weights
            training["init_from"] = "runs/one"
            about["weights"] = {"run": "runs/one", "sha256": "3" if (change, run.name) == ("weights", "b") else "4"}
        edited(run / "recipe.json", data=data, train=training)
        edited(run / "run.json", **about)
    if change == "metric":
        edited(runs[1] / "result.json", metric="loss")
    found = read_tasks(runs)
    assert [[run.label for run in one.all_runs()] for one in found] == [["a", "c", "d"], ["b"]]
    assert task_differences(found)
    assert len(read_tasks([runs[0], *runs[2:]])) == 1


def test_runs_that_score_the_whole_split_are_one_task_whatever_their_batches(tmp_path):
    runs = [write_run(tmp_path / name, "demo", i) for i, name in enumerate("ab")]
    for run, batch in zip(runs, (4, 8), strict=True):
        edited(run / "recipe.json", train={"steps": 9, "test_rows": 100, "batch_size": batch})
        edited(run / "result.json", scored_rows={"test": 90})
    assert len(read(runs).all_runs()) == 2
    (runs[1] / "result.json").unlink()
    assert len(read(runs).all_runs()) == 2, "also one that is not finished"


def test_settings_that_change_no_score_make_no_other_task(tmp_path):
    """Runs with one tokenizer of a file, whatever `subwords` says, and other batches; without the file it decides."""
    settings = [{"tokenizer": "a.json"}, {"tokenizer": "a.json", "subwords": 80, "batch_tokens": 9}, {"subwords": 80}]
    runs = [write_run(tmp_path / name, "demo", i) for i, name in enumerate("abc")]
    for run, data in zip(runs, settings, strict=True):
        edited(run / "recipe.json", data={"is": "translation", **data})
    assert [[run.label for run in one.all_runs()] for one in read_tasks(runs)] == [["a", "b"], ["c"]]


def test_the_baselines_of_single_runs_are_read_from_recipes(tmp_path):
    recipe = registry.load("recipe", "short-listops-cached")()
    never = unwritten(recipe)
    runs = [write_run(tmp_path / name, name) for name in ("demo", "demo-cached")]

    def owners(*recipes):
        for run, one in zip(runs, recipes, strict=True):
            (run / "recipe.json").write_text(json.dumps(one))
        return [row.baseline_of for row in read(runs).rows]

    assert owners(to_dict(never), to_dict(recipe)) == [(recipe.name,), ()]
    longer = replace(never, train=replace(never.train, steps=never.train.steps + 1))  # of a budget
    assert owners(to_dict(longer), to_dict(recipe)) == [(), ()]
    assert owners(to_dict(never) | {"model": {"is": "of-a-plug-in"}}, to_dict(recipe)) == [(), ()]


def test_the_direction_of_a_metric_is_never_guessed(run, tmp_path):
    """That of a metric of this library is known, where a result does not describe it."""
    path = run / "result.json"
    edited(path, metrics={})
    assert read([run]).higher_is_better is True
    assert summarise({"demo": [run]}, tmp_path).higher_is_better is True
    edited(path, metric="mine", test={"loss": 1.0, "mine": 0.5})
    refused(run, f"{path}: expected", "'mine'", "train the run again")
    refuses("'mine'", summarise, {"demo": [run]}, tmp_path)


def test_a_control_that_breaks_a_seed_has_no_change_of_the_others(tmp_path):
    folder = write_comparison(tmp_path / "c", variants=("demo-cached",))
    path = folder / "demo-cached-1" / "result.json"
    controls = json.loads(path.read_text())["controls"]
    controls["emptied"]["accuracy"] = None
    del controls["closed"]
    edited(path, controls=controls)
    comparison = read([folder])
    assert math.isnan(comparison.effect("demo-cached").difference)
    assert comparison.effect("demo-cached").interval is None
    assert comparison.effect("demo-cached", "closed").difference == pytest.approx(-0.044), "of the runs that have it"
