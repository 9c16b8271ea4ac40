"""Figures 4 to 8 of Memformer: each from end to end, at the size of a test."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from mnemos.lab.evaluate.recorded import KINDS
from mnemos.lab.papers.claim import Claim
from mnemos.lab.papers.memformer import forgetting, lengths, model_costs
from mnemos.lab.papers.memformer.forgetting import figure4
from mnemos.lab.papers.memformer.lengths import figure8
from mnemos.lab.papers.memformer.model_costs import figure5
from mnemos.lab.papers.memformer.slot_figures import figure6, figure7, small
from mnemos.lab.papers.reproduce import Options
from mnemos.lab.run.session import run
from mnemos.memory.slots import SlotsConfig
from mnemos.types import InputError

pytestmark = pytest.mark.usefixtures("forked_comparisons")

FIGURES = {f.__name__: f for f in (figure4, figure5, figure6, figure7, figure8)}


def claim(name):
    return Claim(name, "", "", "")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of text."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"The {i} slots remember what was said, or forget it. " * 30)
    return folder


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run of two updates."""
    recipe = tiny(small(Options(tmp_path_factory.mktemp("out"), data=text), 2))
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(recipe, folder, quiet=True)
    assert (folder / "write_attention.json").is_file()
    return folder


def tiny(recipe):
    memory = replace(recipe.model.memory, slots=6)
    model = replace(
        recipe.model, dim=8, num_heads=2, mlp=8, encoder_layers=1, decoder_layers=1, segment=16, memory=memory
    )
    train = replace(recipe.train, batch_size=2, accelerator="cpu", rollout=replace(recipe.train.rollout, segments=2))
    return replace(recipe, model=model, data=replace(recipe.data, segment=16), train=train)


@pytest.mark.slow
def test_figure4(tmp_path):
    found = figure4(claim("figure4"), Options(tmp_path))
    (table,) = found.tables
    assert len(table.rows) == len(forgetting.SETTINGS) * len(forgetting.STARTS)
    assert (tmp_path / "figure4.png").stat().st_size > 10_000


@pytest.mark.parametrize("share", [0.03, 1.15, 3.2])
def test_near_its_end_a_slot_loses_what_the_formula_says(share):
    left = forgetting.distances(forgetting.drift(16, 4.0, 4.0 * share, 1e-3, 5), 4.0)
    assert left[0] == pytest.approx(2 * math.sin(0.5e-3), rel=1e-9)
    for before, after in itertools.pairwise(left):
        assert after / before == pytest.approx(1 / (1 + share), rel=1e-5)


@pytest.mark.slow
def test_figure5(tmp_path, monkeypatch):
    monkeypatch.setattr(model_costs, "LENGTHS", (32, 64))
    monkeypatch.setattr(model_costs, "SIZES", (16, 32))
    monkeypatch.setattr(model_costs, "SEGMENT", 16)
    monkeypatch.setattr(model_costs, "MEMORY", 32)
    monkeypatch.setattr(model_costs, "BATCH", 3)
    shape = replace(model_costs.MEMFORMER, dim=16, encoder_layers=1, decoder_layers=2, num_heads=2, mlp=24, segment=16)
    monkeypatch.setattr(model_costs, "MEMFORMER", shape)
    found = figure5(claim("figure5"), Options(tmp_path))
    flops, held = found.tables
    assert [row[0] for row in flops.rows] == ["32", "64"]
    plain, _, ours = (flops.rows[1][i] / flops.rows[0][i] for i in (1, 2, 3))
    # From BOS on, twice the segments are twice the work but for BOS; attention to all before is more than that.
    assert 1.9 < ours <= 2 < plain
    # A stream of Transformer-XL keeps 16 and 32 inputs of three layers of width 16, and which of them are valid.
    states, running, training = (
        [row for row in held.rows if row[1] == kind] for kind in ("state", "running", "training")
    )
    assert (states[1][2] - states[0][2]) * 2**20 == pytest.approx(3 * 3 * 16 * (16 * 4 + 1), rel=1e-6)
    assert (states[1][3] - states[0][3]) * 2**20 == pytest.approx(3 * 16 * 16 * 4, rel=1e-6)
    # Inside a segment also two decoder layers' keys and values of 15 tokens and of the 16 encoded ones before them.
    inside = [row for row in held.rows if row[1] == "state inside a segment"]
    assert inside[1][2] == states[1][2]
    assert (inside[1][3] - states[1][3]) * 2**20 == pytest.approx(3 * 2 * 2 * (15 + 16) * 16 * 4, rel=0.01)
    weights = 4 * model_costs.parameters(model_costs.configuration("Memformer", 32)) / 2**20
    # A forward pass has at least the logits, and an update at least the gradients and the states of 8 segments.
    assert running[1][3] - states[1][3] - weights >= 3 * 16 * 256 * 4 / 2**20
    assert training[1][3] > 2 * weights + (1 + model_costs.HORIZON) * states[1][3]
    assert (tmp_path / "figure5.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", model_costs.NAMES[1:])
def test_an_update_reaches_every_parameter(name, monkeypatch):
    monkeypatch.setattr(model_costs, "SEGMENT", 16)
    monkeypatch.setattr(model_costs, "BATCH", 2)
    shape = replace(model_costs.MEMFORMER, dim=16, encoder_layers=1, decoder_layers=2, num_heads=2, mlp=24, segment=16)
    monkeypatch.setattr(model_costs, "MEMFORMER", shape)
    model = model_costs._built(name, 16)
    with torch.no_grad():
        _, state = model(model_costs._tokens(2, 16))
    model_costs._update(model, state)
    # The state is in the middle of a document: only the token before its first segment has no effect.
    assert [n for n, p in model.named_parameters() if p.grad is None] == ["bos.weight"] * (name == "Memformer")
    assert all(p.grad.abs().max() > 0 for p in model.parameters() if p.grad is not None)


def test_models_have_equal_parameters():
    counts = [model_costs.parameters(model_costs.configuration(name, model_costs.MEMORY)) for name in model_costs.NAMES]
    assert max(counts) < 1.001 * min(counts)
    assert model_costs.configuration("Memformer", 64).memory == SlotsConfig(slots=64)


@pytest.mark.slow
def test_figures_6_and_7_of_a_run(finished, tmp_path):
    (finished / "write_attention.json").unlink()  # as of a run of an earlier version: it is listened to now
    found = figure6(claim("figure6"), Options(tmp_path, run=finished))
    (table,) = found.tables
    assert sum(row[2] for row in table.rows) == pytest.approx(100, abs=1e-3)
    assert sum(row[4] for row in table.rows) == 6
    assert len(table.rows) == len(KINDS)
    assert [path.name for path in found.files] == ["figure6.png", "figure6.html"]
    assert '<section id="write-attention"' in found.files[1].read_text()
    found = figure7(claim("figure7"), Options(tmp_path, run=finished))
    assert found.tables
    for table in found.tables:
        even = [row[1] for row in table.rows]
        assert even == sorted(even, reverse=True)
        assert all(row[2] == pytest.approx(100 * row[1] * row[3] / 16) for row in table.rows)
    assert all(path.stat().st_size > 5000 for path in found.files)


def test_a_run_without_slots_is_refused(tmp_path):
    with pytest.raises(InputError, match="no recipe"):
        figure6(claim("figure6"), Options(tmp_path, run=tmp_path))


@pytest.mark.exhaustive
def test_figure8(text, tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "HORIZONS", (1, 8))
    monkeypatch.setattr(lengths, "SLOTS", (1, 4))
    monkeypatch.setattr(lengths, "SEGMENT", 16)
    monkeypatch.setattr(lengths, "READ", 8)
    found = figure8(claim("figure8"), Options(tmp_path, data=text, steps=2))
    horizon, slots = found.tables
    assert [row[0] for row in horizon.rows] == [1, 8]
    assert [row[0] for row in slots.rows] == [1, 4]
    assert horizon.rows[1][1] == slots.rows[1][1], "the same run, trained once"
    assert len(found.runs) == 3
    assert (tmp_path / "figure8.png").stat().st_size > 10_000
