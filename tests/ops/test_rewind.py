"""Going back within a call: the state after any of its tokens, each row's own, against calls of those tokens alone."""

import pytest
import torch
from delta_cases import EXACT, HERE, KINDS, M, equations, holes, inputs, run, starts

import mnemos
from mnemos import InputError
from mnemos.ops import linear_attention, rewindable, short_convolution

KEPT = [(0, 5), (7, 7), (16, 0), (33, 20)]


def first(given, n, row):
    """The first n tokens of a row."""
    at = slice(row, row + 1)
    return {name: x[at] if name == "state" else x[at, :n] for name, x in given.items()}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", KEPT)
def test_the_state_is_that_of_the_kept_tokens(kind, backend, kept):
    dtype, tolerance = EXACT[backend]
    given, mask, resets = inputs(kind, 33, dtype), holes(33), starts(33)
    with rewindable() as calls:
        _, end = run(given, mask=mask, resets=resets, backend=backend)
    found = calls.rewind({"end": end}, kept)["end"]
    for row, n in enumerate(kept):
        options = {"mask": mask[row : row + 1, :n], "resets": resets[row : row + 1, :n]}
        wanted = equations(first(given, n, row), **options)[1]
        size = max(1.0, float(wanted.detach().abs().max()))
        torch.testing.assert_close(found[row].double(), wanted[0], rtol=0, atol=tolerance * size)
    assert calls.rewind(end, [33, 33]).equal(end)
    assert calls.rewind(end, [0, 0]).equal(given["state"])


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_are_computed_in_the_order_of_a_call_of_theirs_bit_for_bit(kind):
    if "native" not in HERE:
        pytest.skip("the kernels are not built")
    given = {name: x.detach() for name, x in inputs(kind, 8, torch.float32).items()}
    with rewindable() as calls:
        _, end = run(given, backend="native")
    for kept in ((3, 3), (1, 6), (0, 8)):
        alone = [run(first(given, n, row), backend="native")[1][0] for row, n in enumerate(kept)]
        assert torch.equal(calls.rewind(end, kept), torch.stack(alone))


def test_gradients_are_those_of_the_kept_tokens():
    given = inputs("gated delta", 9)
    with rewindable() as calls:
        _, end = run(given)
    weights = torch.randn(end.shape, generator=torch.Generator().manual_seed(1), dtype=end.dtype)
    leaves = list(given.values())[1:]
    found = torch.autograd.grad((calls.rewind(end, [4, 7]) * weights).sum(), leaves)
    alone = torch.cat([run(first(given, n, row))[1] for row, n in enumerate((4, 7))])
    for a, b in zip(found, torch.autograd.grad((alone * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"feature_map": "polynomial"}], ids=str)
def test_sums_of_linear_attention_go_back_together(options):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 11, 2, w, generator=g, dtype=torch.float64) for w in (5, 5, M))
    start = linear_attention(q, k, v, **options)[1]
    mask = holes(11)
    with rewindable() as calls:
        _, end = linear_attention(q, k, v, state=start, mask=mask, **options)
    found = calls.rewind(end, [3, 9])
    assert type(found) is type(end)
    for row, n in enumerate((3, 9)):
        at = slice(row, row + 1)
        before = type(start)(*(x[at] for x in start))
        part = q[at, :n], k[at, :n], v[at, :n]
        wanted = linear_attention(*part, state=before, mask=mask[at, :n], **options)[1]
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a[at], b, rtol=0, atol=1e-12)


@pytest.mark.each_value
@pytest.mark.parametrize("padded", [False, True])
def test_the_window_of_a_convolution_holds_the_last_tokens_that_are_kept(padded):
    g = torch.Generator().manual_seed(0)
    x, weight, start = (torch.randn(*shape, generator=g) for shape in ((2, 9, 3), (3, 4), (2, 3, 3)))
    options = {"mask": holes(9), "resets": starts(9)} if padded else {}
    with rewindable() as calls:
        _, end = short_convolution(x, weight, state=start, activation="silu", **options)
    for kept in ((0, 0), (1, 7), (5, 5), (9, 2)):
        for row, n in enumerate(kept):
            part = {name: given[row : row + 1, :n] for name, given in options.items()}
            wanted = short_convolution(x[row : row + 1, :n], weight, state=start[row : row + 1], **part)[1]
            assert torch.equal(calls.rewind(end, kept)[row], wanted[0])


def test_only_states_of_operators_and_numbers_of_their_tokens_are_taken():
    given = inputs("decayed", 5)
    with rewindable() as outer, rewindable() as calls:
        _, end = run(given)
    _, later = run(given)
    assert calls.knows(end, 5)
    assert not calls.knows(end, 4)
    assert not outer.knows(end, 5)
    for state, kept in (
        (end.clone(), (1, 1)),
        (later, (1, 1)),
        (end, (1,)),
        (end, (1, 6)),
        (end, (-1, 2)),
        (end, (1.5, 2)),
    ):
        with pytest.raises(InputError, match="rewind"):
            calls.rewind(state, kept)


def test_the_state_of_a_layer_goes_back():
    """`GLAConfig` has no convolution: None is a part of its state."""
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    for layer in (mnemos.GatedDeltaConfig().build(32, 4), mnemos.GLAConfig().build(32, 4)):
        with torch.no_grad(), rewindable() as calls:
            _, end = layer(x)
            found, wanted = calls.rewind(end, (3, 3)), layer(x[:, :3])[1]
        assert type(found) is type(end)
        for a, b in zip(found, wanted, strict=True):
            assert (a is b) if b is None else torch.allclose(a, b, rtol=0, atol=1e-6)
