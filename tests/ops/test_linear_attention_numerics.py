"""How exact linear attention is: long sums, half precision, hostile inputs, and numbers that are not finite.

The bars of long sums hold at a million tokens (benchmarks/linear_attention_error.py): 1e-5 of the largest output in
chunks, 5e-5 in single steps. A sum's error grows with √N: at N tokens the bars are √(N/10⁶) as high.
"""

import contextlib
import functools

import pytest
import torch
from kernel_cases import close, exactly, holes, results, weights
from linear_attention_cases import HERE, B, inputs, run
from native_kernels import needs_kernels

from mnemos.native import instruction_set, instruction_sets
from mnemos.ops import linear_attention
from mnemos.ops.linear.feature_maps import FEATURE_MAPS, Pointwise, elu, favor, random_projection
from mnemos.ops.linear.reference import reference_elu, reference_relu
from mnemos.types import leaves

LONG, WIDTH = 65_536, 8
SCALE = (LONG / 1e6) ** 0.5


@pytest.fixture(params=HERE)
def backend(request):
    return request.param


@pytest.fixture(params=["chunked", *instruction_sets()])
def way(request):
    """A backend, the kernels by every instruction set."""
    with instruction_set(request.param) if request.param != "chunked" else contextlib.nullcontext():
        yield "native" if request.param != "chunked" else "chunked"


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
@pytest.mark.parametrize(
    ("tokens", "length"),  # a step of one token costs as much as a call of hundreds
    [(LONG, LONG), (LONG, 1000), (LONG // 32, 1), pytest.param(LONG, 1, marks=pytest.mark.exhaustive)],
)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_a_long_sequence_in_calls(scale, tokens, length, backend):
    given = draw(tokens, scale)
    y, s, z = exact(*given)
    found, state = cut(given, length, backend)
    bar = (5e-5 if length == 1 else 1e-5) * (tokens / 1e6) ** 0.5
    assert off(found, y) < bar
    assert off_sums(state, s, z) < 2 * bar


@needs_kernels
@pytest.mark.parametrize("count", [1, 3])  # 3: the sequence is shared out
def test_the_kernels_sums_are_right_to_the_last_digit_however_long(count, threads):
    threads(count)
    given = draw()
    y, s, z = exact(*given)
    found, state = cut(given, LONG, "native")
    assert off_sums(state, s, z) < 1e-7
    assert off(found, y) < 6e-7


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

    for which in (0, 1):  # relu has no slope below 0, nor a feature
        given = [x.detach() for x in (q, k, v)]
        given[which] = -given[which].abs()
        given = [x.requires_grad_() for x in given]
        y, state = linear_attention(*given, feature_map="relu", backend=backend)
        found = torch.autograd.grad(y.sum() + sum(x.sum() for x in state), given)
        assert not y.any()
        assert not found[which].any()
        assert all(x.isfinite().all() for x in (*state, *found))
        assert which == 0 or not any(x.any() for x in state)


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


def test_elu_plus_one_does_not_cancel():
    x = torch.tensor([-80.0, -18.0, -6.25, -1e-9, 0.0, 1e-9, 3.0], requires_grad=True)
    exact = reference_elu(x.detach().double())
    assert (elu(x) > 0).all()
    torch.testing.assert_close(elu(x).double(), exact, rtol=1e-6, atol=0)
    slope = torch.where(x < 0, x.detach().double().exp(), 1.0)
    torch.testing.assert_close(torch.autograd.grad(elu(x).sum(), x)[0].double(), slope, rtol=1e-6, atol=0)
    torch.testing.assert_close(FEATURE_MAPS["elu"].slope(elu(x)).double(), slope, rtol=1e-6, atol=0)
    low = elu(x.to(torch.bfloat16)).double()
    torch.testing.assert_close(low, exact, rtol=2**-7, atol=0)


PATHS = pytest.mark.parametrize(("t", "causal"), [(1, True), (70, True), (9, False)])


@PATHS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_a_float32_state(dtype, t, causal, way, poisoned):
    given = inputs(t, dtype=dtype, d=33, m=17)
    options = {"causal": causal, "mask": holes(B, t), "eps": 0.1}
    found = results(run, given, backend=way, **options)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32] + [dtype] * 3 + [torch.float32] * 2
    expected = results(run, exactly(given), weights(found[:3]), **options)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=2**-7, atol=1e-3)
    eps = torch.finfo(dtype).eps
    close(found, expected, given, [eps, 1e-6, 1e-6, *[eps] * 3, 1e-5, 1e-5])


@PATHS
def test_autocast_changes_nothing(t, causal, backend):
    given = {name: x for name, x in inputs(t, dtype=torch.float32).items() if name in ("q", "k", "v")}
    options = {"causal": causal, "backend": backend}
    plain = results(run, given, **options)
    with torch.autocast("cpu", torch.bfloat16):
        low = leaves(run(**given, **options))
        # A backward within autocast is the one of torch's own operations wherever they are used.
        inside = results(run, given, **options) if causal and t > 1 else plain
    outside = [*low, *torch.autograd.grad(low, list(given.values()), weights(low))]
    for found in (inside, outside):
        assert all(map(torch.equal, found[:3], plain[:3]))
        close(found, plain, given, 1e-6)


@pytest.mark.parametrize("t", [1, 6])
def test_types_that_differ_are_taken_at_the_widest(t, backend):
    """y has v's type and the state the sums': nothing is refused that has a meaning."""
    given = inputs(t, dtype=torch.float32)
    low = given | {"q": given["q"].half(), "k": given["k"].bfloat16()}
    y, new = run(**low, backend=backend)
    expected, _ = run(**{name: x.float() for name, x in low.items()}, backend=backend)
    assert (y.dtype, new.s.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("t", "shift", "causal"), [(16384, 4, True), (2048, 0, False), (4096, 4, False)])
def test_gradients_of_half_precision_where_the_values_have_a_mean(t, shift, causal, dtype, way):
    """dq = S·ĝ + γ·z, which cancel, and so do v·R and w: rounding is that of the results alone."""
    g = torch.Generator().manual_seed(0)
    q, k, v, above = (torch.randn(1, t, 1, 32, generator=g) for _ in range(4))
    given = [x.to(dtype).requires_grad_() for x in (q, k, v + shift)]
    exact = [x.detach().double().requires_grad_() for x in given]
    y, wanted = (linear_attention(*x, causal, backend=b)[0] for x, b in ((given, way), (exact, "chunked")))
    found = torch.autograd.grad(y, given, above.to(dtype))
    for a, b in zip(found, torch.autograd.grad(wanted, exact, above.to(dtype).double()), strict=True):
        assert (a.double() - b).norm() < 2.5e-3 * b.norm()


MAPS = {
    "elu": "elu",
    "polynomial": "polynomial",
    "favor": functools.partial(favor, projection=random_projection(6, 4)),
    "exponential": torch.exp,
    "root": torch.sqrt,
    "pointwise": Pointwise("exponential", torch.exp, lambda phi: phi),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("t", "causal"), [(1, True), (9, True), (9, False)])
def test_a_masked_token_reaches_nothing(backend, name, t, causal):
    """NaN, infinity, or a number whose exponential overflows: outputs and gradients are those of a zero there."""
    g = torch.Generator().manual_seed(0)
    given = [torch.rand(2, t, 1, 4, generator=g) + 0.1 for _ in range(3)]
    width = {"polynomial": 10, "favor": 6}.get(name, 4)
    state = torch.rand(2, 1, width, 4, generator=g), torch.rand(2, 1, width, generator=g)
    mask = torch.ones(2, t, dtype=torch.bool)
    mask[0, t // 2] = False
    found = []
    for hidden in (0.0, torch.nan, torch.inf, 1e30):
        q, k, v = (x.clone() for x in given)
        k[0, t // 2], v[0, t // 2] = hidden, hidden
        used = [x.requires_grad_() for x in (q, k, v)]
        y, after = linear_attention(*used, causal, MAPS[name], state, mask, backend=backend)
        found.append([y, *after, *torch.autograd.grad(y.sum() + after[0].sum(), used)])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not found[0][4][0, t // 2].any()  # dk of the masked key
