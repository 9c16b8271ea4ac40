"""What every attention layer promises, over every registry entry, with and without a gated cache.

A class declares what it can do (`mnemos.types.Attention`); the cases of a test are chosen by these declarations, and
no test knows a name.
"""

import typing

import contract_cases
import pytest
import torch
from contract_cases import ROWS, holds, holds_where, make, over_layers, same_state, tokens

from mnemos.attention import GatedCacheAttention
from mnemos.types import Attention, HeadAttention, InputError, Splits, StateKind, leaves

pytest_generate_tests = contract_cases.generate


def stateful(layer):
    return layer.state_kind != "none"


@pytest.fixture
def layer(request):
    *case, training = request.param
    return make(*case).train(training)


@over_layers(modes=(False,), apart=True)
def test_declarations_are_complete_and_true(layer):
    assert isinstance(layer, Attention)
    assert layer.splits in typing.get_args(Splits)
    assert layer.state_kind in typing.get_args(StateKind)
    assert {type(layer.rows_independent), type(layer.state_gradient), type(layer.causal)} == {bool}
    fresh = layer.initial_state(ROWS, dtype=torch.float64)
    assert (fresh is None) == (layer.state_kind == "none")
    holds_where(layer)
    assert (layer.splits == "never") == (layer.state_kind == "none")
    if isinstance(layer, HeadAttention):
        y, state = layer(tokens())
        heads, after = layer.heads(tokens())
        assert torch.equal(layer.project(heads), y)
        same_state(after, state)


@pytest.mark.parametrize("config", contract_cases.ATTENTIONS.values(), ids=contract_cases.ATTENTIONS)
def test_a_layer_is_causal_unless_it_is_asked_not_to_be(config):
    dim, heads, modes = contract_cases.DIM, contract_cases.HEADS, config.causal_modes
    assert config.build(dim, heads).causal == (True in modes)
    for causal in {True, False} - modes:
        with pytest.raises(InputError, match=f"causal={not causal}"):
            config.build(dim, heads, causal=causal)


@over_layers(stateful, modes=(True, False))
def test_split_and_resume_equals_whole(layer):
    holds("resumes", layer)


@over_layers(lambda layer: not stateful(layer), modes=(True, False))
def test_a_layer_without_a_state_returns_none_and_refuses_one(layer):
    assert layer(tokens())[1] is None
    with pytest.raises(InputError, match="expected no state"):
        layer(tokens(), torch.zeros(ROWS, 1))


@over_layers(stateful, modes=(False,), apart=True)
def test_a_state_of_other_rows_or_of_another_layer_is_refused(layer):
    for state in (layer.initial_state(ROWS + 1, dtype=torch.float64), torch.zeros(ROWS, 1)):
        with pytest.raises(InputError, match=r"expected (a|floating) state"):
            layer(tokens(), state)


@over_layers(modes=(False,), apart=True)
def test_calls_repeat_in_every_mode_and_a_row_with_padding_is_the_row_without_it(layer):
    for law in ("repeats", "float64", "modes", "padding"):
        holds(law, layer)


@over_layers(modes=(False,), apart=True)
def test_tokens_are_read_padding_is_not_nothing_passed_in_changes_and_a_state_has_rows(layer):
    laws = ["reads", "hidden", "untouched"]
    for law in (*laws, "select", "reset", "size") if stateful(layer) else laws:
        holds(law, layer)


@over_layers(apart=True)
def test_calls_of_any_size_are_read_in_order_with_all_weights_which_are_saved(layer):
    """Weights get gradients of the outputs or of auxiliary losses, in more tokens than a default memory of them."""
    laws = ["lengths", "finite", "layout", "rows", "parameters", "saving"]
    for law in (*laws, "causal") if layer.causal else laws:
        holds(law, layer)


@over_layers(apart=True)
def test_weights_that_have_changed_are_read(layer):
    holds("weights", layer)


@over_layers()
def test_gradients_are_the_derivatives(layer):
    holds("derivatives", layer)


@over_layers(lambda layer: layer.splits == "anywhere" and layer.state_gradient)
def test_gradient_through_the_state_equals_the_whole(layer):
    holds("gradient", layer)


@over_layers(lambda layer: stateful(layer) and not layer.state_gradient)
def test_a_state_without_gradient_is_detached(layer):
    """Of a gated layer each part by itself: its inner attention may carry gradient where its cache does not."""
    state, inner = layer(tokens())[1], layer
    if isinstance(layer, GatedCacheAttention):
        (state, walk), inner = state, layer.inner
        assert layer.grc.scope == "stream" or not any(leaf.requires_grad for leaf in leaves(walk))
    assert inner.state_gradient or not any(leaf.requires_grad for leaf in leaves(state))


@over_layers(apart=True)
def test_bf16_autocast_stays_close(layer):
    holds("autocast", layer)
    if isinstance(layer, GatedCacheAttention):
        layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            state = layer(tokens().float())[1]
        assert layer.cache.dtype == torch.float32
        assert state is None or state.updates is None or state.updates.cache.dtype == torch.float32


@over_layers(
    lambda layer: not isinstance(layer, GatedCacheAttention) or layer.grc.preset == "paper" or moves(layer),
    apart=True,
    one_of_a_kind=True,
)
def test_compiled_equals_eager(layer):
    holds("compiles", layer)


def moves(layer):
    """A cache per row that is written."""
    return layer.grc.scope == "stream" and layer.grc.write


@over_layers(modes=(False,), apart=True)
def test_built_on_meta_and_materialised_it_is_the_same(layer, request):
    case = next(x for x in request.node.callspec.params.values())[:-1]
    for other in contract_cases.materialised(lambda: make(*case), layer):
        torch.manual_seed(3)  # of hashes
        y, state = layer(tokens())
        torch.manual_seed(3)
        found, after = other(tokens())
        assert torch.equal(found, y)
        same_state(after, state)
