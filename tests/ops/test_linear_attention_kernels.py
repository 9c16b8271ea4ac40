"""What the compiled backend of linear attention keeps to, in every variant."""

import itertools

import pytest
import torch
from kernel_cases import close, exactly, gradients, holes, inputs, run
from native_kernels import needs_kernels

from mnemos.ops.linear import LinearState, linear_attention

pytestmark = needs_kernels


@pytest.mark.each_value
@pytest.mark.parametrize("t", [1, 66])
def test_padding_may_hold_anything(t, variant):
    q, k, v, s, z = inputs(2, t, 3, 5, 17)
    mask = holes(2, t)
    mask[1, -1] = False
    dirty = [torch.where(mask[..., None, None], x, torch.nan).detach().requires_grad_() for x in (k, v)]
    clean, found = (run((q, *kv, s, z), "native", mask=mask) for kv in ((k, v), dirty))
    for a, b in zip(found, clean, strict=True):
        assert torch.equal(a, b)
    for gradient in found[4:6]:
        assert not gradient[~mask].any()


@pytest.mark.each_value
@pytest.mark.parametrize("t", [1, 40])
def test_a_row_without_a_valid_key_and_a_query_without_features(t, variant):
    q, k, v, s, z = inputs(2, t, 2, 8, 8)
    nothing = torch.zeros(2, t, dtype=torch.bool)
    zero = (torch.zeros_like(s).requires_grad_(), torch.zeros_like(z).requires_grad_())
    found = run((q, k, v, *zero), "native", mask=nothing)
    assert not found[0].any()
    assert all(x.isfinite().all() for x in found)
    silent = (-q.detach().abs()).requires_grad_()  # relu: φ(q) = 0, and y = 0/eps
    found = run((silent, k, v, s, z), "native", feature_map="relu", eps=1e-3)
    assert not found[0].any()
    assert not found[3].any()
    assert all(x.isfinite().all() for x in found)


def test_no_gradient_from_above_for_some_outputs(variant):
    """What nothing is asked of counts as zero, also where there is no y; and a sum's gradient has strides of 0."""
    given = inputs(1, 70, 2, 6, 10)
    exact = exactly(given)
    for index in range(3):
        found, expected = [], []
        for x, name, to in ((given, "native", found), (exact, "chunked", expected)):
            y, state = linear_attention(*x[:3], state=LinearState(*x[3:]), backend=name, eps=0.1)
            to += torch.autograd.grad((y, *state)[index].sum(), x, allow_unused=True, materialize_grads=True)
        close(found, expected, 1e-5)


def test_the_given_state_is_never_changed(variant):
    with torch.no_grad():
        for t in (1, 40):
            q, k, v, s, z = given = inputs(2, t, 2, 8, 8)
            before = [x.clone() for x in given]
            for _ in range(2):
                _, new = linear_attention(q, k, v, state=(s, z), backend="native")
                assert new.s.data_ptr() != s.data_ptr()
            for a, b in zip(given, before, strict=True):
                assert torch.equal(a, b)


def test_the_future_cannot_change_the_past_and_steps_make_the_whole(variant, threads):
    n = 300  # long enough for several parts
    for count in (1, 3):
        threads(count)
        q, k, v, s, z = inputs(1, n, 1 if count > 1 else 2, 12, 20)
        whole, end = linear_attention(q, k, v, state=(s, z), backend="native")
        other = k.detach().clone()
        other[:, n - 10] += 1
        y, _ = linear_attention(q, other, v, state=(s, z), backend="native")
        assert torch.equal(y[:, : n - 10], whole[:, : n - 10])
        assert not torch.equal(y[:, n - 10], whole[:, n - 10])
        state, found = LinearState(s, z), []
        for a, b in itertools.pairwise([0, 1, 2, 19, n // 2, n - 1, n]):
            part, state = linear_attention(q[:, a:b], k[:, a:b], v[:, a:b], state=state, backend="native")
            found.append(part)
        close((torch.cat(found, 1), *state), (whole, *end), 1e-5)


def test_no_rows_and_no_heads():
    q, k, v, s, z = inputs(2, 9, 3, 4, 4)
    for rows, heads in ((0, 3), (2, 0)):
        given = [x[:rows, :, :heads] for x in (q, k, v)] + [x[:rows, :heads] for x in (s, z)]
        y, *_ = torch.ops.mnemos.linear_attention(*given, None, 1, 0.1)
        assert y.shape == (rows, 9, heads, 4)
        y.sum().backward()


@pytest.mark.slow
def test_compiled_equals_eager():
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    for t in (40, 1):
        q, k, v, s, z = given = inputs(2, t, 3, 5, 4)
        mask = holes(2, t)
        y, state = compiled(q, k, v, state=LinearState(s, z), mask=mask, backend="native")
        found = [y, *state, *gradients((y, *state), given)]
        for a, b in zip(found, run(given, "native", mask=mask), strict=True):
            assert torch.equal(a, b)


def test_a_second_derivative_is_refused():
    q, k, v, _, _ = inputs(1, 9, 1, 4, 4)
    y, _ = linear_attention(q, k, v, backend="native")
    (gradient,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(gradient.sum(), k)


def test_types_may_differ():
    q, k, v, s, z = inputs(1, 9, 2, 4, 4)
    y, state = linear_attention(q, k.bfloat16(), v.half(), state=(s, z), backend="native")
    assert (y.dtype, state.s.dtype) == (torch.float16, torch.float32)
    expected, _ = linear_attention(q, k.bfloat16().float(), v.half().float(), state=(s, z), backend="chunked")
    close([y], [expected], 1e-3)
