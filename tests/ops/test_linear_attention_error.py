"""How far off long sums are, against float64, and what becomes of hostile inputs.

The bars hold at a million tokens (benchmarks/linear_attention_error.py): 1e-5 of the largest output in chunks, 5e-5 in
single steps. A sum's error grows with √N: at N tokens the bars are √(N/10⁶) as high.
"""

import pytest
import torch

import mnemos
from mnemos.ops import linear_attention
from mnemos.ops.linear import BACKENDS
from mnemos.ops.linear.reference import reference_elu, reference_relu

HERE = [
    name
    for name in mnemos.ops.backends("linear_attention")
    if BACKENDS.by_name[name].takes(*torch.zeros(3, 1, 1, 1, 1))
]
LONG, WIDTH = 65_536, 8
SCALE = (LONG / 1e6) ** 0.5


@pytest.fixture(params=HERE)
def backend(request):
    return request.param


def draw(tokens=LONG, scale=1.0, dtype=torch.float32, seed=0, rows=1):
    """Values of mean 1: then s grows with N, as z does."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (scale * torch.randn(rows, tokens, 1, WIDTH, generator=g) for _ in range(3))
    return q.to(dtype), k.to(dtype), (v + scale).to(dtype)


def exact(q, k, v, phi=reference_elu, eps=1e-6, wide=torch.float64):
    """Eq. 9 to 12 by running sums in float64: y [B, T, H, M], s and z."""
    q, k, v = phi(q.to(wide)), phi(k.to(wide)), v.to(wide)
    s, z = (k[..., :, None] * v[..., None, :]).cumsum(1), k.cumsum(1)
    y = (q[..., None, :] @ s).squeeze(-2) / ((q * z).sum(-1, keepdim=True) + eps)
    return y, s[:, -1], z[:, -1]


def cut(given, length, backend):
    """y and the state of calls of `length` tokens."""
    parts, state = [], None
    with torch.no_grad():
        for a in range(0, given[0].shape[1], length):
            y, state = linear_attention(*(x[:, a : a + length] for x in given), state=state, backend=backend)
            parts.append(y)
    return torch.cat(parts, 1), state


def off(found, expected):
    """The largest error of the last 4,096 tokens, of their largest value."""
    found, expected = found[:, -4096:].double(), expected[:, -4096:]
    return float((found - expected).abs().max() / expected.abs().max())


def off_sums(state, s, z):
    """Of the sums."""
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(state, (s, z), strict=True))


@pytest.mark.each_value
@pytest.mark.parametrize("length", [LONG, 1000])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_a_long_sequence_in_chunks(scale, length, backend):
    given = draw(scale=scale)
    y, s, z = exact(*given)
    found, state = cut(given, length, backend)
    assert off(found, y) < 1e-5 * SCALE
    assert off_sums(state, s, z) < 2e-5 * SCALE


def test_the_kernels_sums_are_right_to_the_last_digit_however_long():
    if "native" not in HERE:
        pytest.skip("the kernels were not built")
    given = draw()
    y, s, z = exact(*given)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):  # 3: the sequence is shared out
            torch.set_num_threads(threads)
            found, state = cut(given, LONG, "native")
            assert off_sums(state, s, z) < 1e-7
            assert off(found, y) < 6e-7
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def steps(exhaustive):
    """So many single steps: a step costs as much as a call of hundreds of tokens."""
    return LONG if exhaustive else LONG // 32


@pytest.mark.slow
def test_a_long_sequence_in_single_steps(steps, backend):
    given = draw(steps)
    y, _, _ = exact(*given)
    plain, _ = cut(given, 1, backend)
    assert off(plain, y) < 5e-5 * (steps / 1e6) ** 0.5


def test_bfloat16_does_not_drift(backend):
    """What rounding the inputs does is not counted: float64 gets the rounded ones."""
    given = draw(dtype=torch.bfloat16)
    y, s, z = exact(*given)
    found, state = cut(given, 1000, backend)
    assert off_sums(state, s, z) < 2e-5 * SCALE
    error = (found.double() - y).abs()
    early, late = (float(error[:, a : a + 4096].max()) for a in (LONG // 2, LONG - 4096))
    assert max(early, late) < 2**-8 * float(y[:, LONG // 2 :].abs().max())  # a rounding of y, to the end
    assert late < 1.5 * early


@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_rows_without_keys_and_queries_without_features(t, scale, backend):
    """Nothing to read is 0/eps = 0, with gradients that are finite, and zero for what cannot be read."""
    q, k, v = (x.requires_grad_() for x in draw(t, scale, rows=2))
    nothing = torch.zeros(2, t, dtype=torch.bool)
    y, state = linear_attention(q, k, v, mask=nothing, backend=backend)
    found = torch.autograd.grad(y.sum() + sum(x.sum() for x in state), (q, k, v))
    assert not any(x.any() for x in (y, *state, *found))

    silent = (-q.detach().abs()).requires_grad_()
    y, state = linear_attention(silent, k, v, feature_map="relu", backend=backend)
    found = torch.autograd.grad(y.sum() + sum(x.sum() for x in state), (silent, k, v))
    assert not y.any()
    assert all(x.isfinite().all() for x in (*state, *found))
    assert not found[0].any()  # relu has no slope there

    deaf = (-k.detach().abs()).requires_grad_()
    y, state = linear_attention(q, deaf, v, feature_map="relu", backend=backend)
    assert not any(x.any() for x in (y, *state))
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), (q, deaf, v)))


@pytest.mark.parametrize("phi", [("elu", reference_elu), ("relu", reference_relu)], ids=lambda p: p[0])
@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_scaled_inputs_and_their_gradients(scale, phi, backend):
    name, function = phi
    given = [x.requires_grad_() for x in draw(50, scale)]
    wide = [x.detach().double().requires_grad_() for x in given]
    y, _ = linear_attention(*given, feature_map=name, backend=backend)
    expected, _, _ = exact(*wide, function)
    found, wanted = torch.autograd.grad(y.sum(), given), torch.autograd.grad(expected.sum(), wide)
    # Where φ is nearly constant a gradient is a difference of near equals: the equations in float32 are the measure.
    single = [x.detach().requires_grad_() for x in given]
    plain = exact(*single, function, wide=torch.float32)[0]
    peers = plain, *torch.autograd.grad(plain.sum(), single)
    for a, b, c in zip((y, *found), (expected, *wanted), peers, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).abs().max() <= 4 * (c.double() - b).abs().max() + 1e-6 * b.abs().max()
