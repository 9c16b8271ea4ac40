"""Experiments on the papers' claims: power, the direction of differences, and controls that differ in one thing."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from mnemos.lab.compare.baselines import parameters
from mnemos.lab.compare.equal import check_equal, completed
from mnemos.lab.compare.significance import Spread, spread
from mnemos.lab.papers.cached_transformers import comparisons
from mnemos.lab.papers.cached_transformers import experiment as cached
from mnemos.lab.papers.experiments import differences_table, power, seeds_needed
from mnemos.lab.papers.linear_transformers import experiment as linear
from mnemos.lab.papers.memformer import experiment as memformer
from mnemos.lab.papers.memformer.recipes import ImageSizes
from mnemos.lab.papers.reproduce import Options, reproduce
from mnemos.lab.run.trained import open_run
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.models.memformer import MemformerConfig

pytestmark = pytest.mark.usefixtures("forked_comparisons")


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 64), (0.8, 26), (1.0, 17)])
def test_seeds_of_equal_spreads_are_those_of_cohens_table(effect, seeds):
    """Cohen (1988), Table 2.4.1: two samples, power .80, level .05, two-sided."""
    one = Spread(0.0, 2.0, 3)
    assert seeds_needed(2 * effect, one, one) == seeds
    assert seeds_needed(-2 * effect, one, one) == seeds


def test_power_is_how_often_welchs_test_shows_the_difference():
    rng = np.random.default_rng(0)
    a, b = rng.normal(4.0, 1.0, (40_000, 6)), rng.normal(0.0, 3.0, (40_000, 6))
    shown = (stats.ttest_ind(a, b, axis=1, equal_var=False).pvalue < 0.05).mean()
    assert power(4.0, Spread(0.0, 1.0, 3), Spread(9.0, 3.0, 5), 6) == pytest.approx(shown, abs=0.01)


def test_without_a_spread_there_is_no_power():
    alone, equal = spread([1.0]), spread([1.0, 1.0])
    assert power(0.0, Spread(0.0, 1.0, 5), Spread(0.0, 2.0, 5), 5) == pytest.approx(0.05), "both tails"
    for one in (alone, equal):
        assert np.isnan(power(1.0, one, one, 5))
        assert seeds_needed(1.0, one, one) is None
    assert seeds_needed(1e-6, Spread(0.0, 1.0, 5), Spread(0.0, 1.0, 5)) is None, "more than are searched"


@pytest.mark.parametrize(("distance", "std", "seeds"), [(10.0, 1.0, 3), (40.0, 1.0, 3), (40.0, 0.3, 2)])
def test_a_large_effect_has_full_power(distance, std, seeds):
    """SciPy's lower tail is NaN at some of these noncentralities."""
    one, other = Spread(0.0, 1.0, seeds), Spread(0.0, std, seeds)
    effect = distance * np.sqrt((1 + std**2) / seeds)
    assert 0.98 < power(effect, one, other, seeds) <= 1
    assert seeds_needed(40 * effect, one, other) == 2


def test_a_difference_is_the_first_arm_minus_its_control():
    values = {name: [x, x + 0.1, x + 0.2] for name, x in (("arm", 1.0), ("worse", 3.0), ("near", 1.05))}
    table = differences_table(values, "loss", False, {"worse": -0.2, "near": None})
    worse, near = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (worse["minus"], worse["shown"], near["shown"]) == ("worse", "better", "no")
    assert worse["difference"] == pytest.approx(-2.0)
    assert worse["from"] < -2 < worse["to"] < 0
    assert worse["p (Holm)"] == pytest.approx(2 * worse["p"])
    assert worse["power"] == pytest.approx(power(0.2, spread(values["arm"]), spread(values["worse"]), 3))
    assert (near["effect"], near["power"], near["seeds for .8"]) == (None, None, None)
    assert differences_table(values, "accuracy", True, {"worse": None}).rows[0][6] == "worse"


def test_the_caches_controls_differ_in_one_thing(tmp_path):
    arms = cached.arms(Options(tmp_path))
    arm = arms["cached"]
    grc = arm.model.cache.resolved()
    assert (grc.preset, grc.read, grc.inference, grc.candidate, grc.mix) == (
        "paper",
        "mean",
        "frozen",
        "linear",
        "heads",
    )
    plain = arms["no cache"].model
    models = {name: completed([one])[0].model for name, one in arms.items()}
    assert models["no cache"] == replace(arm.model, cache=None)
    assert models["constant cache"] == replace(
        arm.model, cache=replace(arm.model.cache, write=False, inference="frozen")
    )
    assert models["keys and values"] == replace(arm.model, cache=AttentionCache())
    wide = models["equal parameters"]
    assert wide == replace(arm.model, cache=None, mlp_ratio=wide.mlp_ratio)
    assert wide.mlp_ratio > plain.mlp_ratio
    assert parameters(wide) == pytest.approx(parameters(arm.model), rel=0.01)
    check_equal(list(arms.values()))


def test_memformers_controls_differ_in_one_thing(tmp_path):
    arm, no_memory, no_forgetting, xl = memformer.arms(Options(tmp_path)).values()
    assert isinstance(arm.model, MemformerConfig)
    assert arm.model.preset == "paper"
    slots = arm.model.memory
    assert slots.slots
    assert slots.forgetting
    assert no_memory.model == replace(arm.model, memory=replace(slots, slots=0))
    assert no_forgetting.model == replace(arm.model, memory=replace(slots, forgetting=False))
    assert xl.model.attention.memory == arm.data.build().max_length, "the whole picture"
    assert parameters(xl.model) == pytest.approx(parameters(arm.model), rel=0.01)
    check_equal([arm, no_memory, no_forgetting, xl])
    assert arm.train == no_memory.train == no_forgetting.train


def test_memformers_pictures_are_14_by_14(tmp_path, monkeypatch):
    monkeypatch.setattr(memformer, "task", lambda options: ("mnist", {"path": "mnist"}))
    monkeypatch.setattr(memformer, "completed", list)  # there is no MNIST here
    monkeypatch.setattr(memformer, "with_parameters", lambda recipe, *_: recipe)
    monkeypatch.setattr(memformer, "parameters", lambda _: 0)
    for recipe in memformer.arms(Options(tmp_path)).values():
        assert recipe.data.images.size == 14
        assert recipe.train.steps == memformer.STEPS
    assert recipe.model.attention.memory == 14 * 14


@pytest.mark.slow
@pytest.mark.exhaustive  # what all experiments share, that of linear transformers shows below
def test_memformers_experiment(tmp_path, monkeypatch):
    tiny = ImageSizes(dim=8, layer_divisor=2, slot_divisor=16, side=8, dropout=0.0)
    monkeypatch.setitem(memformer.SMALL_PICTURES, "digits", tiny)
    monkeypatch.setattr(memformer, "task", lambda options: ("digits", {"valid_size": 20, "test_size": 30}))
    two = {name: memformer.ARMS[name] for name in ("Memformer", "Transformer-XL")}  # the others differ in their recipe
    monkeypatch.setattr(memformer, "ARMS", two)
    (found,) = reproduce("memformer/experiment", Options(tmp_path, steps=2, seeds=2))
    arms, minus, seeds, slots = (table["rows"] for table in found["tables"])
    folder = tmp_path / "runs" / "experiment-digits-2"
    mean = {name: _mean(folder / f"digits-{name.lower().replace(' ', '-')}") for name in memformer.ARMS}
    assert {row[""]: row["nats/byte"] for row in arms} == pytest.approx(mean)
    assert all(row["perplexity"] > np.exp(row["nats/byte"]) - 1e-6 for row in arms), "a mean of exponentials"
    assert {row["minus"]: row["difference"] for row in minus} == pytest.approx(
        {name: mean["Memformer"] - mean[name] for name in list(memformer.ARMS)[1:]}
    )
    assert minus[0]["effect"] == pytest.approx(np.log(1.594 / 1.611))
    assert [row["seed"] for row in seeds] == ["0", "1"]
    assert [row[""] for row in slots] == ["Memformer", "Memformer", "the paper, text"]
    for row in slots[:2]:
        assert sum(value for name, value in row.items() if name.startswith("slots")) == pytest.approx(100, abs=1e-3)


@pytest.mark.slow
def test_linear_transformers_experiment(tmp_path, monkeypatch):
    whole = linear.small_recipe

    def small(options, name):
        found = whole(options, name)
        few = replace(found.data, images=replace(found.data.images, valid_size=20, test_size=30))
        return replace(found, model=replace(found.model, dim=8, num_heads=2, mlp=8), data=few)

    monkeypatch.setattr(linear, "small_recipe", small)
    (found,) = reproduce("linear_transformers/experiment", Options(tmp_path, steps=2, seeds=2))
    folder = tmp_path / "runs" / "experiment-digits-2"
    written = {
        name: json.loads((folder / f"digits-pixels-{name}/seed-1/recipe.json").read_text()) for name in linear.ARMS
    }
    assert [one["model"].pop("attention")["is"] for one in written.values()] == ["linear", "softmax", "reformer"]
    first, *others = [{**one, "name": "", "about": ""} for one in written.values()]
    assert all(one == first for one in others), "the attention alone differs"
    mean = {name: _mean(folder / f"digits-pixels-{name}") / np.log(2) for name in linear.ARMS}
    minus = {row["minus"]: (row["difference"], row["effect"]) for row in found["tables"][1]["rows"]}
    assert minus["softmax"] == pytest.approx((mean["linear"] - mean["softmax"], 0.644 - 0.621))
    assert minus["lsh-1"] == pytest.approx((mean["linear"] - mean["lsh-1"], 0.644 - 0.745))
    last = found["tables"][3]["rows"][-1]
    valid = {name: _mean(folder / f"digits-pixels-{name}", split="valid") / np.log(2) for name in linear.ARMS}
    assert {name: last[name] for name in linear.ARMS} == pytest.approx(valid)
    assert last["updates"] == 2
    assert (tmp_path / "experiment.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.exhaustive
def test_cached_transformers_experiment(tmp_path, monkeypatch):
    sizes = {"valid_size": 20, "test_size": 30}
    monkeypatch.setattr(comparisons, "task", lambda options: ("digits", sizes))
    monkeypatch.setattr(cached, "BATCHES", 2)
    (found,) = reproduce("cached_transformers/experiment", Options(tmp_path, steps=2, seeds=2))
    arms, minus, seeds, gaps = (table["rows"] for table in found["tables"])
    folder = tmp_path / "runs" / "experiment-digits-2"
    names = dict(
        zip(
            cached.arms(Options(tmp_path)),
            ("-paper", "", "-paper-wider", "-paper-constant", "-attention-cache"),
            strict=True,
        )
    )
    mean = {name: 100 * _mean(folder / f"digits-vit{ending}", "accuracy") for name, ending in names.items()}
    assert {row[""]: row["test accuracy, %"] for row in arms} == pytest.approx(mean)
    for row in minus:
        assert row["difference"] == pytest.approx(mean["cached"] - mean[row["minus"]])
        assert row["effect"] == pytest.approx(1.3 if row["minus"] == "keys and values" else 1.4)
    _, task, model = open_run(folder / "digits-vit" / "seed-1")
    seen = [task.train_batch(i, cached.BATCH, cached.ORDER) for i in range(2)]
    right = torch.cat([(model(batch.inputs)[0].argmax(1) == batch.targets).float() for batch in seen])
    assert cached._gap(folder / "digits-vit" / "seed-1") == pytest.approx(100 * right.mean() - seeds[1]["no cache"])
    gap = {row[""]: row["gap, points"] for row in arms}
    assert {row["minus"]: row["difference"] for row in gaps} == pytest.approx(
        {name: gap["cached"] - gap[name] for name in names if name != "cached"}
    )


def _mean(folder: Path, metric: str = "loss", split: str = "test") -> float:
    """The mean score of the runs of a recipe."""
    files = sorted(folder.glob("seed-*/result.json"))
    return statistics.fmean(json.loads(file.read_text())[split][metric] for file in files)
