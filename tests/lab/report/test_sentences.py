"""Sentences of recipes, runs and claims in a run in which they would be false: they change or are not there."""

import re
from dataclasses import replace

import pytest
from synthetic_runs import edited, write_comparison, write_run

from mnemos import registry
from mnemos.lab.compare.arguments import variants
from mnemos.lab.compare.baselines import with_parameters
from mnemos.lab.papers.reproduce import Options
from mnemos.lab.papers.small_runs import caution
from mnemos.lab.report import gated_caches, page, provenance, scores
from mnemos.lab.report.read import read, read_results, read_run, results_of
from mnemos.lab.run.recipe_fields import with_fields

LINEAR = "one matrix per head"


@pytest.mark.parametrize(
    ("words", "about"),
    [
        ([], LINEAR),
        (["--train.seed", "3"], LINEAR),
        (["--model.attention", "gated-delta"], "demo-linear with given settings: model.attention"),
        (
            ["--train.steps", "5", "--model.num-heads=2"],
            "demo-linear with given settings: train.steps, model.num_heads",
        ),
        (["--about", "mine", "--train.steps", "5"], "mine"),
    ],
)
def test_a_recipe_whose_fields_are_set_is_not_what_the_registered_one_says(words, about):
    found = with_fields(registry.load("recipe", "demo-linear")(), words, "mnemos train")
    assert about in found.about
    assert (LINEAR in found.about) == (about == LINEAR)


def test_rows_that_vary_a_field_and_rows_of_equal_parameters_have_descriptions_of_their_own():
    rows = variants(["demo-linear"], [], [("model.attention", "gated-delta,retention")])
    assert not any(LINEAR in row.about for row in rows)
    narrow = with_fields(
        registry.load("recipe", "demo-linear")(), ["--model.vocab-size", "99", "--model.max-length", "99"], ""
    )
    assert with_parameters(narrow, 100_000, "other").about.endswith("the parameters of other")


def test_seeds_that_are_described_differently_are_one_row(tmp_path):
    runs = [write_run(tmp_path / str(seed), "demo", seed) for seed in range(2)]
    edited(runs[1] / "recipe.json", about="demo with other train.seed")
    assert [row.seeds for row in results_of([read_run(run, run.name) for run in runs]).rows] == [2]


def test_only_controls_that_were_run_are_explained(tmp_path):
    """A closed gate says nothing of what the cache holds."""
    every = read_results(write_comparison(tmp_path / "c"))
    closed = replace(every, controls=tuple(one for one in every.controls if one.control == "closed"))
    assert "depends on what its cache holds" in scores._controls(every)
    assert "depends on" not in scores._controls(closed)
    bare = read([write_run(tmp_path / "plain", "demo")])
    assert scores._controls(bare) == "", "a model without a memory"


def test_an_interval_is_said_where_there_is_one(tmp_path):
    for seeds in ((0,), (0, 1)):
        said = scores._controls(read_results(write_comparison(tmp_path / str(seeds), seeds)))
        assert ("comes from the spread between seeds" in said) == (len(seeds) > 1)


def test_the_gates_of_a_seed_have_its_name(tmp_path, monkeypatch):
    # of one label
    runs = [write_run(tmp_path / name / "run", "demo-cached", seed) for name, seed in (("a", 5), ("b", 7))]
    drawn = []
    monkeypatch.setattr(gated_caches, "chart_figure", lambda charts, *_: drawn.extend(charts) or "")
    gated_caches.gate_section(read(runs))
    assert {run.split(",")[0] for chart in drawn for run in chart.runs} == {"seed 5", "seed 7"}


def test_updates_each_are_those_of_finished_runs(tmp_path):
    runs = [write_run(tmp_path / name, "demo", seed) for seed, name in enumerate("ab")]
    assert " updates each ·" in page._byline([read(runs)])
    assert " updates ·" in page._byline([read(runs[:1])]), "one run"
    unfinished = write_run(tmp_path / "c", "demo", 2, finished=False)
    assert " updates" not in page._byline([read([*runs, unfinished])])


def test_a_recipe_without_a_part_is_in_the_table_of_differences(tmp_path):
    runs = [write_run(tmp_path / name, name) for name in ("demo", "demo-cached")]
    edited(runs[1] / "recipe.json", extra={"size": 3})
    shown = provenance._recipes(read(runs))
    assert re.search(r'extra.size</code></th><td data-head="demo">–<.*?"demo-cached">3<', shown)
    assert re.search(r'model.cache.length</code></th><td data-head="demo">null<.*?"demo-cached">32<', shown)


def test_notes_of_claims_are_of_their_own_seeds(tmp_path):
    said = {seeds: caution(Options(tmp_path, seeds=seeds)) for seeds in (1, 2, 9)}
    assert said[1].startswith("One seed")
    assert said[9] == "± is the standard deviation over 9 seeds."
    assert not any(re.search("evidence|conclusion", text) for text in said.values())
