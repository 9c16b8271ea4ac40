"""The choice of learning rates: by the validation split, the best in the metric's own direction."""

import math
from dataclasses import replace

import pytest

from mnemos import registry
from mnemos.atomic import write_json
from mnemos.config import to_dict
from mnemos.lab.compare import runs as module
from mnemos.lab.compare.comparison import summarise
from mnemos.lab.compare.rates import Sweep, at_best_rates, end_warning, sweep
from mnemos.lab.compare.runs import train_apart
from mnemos.lab.errors import TrainingFailed
from mnemos.types import InputError


@pytest.mark.parametrize(
    ("scores", "higher", "best", "at_an_end"),
    [
        ({1e-3: 2.0, 1e-2: 1.0, 1e-1: 3.0}, False, 1e-2, False),
        ({1e-3: 2.0, 1e-2: 1.0, 1e-1: 3.0}, True, 1e-1, True),
        ({1e-3: None, 1e-2: 0.0}, True, 1e-2, True),  # a run that failed is worse than a score of 0
        ({1e-3: None, 1e-2: 9.0}, False, 1e-2, True),
        ({1e-3: 1.0, 1e-2: 1.0, 1e-1: 0.5}, True, 1e-3, False),  # as good between the ends
        ({1e-2: 0.5}, True, 1e-2, False),
        ({1e-3: None, 1e-2: None}, True, None, False),
    ],
)
def test_the_best_rate(scores, higher, best, at_an_end):
    found = Sweep(scores, higher)
    assert (found.best, found.at_an_end) == (best, at_an_end)


VALID = {("text", 1e-3): 2.0, ("text", 1e-2): 1.5, ("text", 1e-1): None, ("text-xl", 1e-3): 1.0, ("text-xl", 1e-2): 1.2}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_in_bits_chooses_the_fewest_on_the_validation_split(tmp_path, monkeypatch, capsys, jobs):
    def trained(recipe, place, quiet):
        score = VALID.get((recipe.name, recipe.optim.lr))
        if score is None:
            raise TrainingFailed(f"{recipe.name}: loss is not finite")
        metric = "bits per byte"
        result = {"metric": metric, "valid": {metric: score}, "test": {"loss": 0.0, metric: -score}, "seconds": 1.0}
        place.mkdir(parents=True)
        write_json(place / "result.json", result)

    monkeypatch.setattr(module, "train_apart", trained)
    recipes = [registry.load("recipe", name)() for name in ("text", "text-xl")]
    recipes = [replace(one, train=replace(one.train, seed=5)) for one in recipes]
    found = sweep(recipes, (1e-3, 1e-2, 1e-1), tmp_path, jobs)
    assert {name: one.best for name, one in found.items()} == {"text": 1e-2, "text-xl": 1e-3}
    assert found["text-xl"].scores == {1e-3: 1.0, 1e-2: 1.2, 1e-1: None}
    said = capsys.readouterr().out
    assert said.count("loss is not finite") == 2
    assert "text at learning rate 1.0e-02, seed 5: validation bits per byte 1.5, 1 s" in said
    assert end_warning(found) == ("the best learning rate is at an end of the sweep: text-xl (1.0e-03); widen --rates")
    runs = at_best_rates(recipes, found, 2, tmp_path)
    assert [str(place.relative_to(tmp_path)) for _, place in runs] == [
        "text/1.0e-02/seed-5",
        "text-xl/1.0e-03/seed-5",
        "text/1.0e-02/seed-6",
        "text-xl/1.0e-03/seed-6",
    ]
    assert [(run.optim.lr, run.train.seed) for run, _ in runs] == [(1e-2, 5), (1e-3, 5), (1e-2, 6), (1e-3, 6)]


@pytest.mark.parametrize(
    ("rates", "said"), [((), "above 0"), ((0.0,), "above 0"), ((1e-3, 1.01e-3), "differ in two digits")]
)
def test_rates_that_cannot_be_swept(rates, said, tmp_path):
    with pytest.raises(InputError, match=f"--rates: expected .*{said}"):
        sweep([], rates, tmp_path)


def test_a_run_without_a_score_is_told_and_summarised(tmp_path, monkeypatch, capsys):
    def trained(recipe, place, quiet):
        place.mkdir(parents=True)
        write_json(place / "run.json", {})
        costs = {"seconds": 1.0, "peak_bytes": 1, "parameters": 1, "flops": 1, "majority": None}
        scores = {"valid": {"bits per byte": None}, "test": {"loss": 0.0, "bits per byte": None}}
        write_json(place / "result.json", {"metric": "bits per byte", **scores, **costs})

    monkeypatch.setattr(module, "train_apart", trained)
    recipe = registry.load("recipe", "text")()
    module.train_several([(recipe, tmp_path / "text")])
    assert "validation bits per byte none, 1 s" in capsys.readouterr().out
    comparison = summarise({"text": [tmp_path / "text"]}, tmp_path)
    assert math.isnan(comparison.rows[0].mean)


def test_a_run_keeps_its_threads_when_it_is_continued(tmp_path):
    """A comparison that goes on with other `--jobs` sets others."""
    recipe = registry.load("recipe", "text")()
    place = tmp_path / "text"
    place.mkdir()
    write_json(place / "recipe.json", to_dict(recipe))
    costs = {"metric": "bits per byte", "flops": 1, "test": {"loss": 0.0}}
    write_json(place / "result.json", costs)
    train_apart(replace(recipe, train=replace(recipe.train, threads=recipe.train.threads + 1)), place)
    with pytest.raises(InputError, match=r"one that differs in train\.batch_size"):
        train_apart(replace(recipe, train=replace(recipe.train, batch_size=3)), place)
