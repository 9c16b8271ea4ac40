"""Experiments on the papers' claims: power, the direction of differences, and controls that differ in one thing."""

import json
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
from scipy import stats

from mnemos.lab.compare.baselines import parameters
from mnemos.lab.compare.equal import check_equal, completed
from mnemos.lab.compare.significance import Spread, spread
from mnemos.lab.papers.cached_transformers import experiment as cached
from mnemos.lab.papers.drawing import mean_curve
from mnemos.lab.papers.experiments import add_differences, differences_table, power, seeds_needed
from mnemos.lab.papers.findings import Finding
from mnemos.lab.papers.linear_transformers import experiment as linear
from mnemos.lab.papers.memformer import experiment as memformer
from mnemos.lab.papers.reproduce import Options, reproduce
from mnemos.lab.papers.small_runs import Trained, digits_or_mnist, perplexities, perplexity_text
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.files import Result
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.models.memformer import MemformerConfig

pytestmark = pytest.mark.usefixtures("forked_comparisons")

# ---- power and differences ----


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
    assert power(0.0, Spread(0.0, 1.0, 5), Spread(0.0, 2.0, 5), 5) == pytest.approx(0.05), "both tails"
    for one in (spread([1.0]), spread([1.0, 1.0])):
        assert np.isnan(power(1.0, one, one, 5))
        assert seeds_needed(1.0, one, one) is None
    assert seeds_needed(1e-6, Spread(0.0, 1.0, 5), Spread(0.0, 1.0, 5)) is None, "more than are searched"


def test_a_difference_is_the_first_variant_minus_its_control():
    values = {name: [x, x + 0.1, x + 0.2] for name, x in (("first", 1.0), ("worse", 3.0), ("near", 1.05))}
    table = differences_table(values, "loss", False, {"worse": -0.2, "near": None})
    worse, near = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (worse["minus"], worse["shown"], near["shown"]) == ("worse", "better", "no")
    assert worse["difference"] == pytest.approx(-2.0)
    assert worse["from"] < -2 < worse["to"] < 0
    assert worse["p (Holm)"] == pytest.approx(2 * worse["p"])
    assert worse["power"] == pytest.approx(power(0.2, spread(values["first"]), spread(values["worse"]), 3))
    assert (near["effect"], near["power"], near["seeds for .8"]) == (None, None, None)
    assert differences_table(values, "accuracy", True, {"worse": None}).rows[0][6] == "worse"


def test_a_curve_is_the_mean_over_the_steps_that_every_seed_has():
    one = {"step": np.array([1, 2, 3]), "loss": np.array([1.0, np.nan, 3.0])}
    two = {"step": np.array([2, 3, 4]), "loss": np.array([5.0, 5.0, 9.0])}
    step, value = mean_curve([one, two], "loss")
    np.testing.assert_array_equal(step, [2, 3])
    np.testing.assert_array_equal(value, [np.nan, 4.0])


def test_perplexities_of_seeds_and_their_differences(tmp_path):
    losses = {"first": [1.0, 1.1, 1.3], "other": [2.0, 2.1, 2.1], "diverged": [1.0, 800.0, 1.0]}
    runs = {name: [tmp_path / f"{name}-{i}" for i in range(3)] for name in losses}
    for name, folders in runs.items():
        for folder, loss in zip(folders, losses[name], strict=True):
            folder.mkdir()
            Result(test={"loss": loss}).write(folder)
    scores = perplexities(Trained({}, runs, {}))
    assert scores["first"] == pytest.approx(np.exp(losses["first"]))
    assert [perplexity_text(values) for values in ([2.0, 2.0, 5.0], [2.0], scores["diverged"])] == [
        "3.000 ± 1.732",
        "2.000",
        "inf",
    ]
    finding, pairs = Finding(), [("first", "other"), ("first", "first")]
    add_differences(finding, Options(tmp_path, seeds=1), scores, pairs)
    assert not finding.tables
    add_differences(finding, Options(tmp_path, seeds=3), scores, pairs)
    row, same = (dict(zip(finding.tables[0].columns, row, strict=True)) for row in finding.tables[0].rows)
    assert row[""] == "first minus other"
    assert row["difference"] == pytest.approx(np.mean(scores["first"]) - np.mean(scores["other"]))
    assert row["from"] < row["difference"] < row["to"] < 0
    wanted = stats.ttest_ind(scores["first"], scores["other"], equal_var=False).pvalue
    assert row["p"] == pytest.approx(2 * wanted), "the smaller of two"
    assert (same["difference"], same["p"]) == (0, 1)


def test_grey_pictures_are_digits_or_mnist(tmp_path):
    assert digits_or_mnist(Options(tmp_path))[0] == "digits"
    refuses("found no MNIST files; omit --data", digits_or_mnist, Options(tmp_path, data=tmp_path))
    for part in ("train-images-idx3", "train-labels-idx1"):
        (tmp_path / f"{part}-ubyte").touch()
    assert digits_or_mnist(Options(tmp_path, data=tmp_path)) == ("mnist", {"path": str(tmp_path)})


# ---- controls ----


def test_the_caches_controls_differ_in_one_thing(tmp_path):
    recipes = cached.variants(Options(tmp_path))
    model = recipes["cached"].model
    grc = model.cache.resolved()
    settings = (grc.preset, grc.read, grc.inference, grc.candidate, grc.mix)
    assert settings == ("paper", "mean", "frozen", "linear", "heads")
    models = {name: completed([one])[0].model for name, one in recipes.items()}
    assert models["no cache"] == replace(model, cache=None)
    assert models["constant cache"] == altered(model, cache={"write": False, "inference": "frozen"})
    assert models["keys and values"] == replace(model, cache=AttentionCache())
    wide = models["equal parameters"]
    assert wide == replace(model, cache=None, mlp_ratio=wide.mlp_ratio)
    assert wide.mlp_ratio > model.mlp_ratio
    assert parameters(wide) == pytest.approx(parameters(model), rel=0.01)
    check_equal(list(recipes.values()))


def test_memformers_controls_differ_in_one_thing(tmp_path):
    first, no_memory, no_forgetting, xl = memformer.variants(Options(tmp_path)).values()
    assert isinstance(first.model, MemformerConfig)
    assert first.model.preset == "paper"
    slots = first.model.memory
    assert slots.slots
    assert slots.forgetting
    assert no_memory.model == replace(first.model, memory=replace(slots, slots=0))
    assert no_forgetting.model == replace(first.model, memory=replace(slots, forgetting=False))
    assert xl.model.attention.memory == first.data.build().max_length, "the whole picture"
    assert parameters(xl.model) == pytest.approx(parameters(first.model), rel=0.01)
    check_equal([first, no_memory, no_forgetting, xl])
    assert first.train == no_memory.train == no_forgetting.train


# ---- from end to end ----


def test_linear_transformers_experiment(tmp_path, monkeypatch):
    whole = linear.small_recipe
    tiny = {"model": {"dim": 8, "num_heads": 2, "mlp": 8}, "data": {"images": {"valid_size": 10, "test_size": 12}}}
    monkeypatch.setattr(linear, "small_recipe", lambda options, name: altered(whole(options, name), **tiny))
    monkeypatch.setattr(linear, "VARIANTS", ("linear", "lsh-1"))
    (found,) = reproduce("linear_transformers/experiment", Options(tmp_path, steps=2))
    folders = {name: tmp_path / f"runs/experiment-digits-2/digits-pixels-{name}" for name in linear.VARIANTS}
    written = [json.loads((folder / "seed-0/recipe.json").read_text()) for folder in folders.values()]
    assert [one["model"].pop("attention")["is"] for one in written] == ["linear", "reformer"]
    first, other = ({**one, "name": "", "about": ""} for one in written)
    assert first == other, "the attention alone differs"
    results = {name: json.loads((folder / "seed-0/result.json").read_text()) for name, folder in folders.items()}
    bits = {
        split: {name: one[split]["loss"] / np.log(2) for name, one in results.items()} for split in ("test", "valid")
    }
    variants, (minus,) = (table["rows"] for table in found["tables"][:2])
    assert {row[""]: row["bits/dim"] for row in variants} == pytest.approx(bits["test"])
    assert minus["minus"] == "lsh-1"
    assert minus["difference"] == pytest.approx(bits["test"]["linear"] - bits["test"]["lsh-1"])
    assert minus["effect"] == pytest.approx(0.644 - 0.745)
    last = found["tables"][3]["rows"][-1]
    assert {name: last[name] for name in folders} == pytest.approx(bits["valid"])
    assert last["updates"] == 2
    assert (tmp_path / "experiment.png").stat().st_size > 3000
    assert [one["folder"] for one in found["trained"]] == found["runs"]
    assert len(found["runs"]) == 2
