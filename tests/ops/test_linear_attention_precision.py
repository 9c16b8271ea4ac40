"""Linear attention of half precision, of mixed types and under autocast, on every backend of this processor."""

import pytest
import torch
from linear_attention_cases import HERE, inputs, weighted

from mnemos.ops import linear_attention
from mnemos.ops.linear.feature_maps import FEATURE_MAPS, elu
from mnemos.ops.linear.reference import (
    reference_bidirectional,
    reference_causal,
    reference_elu,
    reference_linear_attention,
)


@pytest.fixture(params=HERE)
def backend(request):
    return request.param


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_a_float32_state(dtype, backend):
    for t, causal in ((1, True), (70, True), (9, False)):
        q, k, v, state = inputs(t, dtype=dtype)
        y, new = linear_attention(q, k, v, causal, state=state, backend=backend)
        assert y.dtype == dtype
        assert (new.s.dtype, new.z.dtype) == (torch.float32, torch.float32)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = reference_linear_attention(
            *exact, reference_causal if causal else reference_bidirectional, state=state
        )
        torch.testing.assert_close(y.double(), expected[0], rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(new.s.double(), expected[1], rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(weighted([y]), (q, k, v))
        for a, b in zip(found, torch.autograd.grad(weighted(expected[:1]), exact), strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).abs().max() < 2e-2 * b.abs().max()


@pytest.mark.parametrize("step", [512, 1])
def test_a_long_stream_of_bfloat16_does_not_stagnate(step, backend):
    total = 4096 if step == 1 else 32768
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, total, 1, 4, generator=g).to(torch.bfloat16) for _ in range(3))
    v = v + 1
    state = None
    with torch.no_grad():
        for a in range(0, total, step):
            y, state = linear_attention(*(x[:, a : a + step] for x in (q, k, v)), state=state, backend=backend)
    phi = reference_elu(k.double())
    torch.testing.assert_close(state.z.double(), phi.sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(state.s.double(), torch.einsum("bthd,bthm->bhdm", phi, v.double()), rtol=1e-4, atol=0)
    assert y.dtype == torch.bfloat16


def test_autocast_changes_nothing(backend):
    for t, causal in ((1, True), (70, True), (9, False)):
        q, k, v, _ = inputs(t, dtype=torch.float32)
        y, state = linear_attention(q, k, v, causal, backend=backend)
        plain = torch.autograd.grad(weighted([y]), (q, k, v))
        with torch.autocast("cpu", torch.bfloat16):
            low, same = linear_attention(q, k, v, causal, backend=backend)
            # A backward within autocast is the one of torch's own operations wherever they are used.
            inside = causal and t > 1
            found = torch.autograd.grad(weighted([low]), (q, k, v)) if inside else None
        found = found or torch.autograd.grad(weighted([low]), (q, k, v))
        assert torch.equal(low, y)
        assert torch.equal(same.s, state.s)
        for a, b in zip(found, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("t", [1, 6])
def test_types_that_differ_are_taken_at_the_widest(t, backend):
    """y has v's type and the state the sums': nothing is refused that has a meaning."""
    q, k, v, state = inputs(t, dtype=torch.float32)
    y, new = linear_attention(q.half(), k.bfloat16(), v, state=state, backend=backend)
    expected, _ = linear_attention(q.half().float(), k.bfloat16().float(), v, state=state, backend=backend)
    assert (y.dtype, new.s.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("t", "shift"), [(4096, 1), (16384, 4)])
def test_gradients_of_half_precision_where_the_values_have_a_mean(t, shift, dtype, backend):
    """dq = S·ĝ + γ·z, which cancel: rounding is that of the results alone."""
    g = torch.Generator().manual_seed(0)
    q, k, v, above = (torch.randn(1, t, 1, 32, generator=g) for _ in range(4))
    given = [x.to(dtype).requires_grad_() for x in (q, k, v + shift)]
    y, _ = linear_attention(*given, backend=backend)
    found = torch.autograd.grad(y, given, above.to(dtype))
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = torch.autograd.grad(linear_attention(*exact)[0], exact, above.to(dtype).double())
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < 2.5e-3 * b.norm()
