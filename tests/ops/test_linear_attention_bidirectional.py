"""The kernels of causal=False against the equations: every variant that this processor can run."""

import pytest
import torch
from kernel_cases import agree, exactly, holes, results, weights
from linear_attention_cases import equations, inputs, run
from native_kernels import ALL_VARIANTS, INSTRUCTION_SETS, needs_kernels, run_variant

from mnemos.ops.linear import linear_attention

pytestmark = needs_kernels
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


def given(b, t, n, h, d, m, dtype=torch.float32):
    return inputs(t, n, dtype, b, h, d, m)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["elu", "relu"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_equations(shape, masked, name, variant, poisoned):
    options = {"mask": holes(shape[0], shape[2]) if masked else None, "feature_map": name, "eps": 0.1, "causal": False}
    agree(run, equations, given(*shape), 1e-5, backend="native", **options)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", [(1, 700, 1100, 1, 24, 40), (2, 300, 40, 3, 33, 31)], ids=str)
def test_any_number_of_threads(shape, count, variant, threads, poisoned):
    threads(count)
    options = {"mask": holes(shape[0], shape[2]), "feature_map": torch.sigmoid, "eps": 0.1, "causal": False}
    agree(run, run, given(*shape), 2e-5, backend="native", **options)  # float64 is computed in chunks


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["elu", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 60, 300, 2, 16, 12), (2, 70, 33, 3, 33, 17), (1, 50, 40, 3, 2, 1)], ids=str)
def test_half_precision(shape, dtype, name, variant, poisoned):
    """The gradient of q is of float32 sums: also where v has a mean. What the mask hides may be anything."""
    clean, mask = given(*shape, dtype), holes(shape[0], shape[2])
    clean["v"].data.add_(3)
    hidden = ~mask[..., None, None]
    spoiled = clean | {x: clean[x].detach().masked_fill(hidden, torch.nan).requires_grad_() for x in ("k", "v")}
    options = {"mask": mask, "feature_map": name, "eps": 0.1, "causal": False}
    found = results(run, spoiled, backend="native", **options)
    expected = results(equations, exactly(clean), weights(found[:3]), **options)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32] + [dtype] * 3 + [torch.float32] * 2
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.double() - b).norm() <= (1e-6 if i in (1, 2) else 4e-3) * b.norm(), i
    assert not any(x[~mask].any() for x in found[4:6])


@pytest.mark.parametrize(("t", "shift"), [(2048, 0), (4096, 4)])
def test_bfloat16_where_the_values_have_a_mean(t, shift, variant):
    """S·ĝ and γ·z cancel, and so do v·R and w: factors of 16 bits must not be those of the mean."""
    g = torch.Generator().manual_seed(0)
    q, k, v, above = (torch.randn(1, t, 1, 32, generator=g).bfloat16() for _ in range(4))
    half = [x.requires_grad_() for x in (q, k, v + shift)]
    exact = [x.detach().double().requires_grad_() for x in half]
    y, wanted = (linear_attention(*x, False, backend=b)[0] for x, b in ((half, "native"), (exact, "chunked")))
    found = torch.autograd.grad(y, half, above)
    for a, b in zip(found, torch.autograd.grad(wanted, exact, above.double()), strict=True):
        assert (a.double() - b).norm() < 2.5e-3 * b.norm()


def test_a_long_sum_keeps_its_digits(variant):
    ones = torch.ones(1, 1 << 19, 1, 1)
    third = torch.full_like(ones, 1 / 3)
    _, (s, z) = linear_attention(ones[:, :1], ones, third, False, "relu", backend="native")
    # A chunk of 32 tokens is a plain sum, whose rounding is the same 2¹⁴ times; one plain sum would be off by 10⁻³.
    assert abs(s.item() / third[0, 0].double().item() / (1 << 19) - 1) < 4e-7
    assert z.item() == 1 << 19
