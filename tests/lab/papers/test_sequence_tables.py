"""Tables 5 and 6 of Cached Transformers, and what Memformer's Table 2 counts, at the size of a test."""

from dataclasses import replace

import pytest

from mnemos.lab.cli import main
from mnemos.lab.compare.baselines import with_baselines
from mnemos.lab.compare.equal import check_equal
from mnemos.lab.papers import small_runs
from mnemos.lab.papers.cached_transformers import sequence_tables
from mnemos.lab.papers.findings import Table
from mnemos.lab.papers.memformer.tables import _per_token_of_memory
from mnemos.lab.papers.reproduce import PAPERS, Options, reproduce
from mnemos.lab.recipes import small_tasks
from mnemos.lab.run.checks import complete
from mnemos.memory.gated_cache import GRC

pytestmark = pytest.mark.usefixtures("forked_comparisons")


def test_table6_sets_each_row_beside_its_baselines_and_the_paper(tmp_path, monkeypatch):
    asked = []

    def compare(recipes, folder, seeds, of_claim, baselines):
        asked.append((recipes, folder.name, seeds, baselines))
        names = [
            f"{one.name}{end}" for one in recipes for end in (("", "-constant", "-wider") if one.model.cache else ("",))
        ]
        rows = [{"name": name, "mean": i / 100, "std": 0.001, "seeds": seeds} for i, name in enumerate(names)]
        return {"rows": rows, "majority": 0.14, "runs": {name: [f"{name}/seed-0"] for name in names}}

    monkeypatch.setattr(small_runs, "compare", compare)
    (found,) = reproduce("cached_transformers/table6", Options(tmp_path, steps=20, seeds=3))
    ((recipes, folder, seeds, baselines),) = asked
    assert (len(recipes), folder, seeds, baselines) == (8, "listops-128-20", 3, True)
    assert {(one.train.steps, one.train.eval_every, one.optim.schedule.warmup) for one in recipes} == {(20, 20, 2)}
    rows = {row[""]: row for row in found["tables"][0]["rows"]}
    assert list(rows["BigBird"].values()) == [
        *("BigBird", "4.0 ± 0.1", "5.0 ± 0.1", pytest.approx(1.0), "6.0 ± 0.1", "7.0 ± 0.1"),
        *(36.06, 37.45, pytest.approx(1.39)),
    ]
    assert (rows["linear"]["here"], rows["linear"]["paper gain"]) == ("12.0 ± 0.1", None)
    assert len(found["runs"]) == 16


@pytest.mark.exhaustive
def test_table6(tmp_path, monkeypatch):
    data = replace(small_tasks.LISTOPS_128, train_size=64, valid_size=8, test_size=40)
    monkeypatch.setattr(small_tasks, "LISTOPS_128", data)
    monkeypatch.setattr(sequence_tables, "LISTOPS", {"linear": "listops-128-linear"})
    (found,) = reproduce("cached_transformers/table6", Options(tmp_path, steps=2))
    (row,) = found["tables"][0]["rows"]
    assert all(0 <= float(row[name]) <= 100 for name in ("here", "here cached", "constant cache", "equal parameters"))
    assert len(found["runs"]) == 4


def test_table6_has_a_row_for_each_attention_and_shows_the_paper_without_runs(tmp_path, capsys):
    assert set(PAPERS["cached_transformers"].claim("table6").values) < set(sequence_tables.LISTOPS)
    command = ["reproduce", "cached_transformers/table6", "--recipes-only", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "37.45" in said
    assert "listops-bigbird" in said
    assert not (tmp_path / "out").exists()


def test_table5_has_every_row_of_the_paper_with_equal_batches(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("\n".join([" ".join(f"w{i}" for i in range(11_500)), *["of the end"] * 500]))
    recipes = sequence_tables.word_recipes(Options(tmp_path, data=path, steps=7))
    claim = PAPERS["cached_transformers"].claim("table5")
    assert {name for name in claim.values if "base" in name} <= set(recipes), "the large model has no small form"
    check_equal(list(recipes.values()))
    task = recipes[sequence_tables.XL].data.build()
    models = [complete(one, task).model for one in recipes.values()]
    assert len(models) == len({one.name for one in recipes.values()}) == 7
    for name, model in zip(recipes, models, strict=True):
        cutoffs = model.head.cutoffs if hasattr(model, "head") else model.cutoffs
        assert cutoffs == (2_000, 10_000), name
    in_place, beside = (recipes[name].model for name in (sequence_tables.CACHED, sequence_tables.BESIDE))
    assert (in_place.attention.memory, beside.attention.memory) == (0, sequence_tables.WORDS)
    assert in_place.cache == GRC(preset="paper", length=64, block=32)
    assert [one.name for one in with_baselines([complete(recipes[sequence_tables.CACHED], task)])][1] in {
        one.name for one in recipes.values()
    }


def test_table5_sets_each_row_beside_the_paper(tmp_path, monkeypatch):
    def trained(found, options, name, recipes):
        return small_runs.Trained({}, {row: [200.0 - i, 202.0 - i] for i, row in enumerate(recipes)})

    monkeypatch.setattr(sequence_tables, "train_language_models", trained)
    (found,) = reproduce("cached_transformers/table5", Options(tmp_path, steps=2))
    rows = {row.pop(""): list(row.values()) for row in found["tables"][0]["rows"]}
    assert rows[sequence_tables.XL] == ["201.0 ± 1.4", None, 24.0]
    assert rows[sequence_tables.CACHED] == ["198.0 ± 1.4", -3.0, 22.9]
    assert rows[f"{sequence_tables.CACHED}, constant cache"] == ["196.0 ± 1.4", -5.0, None]
    assert rows["Transformer-XL large, cached"] == [None, None, 17.9]


@pytest.mark.exhaustive
def test_table5(tmp_path, monkeypatch):
    path = tmp_path / "words.txt"
    path.write_text("\n".join([" ".join(f"w{i}" for i in range(11_500)), *["of the end"] * 500]))
    both = sequence_tables.XL, sequence_tables.CACHED
    every = sequence_tables.word_recipes
    monkeypatch.setattr(sequence_tables, "word_recipes", lambda options: {name: every(options)[name] for name in both})
    (found,) = reproduce("cached_transformers/table5", Options(tmp_path / "out", data=path, steps=2))
    rows = {row[""]: row for row in found["tables"][0]["rows"]}
    plain, cached = (float(rows[name]["here"]) for name in both)
    assert min(plain, cached) > 1
    assert rows[both[1]]["minus Transformer-XL"] == pytest.approx(cached - plain, abs=0.1)  # of texts with one decimal


def test_what_a_token_of_memory_costs_is_a_slope():
    table = Table("", ["", "parameters", "GFLOP", "paper GFLOP"])
    table.add("Transformer-XL base memory=100", 1, 2.0, 10.0)
    assert _per_token_of_memory(table) == []
    table.add("Memformer 4+16", 1, 9.0, 9.0)
    table.add("Transformer-XL base memory=1100", 1, 4.0, 18.0)
    (said,) = _per_token_of_memory(table)
    assert "costs 2 MFLOP here and 8 in the paper, 4.0 times as many" in said
