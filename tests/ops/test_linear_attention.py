"""Linear attention is its equations: forms, maps, derivatives, and calls that are cut and resumed."""

import functools
import itertools

import pytest
import torch
from linear_attention_cases import B, D, H, compare, holes, inputs

from mnemos.ops import linear_attention
from mnemos.ops.linear import LinearState, chunked
from mnemos.ops.linear.feature_maps import elu, favor, polynomial, random_projection
from mnemos.ops.linear.reference import (
    reference_bidirectional,
    reference_causal,
    reference_elu,
    reference_linear_attention,
    reference_polynomial,
    reference_relu,
    reference_similarity,
)

LENGTHS = [1, 2, 31, 32, 33, 75]


MAPS = {"elu": reference_elu, "relu": reference_relu, "polynomial": reference_polynomial}


@pytest.fixture(params=["one segment", "a segment a chunk", "two chunks a segment"])
def segments(request, monkeypatch):
    numbers = {"one segment": 2**18, "a segment a chunk": 1, "two chunks a segment": 2 * B * H * 32 * D}[request.param]
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": numbers})


@pytest.mark.each_value
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("t", LENGTHS)
def test_causal_equals_the_equations(t, masked, segments, poisoned):
    q, k, v, state = inputs(t)
    mask = holes(t) if masked else None
    y, new = linear_attention(q, k, v, state=state, mask=mask, eps=0.1)
    expected = reference_linear_attention(q, k, v, reference_causal, state=state, mask=mask, eps=0.1)
    compare((y, *new), expected, (q, k, v, *state))


@pytest.mark.parametrize(("t", "n"), [(1, 1), (7, 7), (7, 4), (1, 9), (9, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_bidirectional_equals_the_equations(t, n, masked, poisoned):
    q, k, v, state = inputs(t, n)
    mask = holes(n) if masked else None
    y, new = linear_attention(q, k, v, causal=False, state=state, mask=mask)
    expected = reference_linear_attention(q, k, v, reference_bidirectional, state=state, mask=mask)
    compare((y, *new), expected, (q, k, v, *state))


@pytest.mark.each_value
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_every_feature_map(name, t, causal):
    q, k, v, _ = inputs(t)
    mask = holes(t)
    y, _ = linear_attention(q, k, v, causal, name, mask=mask, eps=0.1)
    schedule = reference_causal if causal else reference_bidirectional
    expected, _, _ = reference_linear_attention(q, k, v, schedule, MAPS[name], mask=mask, eps=0.1)
    compare([y], [expected], (q, k, v))


@pytest.mark.slow
def test_the_three_schedules_agree():
    """Eq. 8 (similarities), 9 to 12 (sums) and 16 to 20 (a call a token) are one function."""
    q, k, v, state = inputs(35)
    similar = reference_linear_attention(q, k, v, reference_similarity, state=state)
    y, new = linear_attention(q, k, v, state=state)
    compare((y, *new), similar, (q, k, v, *state))
    steps, moving = [], state
    for i in range(35):
        y, moving = linear_attention(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], state=moving)
        steps.append(y)
    compare((torch.cat(steps, 1), *moving), similar, (q, k, v, *state))


@pytest.mark.slow
def test_any_function_is_a_feature_map():
    projection = random_projection(9, D, torch.Generator().manual_seed(0))
    for phi in (functools.partial(favor, projection=projection), lambda x: torch.cat([x, -x], -1).exp(), torch.sigmoid):
        q, k, v, _ = inputs(40)
        y, state = linear_attention(q, k, v, feature_map=phi)
        compare((y, *state), reference_linear_attention(q, k, v, phi=phi), (q, k, v))


def test_derivatives(segments):
    """First derivatives by finite differences, of every output for every input."""
    for t, causal, masked in itertools.product((1, 35), (True, False), (False, True)):
        q, k, v, state = inputs(t, rows=2)
        mask = holes(t) if masked else None

        def function(q, k, v, s, z, causal=causal, mask=mask):
            y, state = linear_attention(q, k, v, causal, state=LinearState(s, z), mask=mask)
            return y, *state

        assert torch.autograd.gradcheck(function, (q, k, v, *state), fast_mode=True)


def test_bidirectional_calls_add_up():
    q, k, v, _ = inputs(8)
    whole, end = linear_attention(q, k, v, causal=False)
    _, first = linear_attention(q[:, :3], k[:, :3], v[:, :3], causal=False)
    y, both = linear_attention(q, k[:, 3:], v[:, 3:], causal=False, state=first)
    compare((y, *both), (whole, *end), (q, k, v))


def test_eps_is_added_to_the_denominator():
    q, k, v, _ = inputs(6, dtype=torch.float64)
    y, _ = linear_attention(q, k, v, eps=0.0)
    shifted, state = linear_attention(q, k, v, eps=0.5)
    den = torch.einsum("bthd,bthd->bth", elu(q), elu(k).cumsum(1))[..., None]
    torch.testing.assert_close(shifted, y * den / (den + 0.5))
    torch.testing.assert_close(state.z, elu(k).sum(1))
    # Without eps, a scale of φ is without effect; the lengths that fill a chunk up do not meet 0/0.
    twice, _ = linear_attention(q, k, v, feature_map=lambda x: 2 * elu(x), eps=0.0)
    compare([twice], [y], (q, k, v))


def test_the_slope_at_zero_is_one_on_every_path():
    for t, causal in ((1, True), (40, True), (3, False)):
        q, k, v, _ = inputs(t)
        nothing = torch.zeros_like(q).requires_grad_()
        y, _ = linear_attention(nothing, k, v, causal)
        expected, _, _ = reference_linear_attention(
            nothing, k, v, reference_causal if causal else reference_bidirectional
        )
        compare([y], [expected], [nothing])


@pytest.mark.slow
def test_polynomial_and_favor_are_their_kernels():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 50, D, generator=g, dtype=torch.float64)
    torch.testing.assert_close((polynomial(q) * polynomial(k)).sum(-1), (q * k).sum(-1).square())
    assert polynomial(q).shape == (50, D * (D + 1) // 2)
    q, k = q / 2, k / 2  # a random feature's relative variance grows as exp(|q + k|²/√D)
    projection = random_projection(200_000, D, g)
    assert projection.shape == (200_000, D)
    similarity = (favor(q, projection) * favor(k, projection)).sum(-1)
    kernel = torch.exp((q * k).sum(-1) / D**0.5)
    assert ((similarity - kernel) / kernel).abs().max() < 0.03
    assert projection.mean(0).abs().max() < 0.02  # the signs of an uncorrected QR are not even
    block = projection[:D] / projection[:D].norm(dim=1, keepdim=True)
    torch.testing.assert_close(block @ block.T, torch.eye(D), rtol=0, atol=1e-5)
