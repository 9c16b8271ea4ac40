"""The kernels of causal=False against the equations: every variant that this processor can run."""

import pytest
import torch
from kernel_cases import REFERENCES, close, exactly, gradients, holes, run, strange
from native_kernels import ALL_VARIANTS, INSTRUCTION_SETS, needs_kernels, run_variant

from mnemos.ops.linear import LinearState, linear_attention
from mnemos.ops.linear.reference import reference_bidirectional, reference_linear_attention

pytestmark = needs_kernels
EPS = 0.1
SHAPES = [  # B, T, N, H, D, M
    (2, 7, 5, 3, 5, 4),
    (1, 1, 33, 1, 16, 16),
    (2, 70, 1, 2, 33, 17),
    (1, 40, 65, 5, 1, 1),
    (3, 0, 31, 1, 8, 40),
]


@pytest.fixture(params=ALL_VARIANTS, ids=lambda i: INSTRUCTION_SETS[i])
def variant(request):
    """Every kind of these kernels, that with products of bfloat16 included."""
    with run_variant(request.param):
        yield request.param


def inputs(b, t, n, h, d, m, dtype=torch.float32, seed=0):
    """q, k, v, s, z: leaves, none of q, k, v, s contiguous."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (strange((b, length, h, width), g, dtype) for length, width in ((t, d), (n, d), (n, m)))
    s, z = torch.rand(b, h, d, m, generator=g).mT.contiguous().mT, torch.rand(b, h, d, generator=g)
    return q, k, v, s.requires_grad_(), z.requires_grad_()


def equations(given, mask, name):
    """Values and gradients by the equations in float64."""
    exact = exactly(given)
    q, k, v, s, z = exact
    options = {"phi": REFERENCES[name], "state": (s, z), "mask": mask, "eps": EPS}
    outputs = reference_linear_attention(q, k, v, reference_bidirectional, **options)
    return [*outputs, *gradients(outputs, exact)]


def kernel(given, mask, feature_map):
    return run(given, "native", mask=mask, feature_map=feature_map, eps=EPS, causal=False)


@pytest.mark.each_value
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_equations(shape, masked, name, variant, poisoned):
    given = inputs(*shape)
    mask = holes(shape[0], shape[2]) if masked else None
    if shape[1]:
        close(kernel(given, mask, name), equations(given, mask, name), 1e-5)
    else:  # the equations' rows of no queries cannot be stacked: they are the sums of the keys alone
        filled = inputs(shape[0], 1, *shape[2:])
        alone = LinearState(*filled[3:])
        _, *sums = reference_linear_attention(*filled[:3], reference_bidirectional, REFERENCES[name], alone, mask, EPS)
        y, state = linear_attention(
            filled[0][:, :0], *filled[1:3], False, name, alone, mask=mask, eps=EPS, backend="native"
        )
        assert y.shape == (*shape[:2], shape[3], shape[5])
        close(state, sums, 1e-5)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", [(1, 700, 1100, 1, 24, 40), (2, 300, 40, 3, 33, 31)], ids=str)
def test_any_number_of_threads(shape, count, variant, threads, poisoned):
    threads(count)
    given = inputs(*shape)
    mask = holes(shape[0], shape[2])
    exact = exactly(given)
    expected = run(exact, "chunked", mask=mask, feature_map=torch.sigmoid, eps=EPS, causal=False)
    close(kernel(given, mask, torch.sigmoid), expected, 2e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 60, 300, 2, 16, 12), (2, 70, 33, 3, 33, 17), (1, 50, 40, 3, 2, 1)], ids=str)
def test_half_precision(shape, dtype, name, variant, poisoned):
    """The gradient of q is of float32 sums: also where v has a mean. What the mask hides may be anything."""
    given = inputs(*shape, dtype)
    mask = holes(shape[0], shape[2])
    spoiled = [x.detach().masked_fill(~mask[..., None, None], torch.nan) for x in (given[1], given[2] + 3)]
    found = kernel((given[0], *(x.requires_grad_() for x in spoiled), *given[3:]), mask, name)
    given = (given[0], *(x.detach().nan_to_num(0.0).requires_grad_() for x in spoiled), *given[3:])
    expected = equations(given, mask, name)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32] + [dtype] * 3 + [torch.float32] * 2
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.double() - b).norm() <= (1e-6 if i in (1, 2) else 4e-3) * b.norm(), i
    assert not any(x[~mask].any() for x in found[4:6])


@pytest.mark.parametrize(("t", "shift"), [(2048, 0), (4096, 4)])
def test_bfloat16_where_the_values_have_a_mean(t, shift, variant):
    """S·ĝ and γ·z cancel, and so do v·R and w: factors of 16 bits must not be those of the mean."""
    g = torch.Generator().manual_seed(0)
    q, k, v, above = (torch.randn(1, t, 1, 32, generator=g).bfloat16() for _ in range(4))
    given = [x.requires_grad_() for x in (q, k, v + shift)]
    exact = exactly(given)
    y, wanted = (linear_attention(*x, False, backend=b)[0] for x, b in ((given, "native"), (exact, "chunked")))
    found = torch.autograd.grad(y, given, above)
    for a, b in zip(found, torch.autograd.grad(wanted, exact, above.double()), strict=True):
        assert (a.double() - b).norm() < 2.5e-3 * b.norm()


def test_a_long_sum_keeps_its_digits(variant):
    ones = torch.ones(1, 1 << 19, 1, 1)
    third = torch.full_like(ones, 1 / 3)
    _, (s, z) = linear_attention(ones[:, :1], ones, third, False, "relu", backend="native")
    # A chunk of 32 tokens is a plain sum, whose rounding is the same 2¹⁴ times; one plain sum would be off by 10⁻³.
    assert abs(s.item() / third[0, 0].double().item() / (1 << 19) - 1) < 4e-7
    assert z.item() == 1 << 19


@pytest.mark.slow
@pytest.mark.parametrize("t", [pytest.param(1, marks=pytest.mark.exhaustive), 20])
def test_opcheck(t):
    q, k, v, s, z = inputs(2, t, 9, 2, 6, 5)
    for mask in (None, holes(2, 9)):
        found = torch.library.opcheck(torch.ops.mnemos.linear_attention_bidirectional, (q, k, v, s, z, mask, 1, 0.1))
        assert set(found.values()) == {"SUCCESS"}
