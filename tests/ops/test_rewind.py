"""Going back within a call, beside the law in test_operators.py: bits, gradients, a feature map, a layer."""

import pytest
import torch
from delta_cases import HERE, KINDS, M, inputs, run
from kernel_cases import holes

import mnemos
from mnemos import InputError
from mnemos.ops import linear_attention, rewindable


def first(given, n, row):
    """The first n tokens of a row."""
    at = slice(row, row + 1)
    return {name: x[at] if name == "state" else x[at, :n] for name, x in given.items()}


@pytest.mark.skipif("native" not in HERE, reason="the kernels are not built")
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_are_computed_in_the_order_of_a_call_of_theirs_bit_for_bit(kind):
    given = {name: x.detach() for name, x in inputs(kind, 8, torch.float32).items()}
    with rewindable() as calls:
        _, end = run("native", **given)
    for kept in ((3, 3), (1, 6), (0, 8)):
        alone = [run("native", **first(given, n, row))[1][0] for row, n in enumerate(kept)]
        assert torch.equal(calls.rewind(end, kept), torch.stack(alone))


def test_gradients_are_those_of_the_kept_tokens():
    given = inputs("gated delta", 9)
    with rewindable() as calls:
        _, end = run(**given)
    weights = torch.randn(end.shape, generator=torch.Generator().manual_seed(1), dtype=end.dtype)
    leaves = list(given.values())[1:]
    found = torch.autograd.grad((calls.rewind({"end": end}, [4, 7])["end"] * weights).sum(), leaves)
    alone = torch.cat([run(**first(given, n, row))[1] for row, n in enumerate((4, 7))])
    for a, b in zip(found, torch.autograd.grad((alone * weights).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_a_feature_map_that_widens_is_applied_once():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 11, 2, w, generator=g, dtype=torch.float64) for w in (5, 5, M))
    start, mask = linear_attention(q, k, v, feature_map="polynomial")[1], holes(2, 11)
    with rewindable() as calls:
        _, end = linear_attention(q, k, v, feature_map="polynomial", state=start, mask=mask)
    part = (x[:, :9] for x in (q, k, v))
    _, wanted = linear_attention(*part, feature_map="polynomial", state=start, mask=mask[:, :9])
    for a, b in zip(calls.rewind(end, [9, 9]), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_only_states_of_operators_and_numbers_of_their_tokens_are_taken():
    given = inputs("decayed", 5)
    with rewindable() as outer, rewindable() as calls:
        _, end = run(**given)
    _, later = run(**given)
    assert calls.knows(end, 5)
    assert not calls.knows(end, 4)
    assert not outer.knows(end, 5)
    refused = (end.clone(), (1, 1)), (later, (1, 1)), (end, (1,)), (end, (1, 6)), (end, (-1, 2)), (end, (1.5, 2))
    for state, kept in refused:
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
