import dataclasses

import pytest
import torch

from mnemos import config, registry
from mnemos.attention.linear import LinearAttention, LinearConfig
from mnemos.ops.linear_attention.reference import (
    reference_bidirectional,
    reference_causal,
    reference_linear_attention,
)
from mnemos.types import InputError


def layer(causal=True, **kwargs):
    torch.manual_seed(0)
    return LinearAttention(12, 3, causal, **kwargs).double()


def tokens(t=41, seed=1):
    return torch.randn(2, t, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_layer_is_the_equations_between_two_projections(causal, masked):
    attention, x = layer(causal), tokens().requires_grad_()
    mask = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.3 if masked else None
    q, k, v = (part.unflatten(-1, (3, 4)) for part in attention.qkv(x).split(12, -1))
    schedule = reference_causal if causal else reference_bidirectional
    expected, s, z = reference_linear_attention(q, k, v, schedule, mask=mask)
    y, state = attention(x, None, mask)
    heads, _ = attention.heads(x, None, mask)
    torch.testing.assert_close(heads, expected)
    torch.testing.assert_close(y, attention.output(expected.flatten(2)))
    torch.testing.assert_close(attention.project(heads), y)
    given = [x, *attention.parameters()]
    found = torch.autograd.grad(y.square().sum(), given)
    wanted = torch.autograd.grad(attention.output(expected.flatten(2)).square().sum(), given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    if causal:
        torch.testing.assert_close(state.s, s)
        torch.testing.assert_close(state.z, z)
    else:
        assert state is None


def test_abilities_are_declared():
    assert layer(True).splits == "anywhere"
    assert layer(False).splits == "never"
    assert layer(False).initial_state(2) is None
    assert LinearAttention.rows_independent
    assert LinearAttention.state_gradient


@pytest.mark.parametrize("feature_map", ["elu", "relu", "polynomial", "favor", torch.sigmoid])
def test_a_fresh_state_is_nones_long_form(feature_map):
    attention, x = layer(feature_map=feature_map, features=7), tokens()
    fresh = attention.initial_state(2)
    assert fresh.s.dtype == torch.float64
    assert not any(leaf.any() for leaf in fresh)
    whole, end = attention(x)
    assert [leaf.shape for leaf in fresh] == [leaf.shape for leaf in end]
    first, state = attention(x[:, :9], fresh)
    second, state = attention(x[:, 9:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    for a, b in zip(state, end, strict=True):
        torch.testing.assert_close(a, b)


def test_the_state_is_float32_under_bfloat16():
    attention = layer().float()
    assert attention.initial_state(2, dtype=torch.bfloat16).s.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        y, state = attention(tokens().float())
    assert y.dtype == torch.bfloat16
    assert (state.s.dtype, state.z.dtype) == (torch.float32, torch.float32)


def test_favors_projection_is_saved_with_the_layer():
    attention, other = layer(feature_map="favor"), LinearAttention(12, 3, True, "favor").double()
    assert not torch.equal(attention.projection, other.projection)
    other.load_state_dict(attention.state_dict(), strict=True)
    torch.testing.assert_close(other(tokens())[0], attention(tokens())[0])
    assert set(layer().state_dict()) == {"qkv.weight", "qkv.bias", "output.weight", "output.bias"}


def test_configuration():
    settings = registry.load("attention", "linear")(feature_map="relu", eps=1e-3)
    assert config.from_dict(LinearConfig, config.to_dict(settings)) == settings
    attention = settings.build(12, 3, causal=True, dropout=0.1)
    assert (attention.feature_map, attention.eps) == ("relu", 1e-3)
    assert (attention.dim, attention.num_heads, attention.causal) == (12, 3, True)
    with pytest.raises(InputError, match="expected one of 'elu'"):
        config.from_dict(LinearConfig, {**dataclasses.asdict(settings), "feature_map": "elo"})


def test_wrong_input_is_refused_in_one_line():
    with pytest.raises(InputError, match="divisible by heads, found width 12 and 5 heads") as error:
        LinearAttention(12, 5)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="did you mean 'relu'"):
        LinearAttention(12, 3, feature_map="relo")
    with pytest.raises(InputError, match="expected a state"):
        layer()(tokens(), layer().initial_state(3))
