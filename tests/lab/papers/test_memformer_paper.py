"""Claims of Memformer: each from end to end, at the size of a test, and what its models differ in."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from mnemos import registry
from mnemos.lab.compare.equal import check_equal
from mnemos.lab.evaluate.write_attention import KINDS
from mnemos.lab.measure import timing
from mnemos.lab.papers.claims import Claim
from mnemos.lab.papers.memformer import figures, recipes, tables
from mnemos.lab.papers.memformer.recipes import ImageSizes
from mnemos.lab.papers.reproduce import Options, reproduce
from mnemos.lab.recipes.family import altered
from mnemos.lab.run.session import run
from mnemos.memory.slots import SlotsConfig

pytestmark = pytest.mark.usefixtures("forked_comparisons")

# ---- recipes ----


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
        assert variant == altered(base, memory=change), name
        assert (rollout.segment_length, rollout.horizon) == (28, 8)


def test_recipes_of_a_table_differ_in_their_model_alone():
    found = registry.load("recipe", "mnist-memformer")()
    for other in recipes.PICTURES.values():
        recipe = registry.load("recipe", f"mnist-{other}")()
        assert (recipe.data, recipe.optim) == (found.data, found.optim)
        assert replace(recipe.train, rollout=found.train.rollout) == found.train
    text, xl, compressive = (
        registry.load("recipe", f"wikitext-{name}")() for name in ("memformer", "xl", "compressive")
    )
    check_equal([text, xl])  # both read one new segment per update
    assert xl.data == text.data
    assert compressive.model == replace(xl.model, attention=compressive.model.attention)
    of_bytes = registry.load("recipe", "wikitext-bytes-memformer")()
    assert (of_bytes.data, of_bytes.model.cutoffs) == (replace(text.data, tokens="bytes"), ())


def test_recalls_variants_differ_in_what_they_are_named_for():
    ours, paper, truncated, softmax = tables.variants().values()
    assert replace(paper, name=ours.name, model=ours.model) == ours
    assert paper.model == replace(ours.model, preset="paper", decoder_reads=False)
    assert (ours.model, ours.data, ours.optim) == (truncated.model, truncated.data, truncated.optim)
    assert (ours.train.rollout.horizon, truncated.train.rollout.horizon) == (0, 1)
    assert softmax.model.attention.window == 2 * ours.model.segment
    assert ours.data.distance == 4096 == 32 * ours.model.segment


# ---- tables ----


def test_table3(tmp_path, monkeypatch, exhaustive):
    monkeypatch.setattr(tables, "REPLAY_ROUNDS", 1)
    monkeypatch.setattr(timing, "LEAST", 0.0)
    if not exhaustive:  # each is measured in a process of its own
        monkeypatch.setattr(tables, "peak_of", lambda _: 2**20)
    sizes = {"dim": 8, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 8, "segment": 8}
    monkeypatch.setattr(tables, "MODEL", replace(tables.MODEL, **sizes, memory=SlotsConfig(slots=4)))
    (found,) = reproduce("memformer/table3", Options(tmp_path))
    rows = {row[""]: row for row in found["tables"][0]["rows"]}
    assert rows["BPTT"]["relative speed"] == rows["BPTT"]["paper relative speed"] == 1
    assert rows["MRBP"]["MiB saved"] < 0.25 * rows["BPTT"]["MiB saved"], "one segment of eight at a time"
    assert rows["MRBP"]["MiB of states"] > 0 == rows["BPTT"]["MiB of states"]
    assert exhaustive or {row["process peak MiB"] for row in rows.values()} == {1}
    assert rows["GC"]["MiB saved"] is None, "the tensors of checkpointing are unknown"
    assert rows["MRBP"]["paper relative speed"] == 0.9


def test_recall(tmp_path, monkeypatch, exhaustive):
    for module in (tables, recipes):
        monkeypatch.setattr(module, "RECALL", replace(module.RECALL, distance=24, shortest=2, rows=4))
        monkeypatch.setattr(module, "RECALL_MODEL", replace(module.RECALL_MODEL, dim=8, mlp=8, segment=8))
    monkeypatch.setattr(recipes, "_RECALL_TRAIN", replace(recipes._RECALL_TRAIN, batch_size=2, accelerator="cpu"))
    every = tables.variants()
    if not exhaustive:
        every = {name: every[name] for name in ("Memformer, replay", "softmax, window 16")}
        monkeypatch.setattr(tables, "variants", lambda: every)
    (found,) = reproduce("memformer/recall", Options(tmp_path, steps=2))
    rows = found["tables"][0]["rows"]
    assert [row[""] for row in rows] == [*every, "guessing"]
    assert all(0 <= float(row["right, %"]) <= 100 for row in rows)


# ---- figures ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two updates."""
    text = tmp_path_factory.mktemp("text")
    for i in range(4):
        (text / f"{i}.txt").write_text(f"The {i} slots remember what was said, or forget it. " * 20)
    sizes = {"dim": 8, "num_heads": 2, "mlp": 8, "encoder_layers": 1, "decoder_layers": 1, "segment": 32}
    recipe = altered(
        figures.small(Options(tmp_path_factory.mktemp("out"), data=text), 2),
        model={**sizes, "memory": {"slots": 6}},
        data={"segment": 32},
        train={"batch_size": 2, "accelerator": "cpu", "rollout": {"segments": 2}},
    )
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(recipe, folder, quiet=True)
    return folder


def test_figure4(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "STEPS", 64)
    found = figures.figure4(Claim("figure4", "", "", ""), Options(tmp_path))
    (table,) = found.tables
    assert len(table.rows) == len(figures.SETTINGS) * len(figures.STARTS)
    assert (tmp_path / "figure4.png").stat().st_size > 3000


@pytest.mark.parametrize("share", [0.03, 1.15, 3.2])
def test_near_its_end_a_slot_loses_what_the_formula_says(share):
    left = figures.distances(figures.drift(16, 4.0, 4.0 * share, 1e-3, 5), 4.0)
    assert left[0] == pytest.approx(2 * math.sin(0.5e-3), rel=1e-9)
    for before, after in itertools.pairwise(left):
        assert after / before == pytest.approx(1 / (1 + share), rel=1e-5)


@pytest.fixture
def small_costs(monkeypatch):
    sizes = {"dim": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 24, "segment": 16}
    changes = {"LENGTHS": (32, 64), "SIZES": (16, 32), "SEGMENT": 16, "MEMORY": 32, "BATCH": 3, "HORIZON": 3}
    for name, value in {**changes, "MEMFORMER": replace(figures.MEMFORMER, **sizes)}.items():
        monkeypatch.setattr(figures, name, value)


def test_figure5(tmp_path, small_costs):
    found = figures.figure5(Claim("figure5", "", "", ""), Options(tmp_path))
    flops, use = found.tables
    assert [row[0] for row in flops.rows] == ["32", "64"]
    plain, _, ours = (flops.rows[1][i] / flops.rows[0][i] for i in (1, 2, 3))
    # From BOS on, twice the segments are twice the work but for BOS; attention to all before is more than that.
    assert 1.9 < ours <= 2 < plain
    # A stream of Transformer-XL keeps 16 and 32 inputs of two layers of width 16, and which of them are valid.
    states, inside, running, training = (
        [row for row in use.rows if row[1] == kind]
        for kind in ("state", "state inside a segment", "running", "training")
    )
    assert (states[1][2] - states[0][2]) * 2**20 == pytest.approx(3 * 2 * 16 * (16 * 4 + 1), rel=1e-6)
    assert (states[1][3] - states[0][3]) * 2**20 == pytest.approx(3 * 16 * 16 * 4, rel=1e-6)
    # Inside a segment also a decoder layer's keys and values of 15 tokens and of the 16 encoded ones before them.
    assert inside[1][2] == states[1][2]
    assert (inside[1][3] - states[1][3]) * 2**20 == pytest.approx(3 * 2 * (15 + 16) * 16 * 4, rel=0.01)
    weights = 4 * figures.parameters(figures.configuration("Memformer", 32)) / 2**20
    # A forward pass has at least the logits, and an update at least the gradients and the states of its segments.
    assert running[1][3] - states[1][3] - weights >= 3 * 16 * 256 * 4 / 2**20
    assert training[1][3] > 2 * weights + (1 + figures.HORIZON) * states[1][3]
    assert (tmp_path / "figure5.png").stat().st_size > 3000


@pytest.mark.parametrize("name", figures.NAMES[1:])
def test_an_update_reaches_every_parameter(name, small_costs):
    model = figures.built(name, 16)
    with torch.no_grad():
        _, state = model(figures.tokens(3, 16))
    figures.update(model, state)
    # The state is in the middle of a document: only the token before its first segment has no effect.
    assert [n for n, p in model.named_parameters() if p.grad is None] == ["bos.weight"] * (name == "Memformer")
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)


def test_models_have_equal_parameters():
    counts = [figures.parameters(figures.configuration(name, figures.MEMORY)) for name in figures.NAMES]
    assert max(counts) < 1.001 * min(counts)
    assert figures.configuration("Memformer", 64).memory == SlotsConfig(slots=64)


def test_figures_6_and_7_of_a_run(finished, tmp_path):
    found = figures.figure6(Claim("figure6", "", "", ""), Options(tmp_path, run=finished))
    (table,) = found.tables
    assert sum(row[2] for row in table.rows) == pytest.approx(100, abs=1e-3)
    assert sum(row[4] for row in table.rows) == 6
    assert len(table.rows) == len(KINDS)
    assert [path.name for path in found.files] == ["figure6.png"]
    found = figures.figure7(Claim("figure7", "", "", ""), Options(tmp_path, run=finished))
    assert found.tables
    for table in found.tables:
        relative = [row[1] for row in table.rows]
        assert relative == sorted(relative, reverse=True)
        assert all(row[2] == pytest.approx(100 * row[1] * row[3] / 32) for row in table.rows)
    assert all(path.stat().st_size > 3000 for path in found.files)


def test_words_are_wrapped(monkeypatch):
    monkeypatch.setattr(figures, "COLUMNS", 8)
    words = tuple((word, len(word)) for word in ("one ", "two ", "three", "\n\n", "four"))
    lines = [(0, 0, 0, "one "), (1, 0, 4, "two "), (2, 1, 0, "three"), (4, 2, 0, "four")]
    assert figures._wrap(words) == lines
    apart = figures._wrap((("Anna", 1), ("is", 1)))  # words of a vocabulary, without white space of their own
    assert [text for *_, text in apart] == ["Anna ", "is "]
