"""Claims of Memformer that are tables: each from end to end, at the size of a test."""

from dataclasses import replace

import pytest

from mnemos import registry
from mnemos.lab.compare.equal import check_equal
from mnemos.lab.papers import small_runs
from mnemos.lab.papers.memformer import recipes, replaying, tables
from mnemos.lab.papers.memformer.recipes import ImageSizes, LanguageSizes
from mnemos.lab.papers.reproduce import Options, reproduce
from mnemos.lab.run.recipe import RolloutConfig
from mnemos.memory.slots import SlotsConfig
from mnemos.types import InputError

pytestmark = pytest.mark.usefixtures("forked_comparisons")


@pytest.fixture
def tiny(monkeypatch) -> None:
    """Two rows a table, and models that take moments."""
    rows = ("Transformer-XL memory=224", "Memformer 4+8")
    for module in (tables, recipes):
        monkeypatch.setattr(module, "PICTURES", {name: recipes.PICTURES[name] for name in rows})
    monkeypatch.setitem(
        recipes.SMALL_PICTURES, "digits", ImageSizes(dim=8, layer_divisor=2, slot_divisor=16, side=8, dropout=0.0)
    )
    monkeypatch.setattr(tables, "LANGUAGE", ("Transformer-XL base memory=1024", "Memformer 4+16"))
    sizes = LanguageSizes(dim=8, num_heads=2, layer_divisor=4, length_divisor=16, dropout=0.0, slide=0)
    monkeypatch.setattr(tables, "PAPER", sizes)
    monkeypatch.setattr(tables, "ROUNDS", 1)
    for module in (tables, recipes):
        monkeypatch.setattr(module, "SMALL_LANGUAGE", sizes)
    monkeypatch.setattr(recipes, "_SMALL_TRAIN", replace(recipes._SMALL_TRAIN, accelerator="cpu"))


@pytest.mark.exhaustive
def test_table1(tmp_path, tiny):
    (found,) = reproduce("memformer/table1", Options(tmp_path, steps=2, seeds=2))
    costs, perplexities, (difference,) = *found["tables"][:2], found["tables"][2]["rows"]
    assert [row["paper GFLOP"] for row in costs["rows"]] == [15.6, 5.0]
    memory = {row[""]: row["model here"] for row in perplexities["rows"]}
    assert memory == {
        "Transformer-XL memory=224": "4 layers, memory 18",
        "Memformer 4+8": "2+4 layers, 4 slots",
    }
    xl, ours = (float(row["perplexity"].split()[0]) for row in perplexities["rows"])
    assert 1 < xl < 400
    assert 1 < ours < 400
    assert difference[""] == "Memformer 4+8 minus Transformer-XL memory=224"
    assert difference["difference"] == pytest.approx(ours - xl, abs=1e-3)
    assert difference["from"] < difference["difference"] < difference["to"]
    assert any("of 1 pairs" in note for note in found["notes"])


@pytest.mark.exhaustive
def test_table2(tmp_path, tiny):
    (tmp_path / "text").mkdir()
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text("a slot that hears nothing forgets; " * 30)
    (found,) = reproduce("memformer/table2", Options(tmp_path / "out", data=tmp_path / "text", steps=2))
    costs, inference, perplexities = found["tables"]
    assert [row["paper GFLOP"] for row in costs["rows"]] == [168.0, 54.0]
    xl, ours, ratio, theirs = inference["rows"]
    for column in list(xl)[1:]:
        assert ratio[column] == pytest.approx(xl[column] / ours[column])
    assert ours["maximum state MiB"] >= ours["state MiB"]
    assert theirs["GFLOP per segment"] == pytest.approx(168 / 54)
    assert theirs["state MiB"] is None  # the paper's 8.1 is not of states
    assert len(perplexities["rows"]) == 2


@pytest.mark.slow
def test_table3(tmp_path, monkeypatch, exhaustive):
    monkeypatch.setattr(replaying, "ROUNDS", 1)
    if not exhaustive:  # each is measured in a process of its own
        monkeypatch.setattr(replaying, "peak_of", lambda _: 2**20)
    tiny = {"dim": 8, "encoder_layers": 1, "decoder_layers": 2, "num_heads": 2, "mlp": 8, "segment": 8}
    monkeypatch.setattr(replaying, "MODEL", replace(replaying.MODEL, **tiny, memory=SlotsConfig(slots=4)))
    (found,) = reproduce("memformer/table3", Options(tmp_path))
    rows = {row[""]: row for row in found["tables"][0]["rows"]}
    assert rows["BPTT"]["relative speed"] == rows["BPTT"]["paper relative speed"] == 1
    assert rows["MRBP"]["MiB saved"] < 0.25 * rows["BPTT"]["MiB saved"], "one segment of eight at a time"
    assert rows["MRBP"]["MiB of states"] > 0 == rows["BPTT"]["MiB of states"]
    if not exhaustive:
        assert (
            {row["process peak MiB"] for row in rows.values()}
            == {row["relative to BPTT"] for row in rows.values()}
            == {1}
        )
    assert rows["GC"]["MiB saved"] is None, "the tensors of checkpointing are unknown"
    assert rows["MRBP"]["paper relative speed"] == 0.9


@pytest.mark.slow
def test_recall(tmp_path, monkeypatch):
    for module in (tables, recipes):
        monkeypatch.setattr(module, "RECALL", replace(module.RECALL, distance=24, shortest=2, rows=4))
        monkeypatch.setattr(module, "RECALL_MODEL", replace(module.RECALL_MODEL, dim=8, mlp=8, segment=8))
    monkeypatch.setattr(recipes, "_RECALL_TRAIN", replace(recipes._RECALL_TRAIN, batch_size=2, accelerator="cpu"))
    (found,) = reproduce("memformer/recall", Options(tmp_path, steps=2))
    names = [row[""] for row in found["tables"][0]["rows"]]
    paper = "Memformer as in the paper, replay"
    assert names == ["Memformer, replay", paper, "Memformer, horizon 1", "softmax, window 16", "guessing"]


def test_recalls_variants_differ_in_what_they_are_named_for():
    ours, paper, truncated, softmax = tables.variants().values()
    assert replace(paper, name=ours.name, model=ours.model) == ours
    assert paper.model == replace(ours.model, preset="paper", decoder_reads=False)
    assert (ours.model, ours.data, ours.optim) == (truncated.model, truncated.data, truncated.optim)
    assert (ours.train.rollout.horizon, truncated.train.rollout.horizon) == (0, 1)
    assert softmax.model.attention.window == 2 * ours.model.segment
    assert ours.data.distance == 4096 == 32 * ours.model.segment


def test_an_ablation_differs_in_one_thing():
    base, _ = recipes.picture_variant("Memformer 2+6 memory=64", ImageSizes())
    for name, change in {
        "Memformer 2+6 memory=16": {"slots": 16},
        "w/o memory": {"slots": 0},
        "temperature=1.0": {"temperature": 1.0},
        "w/o forgetting": {"forgetting": False},
        "w/o multi-head": {"num_heads": 1},
    }.items():
        variant, rollout = recipes.picture_variant(name, ImageSizes())
        assert variant == replace(base, memory=replace(base.memory, **change)), name
        assert (rollout.segment_length, rollout.horizon) == (28, 8)


def test_the_papers_settings():
    found = registry.load("recipe", "mnist-memformer")()
    assert (found.model.encoder_layers, found.model.decoder_layers, found.model.memory.slots) == (4, 8, 64)
    assert (found.train.steps, found.train.batch_size, found.optim.lr, found.optim.grad_clip) == (
        10_000,
        256,
        1e-3,
        1.0,
    )
    text = registry.load("recipe", "wikitext-memformer")()
    assert (text.model.dim, text.model.mlp, text.model.memory.slots, text.data.segment) == (512, 2048, 1024, 128)
    assert (text.data.tokens, text.model.tied, text.model.cutoffs) == ("words", True, (20_000, 40_000, 200_000))
    assert (text.train.steps, text.train.batch_size) == (150_000, 128)
    of_bytes = registry.load("recipe", "wikitext-bytes-memformer")()
    assert (of_bytes.data, of_bytes.model.cutoffs) == (replace(text.data, tokens="bytes"), ())
    for recipe in (found, text):
        resolved = recipe.model.resolved()
        assert (resolved.memory.radius, resolved.cls, resolved.decoder_reads) == (1, 2, False)
    compressive = registry.load("recipe", "wikitext-compressive")()
    found_sizes = compressive.model.attention
    assert (found_sizes.memory, found_sizes.compressed, found_sizes.ratio, found_sizes.compression) == (
        512,
        512,
        4,
        "convolution",
    )
    baseline = registry.load("recipe", "wikitext-xl")()
    assert compressive.model == replace(baseline.model, attention=found_sizes)
    assert (text.train.rollout.segments, text.train.rollout.slide) == (8, 1)
    check_equal([text, baseline])  # both read one new segment per update
    assert (baseline.model.layers, baseline.model.attention.memory, baseline.data) == (16, 1024, text.data)
    for other in recipes.PICTURES.values():
        recipe = registry.load("recipe", f"mnist-{other}")()
        assert (recipe.data, recipe.optim) == (found.data, found.optim)
        assert replace(recipe.train, rollout=found.train.rollout) == found.train


def test_what_is_compared_may_read_its_rows_in_its_own_way():
    found = [recipes.picture_recipe("digits", name) for name in ("Transformer-XL memory=56", "Memformer 4+8", "LSTM")]
    assert len({recipe.train.rollout for recipe in found}) > 1
    check_equal(found)
    more = replace(found[0].train, rollout=RolloutConfig(segments=2))
    with pytest.raises(InputError, match="equal train settings"):
        check_equal([found[1], replace(found[0], train=more)])


def test_the_order_of_merit_counts_pairs():
    theirs = {"a": (0.0, 1.0), "b": (0.0, 2.0), "c": (0.0, 2.0)}
    found = small_runs.Trained({}, {"a": [1.0], "b": [2.0, 4.0], "c": [0.5], "ours": [9.0]})
    said = found.order(theirs, 1)
    assert "c; a; b; ours" in said
    assert "1 of 2 pairs" in said
    assert found.perplexity("b").startswith("3.000 ± 1.414")


def test_pictures_want_mnist(tmp_path):
    with pytest.raises(InputError, match=rf"--data {tmp_path}: .*MNIST"):
        tables._picture_recipe(Options(tmp_path, data=tmp_path), "LSTM")
