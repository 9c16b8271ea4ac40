import copy
import dataclasses
import functools

import pytest
import torch

import mnemos
from mnemos import config
from mnemos.attention.linear import LinearAttention, LinearConfig
from mnemos.ops.linear import BACKENDS, linear_attention
from mnemos.ops.linear.feature_maps import favor, random_projection
from mnemos.ops.linear.reference import reference_bidirectional, reference_causal, reference_linear_attention
from mnemos.ops.positions import Rotary, rotate
from mnemos.types import InputError


def layer(causal=True, **kwargs):
    torch.manual_seed(0)
    return LinearAttention(12, 3, causal, **kwargs).double()


def tokens(t=41, seed=1):
    return torch.randn(2, t, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("rotary", [None, Rotary(base=50.0, scaling=2.0)])
def test_the_layer_is_the_equations_between_two_projections(causal, masked, rotary):
    attention, x = layer(causal, rotary=rotary), tokens().requires_grad_()
    mask = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.3 if masked else None
    q, k, v = (part.unflatten(-1, (3, 4)) for part in attention.qkv(x).split(12, -1))
    if rotary is not None:
        place = torch.arange(41).expand(2, -1) if mask is None else mask.cumsum(1) - 1  # of the valid tokens
        turns = rotary.turns(1, 4, place.flatten()).view(2, 41, 1, 2)
        q, k = rotate(q, turns), rotate(k, turns)
    schedule = reference_causal if causal else reference_bidirectional
    expected, s, z = reference_linear_attention(q, k, v, schedule, mask=mask)
    y, state = attention(x, None, mask)
    valid = torch.ones(2, 41, dtype=torch.bool) if mask is None else mask
    both = y[valid], attention.output(expected.flatten(2))[valid]
    torch.testing.assert_close(*both)
    given = [x, *attention.parameters()]
    for a, b in zip(*(torch.autograd.grad(one.square().sum(), given) for one in both), strict=True):
        torch.testing.assert_close(a, b)
    if causal:
        sums = state if rotary is None else state.sums
        torch.testing.assert_close(sums.s, s)
        torch.testing.assert_close(sums.z, z)
    if causal and rotary is not None:
        assert state.seen.tolist() == ([41, 41] if mask is None else mask.sum(1).tolist())
        first, middle = attention(x[:, :17], None, None if mask is None else mask[:, :17])
        rest, _ = attention(x[:, 17:], middle, None if mask is None else mask[:, 17:])
        torch.testing.assert_close(torch.cat([first, rest], 1), y)
        with pytest.raises(InputError, match="PlacedSums"):
            attention(x, state.sums)


@pytest.mark.parametrize("feature_map", ["relu", "polynomial", "favor", torch.sigmoid])
def test_every_feature_map_goes_on_from_a_fresh_state_and_is_saved(feature_map):
    attention, x = layer(feature_map=feature_map, features=7), tokens()
    whole, end = attention(x)
    other = LinearAttention(12, 3, True, feature_map=feature_map, features=7).double()
    other.load_state_dict(attention.state_dict())  # with favor's own projection
    first, state = other(x[:, :9], other.initial_state(2))
    second, state = other(x[:, 9:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    for a, b in zip(state, end, strict=True):
        torch.testing.assert_close(a, b)


def watch(monkeypatch, name, see):
    """Call `see` with what a backend of linear attention is given."""
    backend = BACKENDS.by_name[name]
    run = lambda *given: see(*given) or backend.run(*given)  # noqa: E731
    monkeypatch.setitem(BACKENDS.by_name, name, dataclasses.replace(backend, run=run))


@pytest.mark.skipif("native" not in mnemos.ops.backends("linear_attention"), reason="the kernels were not built")
@pytest.mark.parametrize(
    ("name", "dim", "features"), [("polynomial", 64, 0), ("polynomial", 24, 0), ("favor", 64, 128), ("favor", 50, 256)]
)
def test_wide_feature_maps_run_through_the_kernels(name, dim, features, monkeypatch):
    """D' of 528 = 32·33/2, 78, 128 and 256: the kernels get φ(q) and φ(k), of any width."""
    calls = []
    watch(monkeypatch, "native", lambda q, *_: calls.append(q.shape[-1]))
    torch.manual_seed(0)
    attention = LinearAttention(dim, 2, True, name, features, eps=0.1)
    exact = copy.deepcopy(attention).double()
    x = torch.randn(2, 70, dim)
    mask = torch.rand(2, 70) > 0.2
    found = []
    for layer in (attention, exact):
        given = x.to(layer.qkv.weight.dtype).requires_grad_()
        first, state = layer(given[:, :69], None, mask[:, :69])
        last, state = layer(given[:, 69:], state, mask[:, 69:])
        y = torch.cat([first, last], 1)
        loss = y.sin().sum() + state.s.sin().mean() + state.z.sin().mean()
        found.append([y, *state, *torch.autograd.grad(loss, [given, *layer.parameters()])])
    width = dim // 2 * (dim // 2 + 1) // 2 if name == "polynomial" else features
    assert calls == [width, width]  # float64's are not among them
    for a, b in zip(*found, strict=True):
        assert (a.detach().double() - b).abs().max() <= 2e-5 * max(1.0, float(b.detach().abs().max()))


@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0, 1e4, 1e15])
def test_favor_stays_finite_whatever_the_size_of_its_inputs(size):
    torch.manual_seed(0)
    projection = random_projection(64, 32)
    q, k = (size * torch.randn(2, 50, 2, 32) for _ in range(2))
    k[:, 3, 0] = projection[5] * 32**0.25  # the input at which φ is largest
    q, k, v = q.requires_grad_(), k.requires_grad_(), torch.randn(2, 50, 2, 8).requires_grad_()
    phi = functools.partial(favor, projection=projection)
    for causal in (True, False):
        y, state = linear_attention(q, k, v, causal, phi)
        assert all(x.isfinite().all() for x in (y, *state, *torch.autograd.grad(y.sum() + state.z.sum(), (q, k, v))))
    bound = projection.square().sum(-1).max().div(2).exp() / 8
    assert (phi(k) <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("causal", [True, False])
def test_the_backend_is_a_setting(causal, monkeypatch):
    used, found = [], []
    watch(monkeypatch, "chunked", lambda *_: used.append("chunked"))
    for settings in (LinearConfig(), LinearConfig(backend="chunked")):
        assert config.from_dict(LinearConfig, config.to_dict(settings)) == settings
        torch.manual_seed(0)
        found.append(settings.build(12, 3, causal)(tokens().float())[0])
    assert used == ["chunked"] * (1 + ("native" not in mnemos.ops.backends("linear_attention")))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="expected a backend of linear attention, found 'chunk'; did you mean 'chunk"):
        LinearConfig(backend="chunk").build(12, 3, causal)
