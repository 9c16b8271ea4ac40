"""Claims of "Transformers are RNNs": each from end to end, at the size of a test."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mnemos import native, registry
from mnemos.lab.measure import timing
from mnemos.lab.measure.decoding import whole, with_state, without_state
from mnemos.lab.measure.peak import live_peak_of, peak_of
from mnemos.lab.papers.baselines.reformer import ReformerConfig, draw_rotations, reformer_attention
from mnemos.lab.papers.linear_transformers import figures, tables
from mnemos.lab.papers.linear_transformers.recipes import attention
from mnemos.lab.papers.reproduce import Options, reproduce
from mnemos.models.transformer import Transformer

pytestmark = pytest.mark.usefixtures("forked_comparisons")

# As long as the paper's, whose positions are learned and end where a picture does.
TINY = replace(tables.PAPER, dim=16, layers=1, num_heads=2, mlp=16)

# ---- recipes ----


def test_lsh_is_the_published_reformer_in_the_papers_chunks():
    for images, length, chunks in (("mnist-pixels", 783, 27), ("cifar-pixels", 3071, 83)):
        found = attention("lsh-4", length)
        assert (found.name, found.rounds, found.buckets) == ("reformer", 4, 64)
        assert found.chunk * chunks == length
        for name in (f"{images}-lsh-1", f"{images}-lsh-4"):
            assert registry.load("recipe", name)().model.attention == attention(name.removeprefix(f"{images}-"), length)
    assert attention("lsh-1", 60).buckets is None, "twice the number of chunks"
    assert registry.load("recipe", "speech-lsh")().model.attention == ReformerConfig(rounds=4, chunk=16)


def _claimed():
    """Every LSH row of a claim: the attention's configuration, and the number of tokens that it is compared at."""
    digits = tables.small_recipe(Options(Path()), "lsh-1")
    yield "digits", digits.model.attention, 63
    for size in (783, 3071, 16 * 16 * 3 - 1):  # the pictures of Tables 1 and 2, and the small ones of CIFAR-10
        yield f"{size} bytes", attention("lsh-4", size), size
    yield "figure1", ReformerConfig(chunk=figures.CHUNK), min(figures.LENGTHS)
    copying = figures.copy_recipe(Options(Path()), "lsh-4")
    yield "figure2", copying.model.attention, copying.data.length
    yield "figure2, the paper's size", registry.load("recipe", "copy-lsh-4")().model.attention, 128
    # The medians of the test strings, in frames of 30 and of 10 ms.
    yield "speech", registry.load("recipe", "spoken-digits-lsh")().model.attention, 51
    yield "speech, the paper's size", registry.load("recipe", "speech-lsh")().model.attention, 151
    yield "listops", registry.load("recipe", "listops-reformer")().model.attention, 2001
    yield "listops-128", registry.load("recipe", "listops-128-reformer")().model.attention, 64


@pytest.mark.parametrize(("config", "length"), [pytest.param(*row, id=name) for name, *row in _claimed()])
def test_lsh_of_a_claim_reads_a_quarter_of_the_sequence(config, length):
    """What a token reads in a round: where its output of one-hot values is not zero."""
    generator = torch.Generator().manual_seed(0)
    qk, values = torch.randn(1, length, 1, 8, generator=generator), torch.eye(length)[None, :, None]
    buckets = config.buckets or 2 * -(-length // config.chunk)
    rotations = draw_rotations(1, 1, 8, buckets, generator)
    read = reformer_attention(qk, values, rotations, config.chunk, causal=False)[0, :, 0] > 0
    assert 4 * read.sum(1).max() <= length


# ---- figures ----


def test_figure1(tmp_path, monkeypatch, exhaustive):
    monkeypatch.setattr(figures, "LENGTHS", (64, 128))
    monkeypatch.setattr(figures, "TOKENS", 128)
    monkeypatch.setattr(figures, "ROUNDS", 1)
    monkeypatch.setattr(timing, "LEAST", 0.0)
    if not exhaustive:
        monkeypatch.setattr(figures, "ATTENTIONS", ("softmax", "lsh-1", "linear"))
        monkeypatch.setattr(figures, "peak_of", live_peak_of)  # without a process for each
    (found,) = reproduce("linear_transformers/figure1", Options(tmp_path))
    for table in found["tables"]:
        assert [row["N"] for row in table["rows"]] == ["64", "128"]
        assert all(row[name] > 0 for row in table["rows"] for name in figures.ATTENTIONS)
    assert (tmp_path / "figure1.png").stat().st_size > 3000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_peak_memory_is_what_a_call_takes():
    size = 96 * 2**20
    found = peak_of(lambda: torch.ones(size // 4).sum())
    assert 0.98 * size <= found < 1.3 * size  # the kernel counts pages in batches
    assert peak_of(lambda: None) < size / 4


def test_figure3(tmp_path):
    (found,) = reproduce("linear_transformers/figure3", Options(tmp_path, steps=2))
    assert [row["images"] for row in found["tables"][0]["rows"]] == [24, 8]
    assert {Path(path).name for path in found["files"]} == {"samples.png", "completions.png"}
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in found["files"])
    # The same pictures from the finished run, which is not trained again.
    again = tmp_path / "again"
    (second,) = reproduce("linear_transformers/figure3", Options(again, run=Path(found["runs"][0])))
    for one, other in zip(found["files"], second["files"], strict=True):
        assert Path(one).read_bytes() == Path(other).read_bytes()
    assert not (again / "runs").exists()


# ---- tables ----


def test_latency(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "PAPER", TINY)
    (found,) = reproduce("linear_transformers/latency", Options(tmp_path))
    rows = {row[""]: row for row in found["tables"][0]["rows"]}
    assert rows["linear"]["relative to linear"] == 1
    assert native.why_not() or {"softmax, cached, fused", "linear, fused"} <= set(rows)


def test_constant_memory(tmp_path, monkeypatch):
    """The state of linear attention has the bytes of its sums at every position; keys and values grow with it.

    A step needs two states, before and after it: the beginning that all images continue is not a third one.
    """
    monkeypatch.setattr(tables, "PAPER", replace(TINY, dim=64, num_heads=1))
    monkeypatch.setattr(tables, "peak_of", live_peak_of)
    monkeypatch.setattr(tables, "IMAGES", (2, 4))
    monkeypatch.setattr(tables, "CACHED", (2,))
    (found,) = reproduce("linear_transformers/constant_memory", Options(tmp_path))
    sizes, images = found["tables"]
    sums, keys = 4 * 64 * (64 + 1), 4 * 2 * 64
    count = sizes["rows"][0]["linear"] - sums  # of the tokens read
    assert 0 <= count <= 16
    for row in sizes["rows"]:
        assert row["linear"] == sums + count
        assert keys * int(row["bytes read"]) <= row["softmax, cached"] <= (keys + 1) * int(row["bytes read"]) + 16
    linear = [row for row in images["rows"] if row[""] == "linear"]
    assert [(row["images"], row["bytes before"]) for row in linear] == [(2, 780), (4, 1), (4, 392), (4, 780)]
    assert all(row["GiB of state"] == row["images"] * (sums + count) / 2**30 for row in linear)
    assert all(2 < row["peak GiB"] / row["GiB of state"] < 2.6 for row in linear)
    assert [row["peak MiB per image"] for row in linear] == [2**10 * row["peak GiB"] / row["images"] for row in linear]


def test_writing_is_timed_at_positions_and_joined_by_lines():
    assert whole(lambda position: 1.0 + position, 5, 3) == pytest.approx(sum(1.0 + position for position in range(5)))
    network = Transformer(TINY, attention=attention("softmax", 783)).eval()
    assert with_state(network, 3, 9, 256) > 0
    assert without_state(network, 2, 7, 256) > 0
