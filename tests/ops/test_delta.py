"""The delta rule and decayed attention are their equations: lengths, padding, derivatives, calls that are cut."""

import itertools

import pytest
import torch
from delta_cases import EXACT, HERE, KINDS, B, compare, equations, holes, inputs, run, starts

import mnemos
from mnemos.ops.delta import chunked

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129]


@pytest.fixture(params=["one slab", "a slab a chunk"])
def slabs(request, monkeypatch):
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": {"one slab": 2**18, "a slab a chunk": 1}[request.param]})


@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", LENGTHS)
def test_every_length_equals_the_equations(t, kind, backend, poisoned):
    dtype, tolerance = EXACT[backend]
    given = inputs(kind, t, dtype)
    compare(run(given, backend=backend), equations(given), given, tolerance)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["state", "nothing"])
@pytest.mark.parametrize("folded", ["mask", "resets", "mask and resets"])
def test_padding_and_resets_equal_the_equations(folded, start, kind, backend, slabs):
    dtype, tolerance = EXACT[backend]
    given = inputs(kind, 70, dtype)
    if start == "nothing":
        del given["state"]
    options = {"mask": holes(70)} if "mask" in folded else {}
    if "resets" in folded:
        options["resets"] = starts(70)
    compare(run(given, backend=backend, scale=0.7, **options), equations(given, scale=0.7, **options), given, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind, monkeypatch):
    """First derivatives by finite differences, of every output for every input."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": 1})
    for t in (1, 11):
        given = inputs(kind, t)
        if "decay" in given:
            given["decay"].data.sub_(0.1)  # finite differences would step above 0
        assert torch.autograd.gradcheck(
            lambda *leaves, given=given: run(dict(zip(given, leaves, strict=True))), (*given.values(),), fast_mode=True
        )


@pytest.mark.parametrize("backend", HERE)
def test_packed_sequences_are_those_sequences(backend):
    """Of two rows with resets at other tokens, and of the same sequences in calls of their own."""
    given = inputs("gated delta per channel", 70, torch.float32)
    del given["state"]
    resets = torch.zeros(B, 70, dtype=torch.bool)
    ends = [[0, 20, 64, 70], [0, 1, 2, 70]]
    for row, cuts in enumerate(ends):
        resets[row, cuts[:-1]] = True
    packed, _ = run(given, resets=resets, backend=backend)
    for row, cuts in enumerate(ends):
        for a, b in itertools.pairwise(cuts):
            alone, _ = run({name: x[row : row + 1, a:b] for name, x in given.items()}, backend=backend)
            torch.testing.assert_close(packed[row : row + 1, a:b], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", HERE)
def test_keys_are_normalised_inside(backend):
    dtype, tolerance = EXACT[backend]
    given = inputs("gated delta", 20, dtype)
    given["k"].data[0, 3] = 0
    compare(run(given, normalise_keys=True, backend=backend), equations(given, normalise_keys=True), given, tolerance)


@pytest.mark.parametrize("backend", HERE)
def test_a_key_that_is_written_again_has_its_new_value(backend):
    """beta 1 replaces what a key of length 1 held, beta 0 writes nothing."""
    g = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 3, 1, 8, generator=g), dim=-1)[:, [0, 1, 2, 0, 1, 2]]
    v = torch.randn(1, 6, 1, 4, generator=g)
    y, _ = mnemos.ops.delta_rule(k, k, v, torch.ones(1, 6, 1), scale=1.0, backend=backend)
    torch.testing.assert_close(y, v, rtol=0, atol=2e-6)
    beta = torch.tensor([1.0, 1, 1, 0, 0, 0]).view(1, 6, 1)
    _, held = mnemos.ops.delta_rule(k[:, :3], k[:, :3], v[:, :3], beta[:, :3], backend=backend)
    _, after = mnemos.ops.delta_rule(k, k, v, beta, backend=backend)
    torch.testing.assert_close(after, held, rtol=0, atol=1e-7)
