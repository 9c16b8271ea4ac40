"""The functions behind the claims of Cached Transformers: counted costs, small models, pictures of a run."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from scipy import stats

import mnemos
from mnemos.lab.cli import main
from mnemos.lab.papers.cached_transformers import comparisons, figures, image_tables
from mnemos.lab.papers.cached_transformers.image_recipes import PAPER_CACHE
from mnemos.lab.papers.reproduce import Options
from mnemos.lab.papers.small_runs import task
from mnemos.lab.run.run import Run
from mnemos.ops.gated_cache.cost import parts

pytestmark = pytest.mark.usefixtures("forked_comparisons")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_is_counted_at_the_real_size_is_what_the_formula_says():
    grcs = [PAPER_CACHE, replace(PAPER_CACHE, ratio=1.0), image_tables.AUTO, replace(image_tables.AUTO, ratio=1.0)]
    plain, *cached = image_tables.costs("PVT-Tiny", tuple(grcs))
    host = image_tables.config("PVT-Tiny").build().host
    for grc, one in zip(grcs, cached, strict=True):
        assert one.training - plain.training == pytest.approx(one.added, abs=1e-9)
        assert plain.inference < one.inference < one.training
        shapes = [(swapped.shape, swapped.grc) for swapped in mnemos.cache(host, grc).swapped]
        mnemos.uncache(host)
        # The paper does not count the products of queries with keys and of weights with values.
        found = [part for both in shapes for part in parts(*both)]
        counted = sum(part.macs for part in found if part.name not in ("scores and values", "linear attention")) / 1e9
        assert one.papers - plain.papers == pytest.approx(counted, abs=1e-9)
    assert plain.training == plain.inference
    assert plain.parameters == 13_229_288
    # The host and half of its width are near the paper's 1.90 and 2.15; the whole width is not near its 2.97.
    found = [round(one.papers, 2) for one in (plain, *cached[:2])]
    assert found == [1.86, 2.07, 2.57]
    assert [round(one.training, 2) for one in cached] == [2.36, 2.94, 2.1, 2.43]


@pytest.fixture(scope="module", autouse=True)
def few_digits():
    """The small runs are scored on a few digits: every control reads both splits."""
    with pytest.MonkeyPatch.context() as patched:
        sizes = {"valid_size": 20, "test_size": 30}
        patched.setattr(comparisons, "task", lambda options: ("digits", sizes))
        yield


def test_the_data_chooses_the_task(tmp_path):
    assert task(Options(tmp_path)) == ("digits", {})
    assert task(Options(tmp_path, data=tmp_path)) == ("cifar", {"folder": str(tmp_path)})
    (tmp_path / "mnist").mkdir()
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (tmp_path / "mnist" / name).touch()
    assert task(Options(tmp_path, data=tmp_path)) == ("mnist", {"path": str(tmp_path / "mnist")})


def test_options_change_the_small_recipes(tmp_path):
    options = Options(tmp_path, steps=7)
    plain, *cached = comparisons.ratios(options, "pvt", (0.25, 1.0))
    assert plain.model.cache is None
    assert [one.model.cache.ratio for one in cached] == [0.25, 1.0]
    assert {one.train.steps for one in (plain, *cached)} == {7}
    assert len({one.name for one in (plain, *cached)}) == 3
    assert {one.data for one in (plain, *cached)} == {plain.data}


def test_a_point_is_compared_at_its_own_flops():
    curve = [(1.0, 10.0), (3.0, 20.0)]
    assert [figures._at(curve, x) for x in (0.0, 1.0, 2.0, 3.0, 9.0)] == [10.0, 10.0, 15.0, 20.0, 20.0]
    assert figures._above([curve, [(2.0, 15.1), (4.0, 19.0)]]).startswith("1 of 2 cached models")


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory):
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("out")
    recipe = comparisons.recipe(Options(out, steps=3), "vit", comparisons.CACHED)
    Run.open(recipe, out / "run", quiet=True).train()
    return out / "run"


@pytest.mark.slow
@pytest.mark.parametrize("claim", ["figure4", pytest.param("figure5", marks=pytest.mark.exhaustive)])
def test_figures_are_drawn_from_a_finished_run(claim, cached_run, tmp_path, capsys):
    for name in ("explain.json", "explain.safetensors"):  # of a run without them: it is explained now
        (cached_run / name).unlink(missing_ok=True)
    assert main(["reproduce", f"cached_transformers/{claim}", "--run", str(cached_run), "--out", str(tmp_path)]) == 0
    assert (tmp_path / f"{claim}.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / f"{claim}.html").read_text()
    found = json.loads((tmp_path / f"{claim}.json").read_text())
    assert found["runs"] == [str(cached_run)]
    assert claim != "figure5" or found["tables"][0]["title"].endswith("a gate per group of channels")
    layers = found["tables"][0]["rows"]
    assert len(layers) == len(json.loads((cached_run / "explain.json").read_text())["layers"])
    assert not (tmp_path / "runs").exists(), "nothing was trained"


def test_figure1_draws_the_papers_models_and_ours(tmp_path, monkeypatch):
    cost = image_tables.Cost(10**6, 1.0, 1.0, 0.0, 1.0)
    monkeypatch.setattr(figures, "costs", lambda name: (cost, cost._replace(training=1.2), cost))

    def trained(options, name, recipes):
        rows = [
            {"name": one.name, "flops": (i + 1) * 2e6, "mean": 0.5 + i / 100, "std": None, "seeds": 1}
            for i, one in enumerate(recipes)
        ]
        return {"rows": rows, "metric": "accuracy", "controls": [], "runs": {}, "majority": 0.1, "folder": tmp_path}

    monkeypatch.setattr(comparisons, "trained", trained)
    assert main(["reproduce", "cached_transformers/figure1", "--out", str(tmp_path)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["claim-figure1.html", "figure1.json", "figure1.png"]
    theirs, ours = json.loads((tmp_path / "figure1.json").read_text())["tables"]
    assert {row["G cached"] for row in theirs["rows"]} == {1.2}
    assert [row["M multiply-adds"] for row in ours["rows"]] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.slow
def test_costs_are_shown_with_both_lengths(tmp_path, monkeypatch):
    monkeypatch.setattr(image_tables, "RECIPES", {"PVT-Tiny": "imagenet-pvt-tiny"})
    assert main(["reproduce", "cached_transformers/costs", "--out", str(tmp_path)]) == 0
    found = [row for table in json.loads((tmp_path / "costs.json").read_text())["tables"] for row in table["rows"]]
    assert len(found) == 4, "parameters, and FLOPs in training, in eval and as the paper counts"
    for row in found:
        assert row["+ %"] > row["+ %, auto"] > 0


@pytest.mark.slow
def test_a_table_trains_small_models_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparisons, "task", lambda options: ("digits", {"valid_size": 20, "test_size": 30}))
    kinds = "", "-cached", comparisons.CONTROLS["-cached"]
    monkeypatch.setattr(comparisons, "TABLE1", kinds)  # without the other caches
    whole = comparisons.recipe

    def small(options, host, *kind):
        found = whole(options, host, *kind)
        sizes = {"dim": 8, "depths": (1, 1), "num_heads": (1, 2)} if host == "swin" else {}
        return replace(found, model=replace(found.model, **sizes), train=replace(found.train, batch_size=4))

    monkeypatch.setattr(comparisons, "recipe", small)
    arguments = ["reproduce", "cached_transformers/table8", "--steps", "2", "--out", str(tmp_path)]
    assert main(arguments) == 0
    found = json.loads((tmp_path / "table8.json").read_text())
    assert len(found["runs"]) == 3
    assert [one["folder"] for one in found["trained"]] == found["runs"]
    assert {len(one["commit"] or "") for one in found["trained"]} <= {0, 40}
    (row,), gains = (table["rows"] for table in found["tables"][-2:])
    assert "GRC, mnemos, never written" in row
    assert [gain[""] for gain in gains] == ["digits-swin-cached"]
    assert {gain["p, control"] for gain in gains} == {None}, "one seed"
    results = {path: (tmp_path / path / "result.json").stat().st_mtime_ns for path in found["runs"]}
    assert main(arguments) == 0
    for path, written in results.items():
        assert (tmp_path / path / "result.json").stat().st_mtime_ns == written
    said = capsys.readouterr().out
    assert "80.9" in said
    assert "--seeds 5" in said


def test_table4_says_which_tracks_were_not_run(tmp_path, capsys):
    assert main(["reproduce", "cached_transformers/table4", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 0
    capsys.readouterr()
    rows = json.loads((tmp_path / "o/table4.json").read_text())["tables"][0]["rows"]
    assert [row["recipe"] for row in rows][:2] == ["iwslt14-de-en", "iwslt14-es-en"]
    assert [(row["paper plain"], row["paper cached"]) for row in rows][::5] == [(35.5, 36.0), (28.8, 29.4)]
    assert {row["plain"] for row in rows} == {row["cached"] for row in rows} == {"not run"}
    assert all({row["recipe"], row["recipe"] + "-cached"} <= set(mnemos.registry.names("recipe")) for row in rows)


def test_gains_are_taken_to_the_host_and_to_the_control_and_corrected_over_the_table():
    def rows(host, **scores):
        return {
            "rows": [
                {"name": host + end, "mean": statistics.fmean(each), "std": statistics.stdev(each), "seeds": len(each)}
                for end, each in zip(("", "-paper", "-paper-constant"), scores.values(), strict=True)
            ]
        }

    vit = rows("vit", none=(0.9, 0.91, 0.92), paper=(0.94, 0.95, 0.96), constant=(0.93, 0.95, 0.97))
    pvt = rows("pvt", none=(0.8, 0.82, 0.84), paper=(0.79, 0.82, 0.85), constant=(0.7, 0.71, 0.72))
    found = comparisons.gains([vit, pvt], ("", "-paper", "-paper-constant"))
    first, second = found.rows
    # Welch by hand: 0.04 ± 2.776·0.01·√(2/3), with 4 degrees of freedom.
    assert first[:2] == ["vit-paper", "+4.0 (+1.7 to +6.3)"]
    assert first[3:5] == ["GRC, paper, constant cache", "+0.0 (−4.2 to +4.2)"]
    assert (second[1], second[4]) == ("+0.0 (−6.1 to +6.1)", "+11.0 (+4.4 to +17.6)")
    p = 2 * stats.t.sf(0.04 / (0.01 * (2 / 3) ** 0.5), 4)
    assert first[2] == pytest.approx(2 * p), "Holm: the smaller of two"
    assert second[2] == pytest.approx(1.0)
