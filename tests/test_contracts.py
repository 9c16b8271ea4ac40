"""What every attention layer promises, over every registry entry, with and without a gated cache.

A class declares what it can do (`mnemos.types.Attention`); the cases of a test are chosen by these declarations, and
no test knows a name.
"""

import copy
import itertools
import typing

import contract_cases
import pytest
import torch
from contract_cases import ROWS, TOKENS, close, make, numbers, over_layers, same_state, tokens

from mnemos.attention import GatedCacheAttention
from mnemos.memory import gated_cache
from mnemos.types import (
    Attention,
    HeadAttention,
    InputError,
    Splits,
    StateKind,
    collect_auxiliary_losses,
    is_future_free,
    is_padding_free,
    leaves,
    map_state,
    reset,
    select,
)

pytest_generate_tests = contract_cases.generate


def stateful(layer):
    return layer.state_kind != "none"


@pytest.fixture
def layer(request):
    *case, training = request.param
    return make(*case).train(training)


@over_layers(modes=(False,))
def test_declarations_are_complete_and_true(layer):
    assert isinstance(layer, Attention)
    assert layer.splits in typing.get_args(Splits)
    assert layer.state_kind in typing.get_args(StateKind)
    assert {type(layer.rows_independent), type(layer.state_gradient), type(layer.causal)} == {bool}
    fresh = layer.initial_state(ROWS, dtype=torch.float64)
    assert (fresh is None) == (layer.state_kind == "none")
    assert (layer.splits == "never") == (layer.state_kind == "none")
    if isinstance(layer, HeadAttention):
        y, state = layer(tokens())
        heads, after = layer.heads(tokens())
        assert torch.equal(layer.project(heads), y)
        same_state(after, state)
    with torch.no_grad():
        _, state = layer(tokens(t=300, rows=1))
        first = numbers(state)
        then = numbers(layer(tokens(3, t=300, rows=1), state)[1])
    assert {"none": then == first == 0, "constant": then == first > 0, "growing": then > first}[layer.state_kind]


@over_layers(lambda layer: layer.splits == "anywhere", modes=(True, False))
def test_split_and_resume_equals_whole(layer):
    x = tokens()
    with gated_cache.hold_caches(layer):
        whole, end = layer(x)
        for cuts in ([1], [4, 5], [3, 6, 9], range(1, TOKENS)):
            state, parts = None, []
            for a, b in itertools.pairwise([0, *cuts, TOKENS]):
                y, state = layer(x[:, a:b], state)
                parts.append(y)
            close(torch.cat(parts, 1), whole)
            same_state(state, end)
        # An explicit new state and None mean the same.
        close(layer(x, layer.initial_state(ROWS, dtype=torch.float64))[0], whole)


@over_layers(lambda layer: layer.splits == "segments", modes=(True, False))
def test_a_stored_state_continues_as_the_live_one(layer):
    x = tokens()
    with gated_cache.hold_caches(layer):
        _, state = layer(x[:, :4])
        kept = map_state(torch.clone, state)
        close(layer(x[:, 4:], state)[0], layer(x[:, 4:], kept)[0])
        close(layer(x, layer.initial_state(ROWS, dtype=torch.float64))[0], layer(x)[0])


@over_layers(lambda layer: not stateful(layer), modes=(True, False))
def test_a_layer_without_a_state_returns_none_and_refuses_one(layer):
    assert layer(tokens())[1] is None
    with pytest.raises(InputError, match="expected no state"):
        layer(tokens(), torch.zeros(ROWS, 1))


@over_layers(stateful, modes=(False,))
def test_a_state_of_other_rows_or_of_another_layer_is_refused(layer):
    for state in (layer.initial_state(ROWS + 1, dtype=torch.float64), torch.zeros(ROWS, 1)):
        with pytest.raises(InputError, match="expected a state"):
            layer(tokens(), state)


@over_layers(is_future_free, modes=(True, False))
def test_the_future_cannot_change_the_past(layer):
    _, before, others = changed_tokens(layer)
    for j, after in others:
        close(before[:, :j], after[:, :j])


@over_layers(lambda layer: layer.causal, modes=(False,))
def test_the_future_cannot_change_the_past_or_is_declared_to(layer):
    """In a sequence long enough for chunks."""
    x, other = tokens(t=80, rows=1), tokens(3, t=80, rows=1)
    with torch.no_grad():
        before, after = layer(x)[0], layer(torch.cat([x[:, :50], other[:, 50:]], 1))[0]
    same = torch.allclose(before[:, :50], after[:, :50], rtol=1e-9, atol=1e-9)
    assert same == is_future_free(layer)


@over_layers(modes=(True, False))
def test_every_token_is_read(layer):
    _, before, others = changed_tokens(layer)
    for j, after in others:
        assert not torch.equal(before[:, j:], after[:, j:])


def changed_tokens(layer):
    """The output, and (j, the output with token j changed) for every j."""
    x = tokens()
    with gated_cache.hold_caches(layer):
        before, others = layer(x)[0], []
        for j in range(TOKENS):
            other = x.clone()
            other[:, j] += 1
            others.append((j, layer(other)[0]))
    return x, before, others


@over_layers()
def test_rows_are_independent_or_declared_not_to_be(layer):
    x = tokens()
    other = x.clone()
    other[1] += 1
    with gated_cache.hold_caches(layer):
        same = torch.allclose(layer(x)[0][0], layer(other)[0][0], rtol=1e-9, atol=1e-9)
    assert same == layer.rows_independent


@over_layers(stateful, modes=(False,))
def test_a_given_state_is_never_changed_and_can_be_forked(layer):
    with torch.no_grad():
        _, state = layer(tokens())
        before = map_state(torch.clone, state)
        first, _ = layer(tokens(3, 1), state)
        second, after = layer(tokens(4, 1), state)
        again, _ = layer(tokens(3, 1), state)
        layer(tokens(5, 2), after)
        close(first, again)
        same_state(state, before)
        assert not torch.equal(first, second)


@over_layers(stateful, modes=(False,))
def test_selected_and_reset_rows(layer):
    with torch.no_grad():
        _, state = layer(tokens())
        x = tokens(3, 5)
        y, _ = layer(x, state)
        rows = torch.tensor([2, 0, 2])
        close(layer(x[rows], select(state, rows))[0], y[rows])
        fresh = layer(x)[0]
        mixed = layer(x, reset(state, torch.tensor([False, True, False])))[0]
        close(mixed[1], fresh[1])
        close(mixed[[0, 2]], y[[0, 2]])


@over_layers()
def test_every_parameter_gets_a_gradient(layer):
    """Of the outputs or of the layer's auxiliary losses, in a sequence longer than a default memory of tokens."""
    with collect_auxiliary_losses() as auxiliary:
        y, _ = layer(tokens(t=80))
    (y.square().sum() + sum(auxiliary)).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        if "bias" not in name:  # a key's bias shifts all scores equally: its gradient is zero
            assert parameter.grad.abs().max() > 1e-9, name


@over_layers()
def test_gradients_are_the_derivatives(layer):
    x = tokens(t=7)[:2].requires_grad_()
    with gated_cache.hold_caches(layer):
        _, state = layer(tokens(3, 4)[:2])
        assert torch.autograd.gradcheck(lambda x: layer(x, state)[0], x, fast_mode=True)


@over_layers(lambda layer: layer.splits == "anywhere" and layer.state_gradient)
def test_gradient_through_the_state_equals_the_whole(layer):
    gradients = []
    for cuts in ([], [2, 7]):
        x = tokens().requires_grad_()
        layer.zero_grad()
        state, loss = None, 0.0
        with gated_cache.hold_caches(layer):
            for a, b in itertools.pairwise([0, *cuts, TOKENS]):
                y, state = layer(x[:, a:b], state)
                loss = loss + y.square().sum()
        loss.backward()
        gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    for whole, split in zip(*gradients, strict=True):
        close(split, whole)


@over_layers(lambda layer: stateful(layer) and not layer.state_gradient)
def test_a_state_without_gradient_is_detached(layer):
    """Of a gated layer each part by itself: its inner attention may carry gradient where its cache does not."""
    state, inner = layer(tokens())[1], layer
    if isinstance(layer, GatedCacheAttention):
        (state, walk), inner = state, layer.inner
        assert layer.grc.scope == "stream" or not any(leaf.requires_grad for leaf in leaves(walk))
    assert inner.state_gradient or not any(leaf.requires_grad for leaf in leaves(state))


@over_layers(modes=(False,))
def test_a_mask_hides_padding(layer):
    """Valid tokens give the same outputs whatever the padding holds."""
    x = tokens()
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    mask[1, 7:] = False
    other = torch.where(mask[..., None], x, 100.0)
    with torch.no_grad():
        close(layer(x, None, mask)[0][mask], layer(other, None, mask)[0][mask])
        if is_padding_free(layer):
            close(layer(x, None, mask)[0][1, :7], layer(x[1:2, :7])[0][0])
        empty = mask.clone()
        empty[2] = False
        assert layer(x, None, empty)[0].isfinite().all()


@over_layers(modes=(False,), apart=True)
def test_outputs_are_independent_of_the_length_of_padding_or_declared_not_to_be(layer):
    """In a sequence long enough for chunks and for sparse blocks."""
    x, mask = tokens(t=80, rows=1), torch.ones(1, 80, dtype=torch.bool)
    mask[:, 50:] = False
    with torch.no_grad():
        padded, alone = layer(x, None, mask)[0][:, :50], layer(x[:, :50])[0]
    assert torch.allclose(padded, alone, rtol=1e-9, atol=1e-9) == is_padding_free(layer)


@over_layers()
def test_saved_and_loaded_before_the_first_forward(layer):
    layer(tokens())
    fresh = copy.deepcopy(layer)
    for tensor in itertools.chain(fresh.parameters(), fresh.buffers()):
        torch.nn.init.zeros_(tensor)
    fresh.load_state_dict(layer.state_dict(), strict=True)
    close(fresh.eval()(tokens(5))[0], layer.eval()(tokens(5))[0])


@over_layers()
def test_bf16_autocast_stays_close(layer):
    layer.float()
    x = tokens().float()
    with gated_cache.hold_caches(layer):
        y = layer(x)[0]
        with torch.autocast("cpu", torch.bfloat16):
            low, state = layer(x)
    assert low.isfinite().all()
    assert (low.float() - y).abs().max() < 0.05 * y.abs().max()
    if isinstance(layer, GatedCacheAttention):
        assert layer.cache.dtype == torch.float32
        assert state is None or state.walk is None or state.walk.cache.dtype == torch.float32


@pytest.mark.slow
@over_layers(
    lambda layer: not isinstance(layer, GatedCacheAttention) or layer.grc.preset == "paper" or moves(layer), apart=True
)
def test_compiled_equals_eager(layer):
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager")
    for seed in (3, 4):  # the second forward meets the cache that the first one wrote
        x, z = tokens(seed).requires_grad_(), tokens(seed).requires_grad_()
        layer(x)[0].square().sum().backward()
        compiled(z)[0].square().sum().backward()
        close(x.grad, z.grad)
    for (name, a), b in zip(layer.state_dict().items(), compiled.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


def moves(layer):
    """A cache per row that is written."""
    return layer.grc.scope == "stream" and layer.grc.write
