"""Sentences of recipes, runs and claims in a run in which they would be false: they change or are not there."""

import re

import pytest
from synthetic_runs import edited, read, write_run

from mnemos import registry
from mnemos.lab.papers.small_runs import caution
from mnemos.lab.report import provenance
from mnemos.lab.report.read import read_run, results_of
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


def test_seeds_that_are_described_differently_are_one_row(tmp_path):
    runs = [write_run(tmp_path / str(seed), "demo", seed) for seed in range(2)]
    edited(runs[1] / "recipe.json", about="demo with other train.seed")
    assert [row.seeds for row in results_of([read_run(run, run.name) for run in runs]).rows] == [2]


def test_runs_of_fit_are_seeds_of_one_row_within_a_folder_alone(tmp_path):
    """Their recipes do not say which model was trained: two of one size look alike."""
    runs = []
    for folder, seed in (("relu/0", 0), ("relu/1", 1), ("tanh/2", 2), ("tanh/3", 3), ("tanh/again", 4)):
        runs.append(write_run(tmp_path / folder, "demo", seed))
        edited(runs[-1] / "recipe.json", model={"is": "own", "of": "Sequential", "parameters": 90})
    rows = results_of([read_run(run, run.name) for run in runs]).rows
    assert [(row.name, row.seeds) for row in rows] == [("relu", 2), ("tanh", 2), ("tanh/again", 1)]
    alone = results_of([read_run(run, run.name) for run in runs[:2]]).rows
    assert [(row.name, row.seeds) for row in alone] == [("demo", 2)]


def test_a_recipe_without_a_part_is_in_the_table_of_differences(tmp_path):
    runs = [write_run(tmp_path / name, name) for name in ("demo", "demo-cached")]
    edited(runs[1] / "recipe.json", extra={"size": 3})
    shown = provenance._recipes(read(runs))
    assert re.search(r'extra.size</code></th><td data-head="demo">–<.*?"demo-cached">3<', shown)
    assert re.search(r'model.cache.length</code></th><td data-head="demo">null<.*?"demo-cached">32<', shown)


def test_notes_of_claims_are_of_their_own_seeds():
    said = {seeds: caution(seeds) for seeds in (1, 2, 9)}
    assert said[1].startswith("One seed")
    assert said[9] == "± is the standard deviation over 9 seeds."
    assert not any(re.search("evidence|conclusion", text) for text in said.values())
