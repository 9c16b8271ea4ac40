"""Softmax attention is its equation: windows, padding, shared key heads, odd sizes, large scores; its errors.

The kernels: every variant that this processor can run.
"""

import pytest
import torch
from kernel_cases import agree, exactly, holes, kept_bytes, results, same_bits_on_any_threads, strange
from native_kernels import needs_kernels
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from mnemos.ops.softmax_attention import can_attend, native, softmax_attention
from mnemos.ops.softmax_attention.reference import reference_softmax_attention
from mnemos.types import InputError

pytestmark = needs_kernels


def inputs(b, t, s, h, shared, d, m, seed=0):
    """q, k, v: leaves, none contiguous."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"q": (b, t, h, d), "k": (b, s, shared, d), "v": (b, s, shared, m)}
    return {name: strange(shape, g) for name, shape in shapes.items()}


def padding(b, s, padded=True):
    """Padding in front of a row and in its middle; a row that is all padding."""
    return holes(b, s, empty_row=True) if padded else None


def visible(t, s, causal, window, mask):
    """[B or 1, 1, T, S]"""
    query, key = torch.arange(s - t, s)[:, None], torch.arange(s)
    seen = key <= query if causal else torch.ones(t, s, dtype=torch.bool)
    if window is not None:
        seen = seen & (key > query - window)
    return seen[None, None] if mask is None else seen & mask[:, None, None]


def dense(q, k, v, causal=True, window=None, mask=None, scale=None):
    """The equation with all weights at once, in the inputs' dtype."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = visible(q.shape[1], k.shape[1], causal, window, mask)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return torch.einsum("bhts,bshm->bthm", weights, v)


def fused(q, k, v, causal=True, window=None, mask=None):
    """PyTorch's."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, visible(q.shape[2], k.shape[2], causal, window, mask)).transpose(
        1, 2
    )


# B, T, S, H, K, D, M
SMALL = [
    (2, 7, 7, 2, 1, 5, 3),
    (3, 1, 4, 3, 3, 4, 8),
    (2, 9, 13, 4, 2, 17, 33),
    (2, 0, 3, 1, 1, 4, 4),
    (1, 5, 70, 2, 2, 3, 1),
]


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seen", [(True, None), (True, 1), (True, 3), (False, None)], ids=str)
def test_equals_the_equation(seen, padded, shape, variant, poisoned):
    options = {"causal": seen[0], "window": seen[1], "mask": padding(shape[0], shape[2], padded)}
    agree(softmax_attention, reference_softmax_attention, inputs(*shape), 3e-6, **options)


# 64 queries and keys are a block, 32 queries a strip, 256 queries a unit.
LARGE = [
    (1, 63, 63, 2, 2, 33, 64), (1, 65, 65, 2, 1, 64, 5), (2, 300, 333, 3, 1, 32, 32), (1, 1000, 1000, 2, 2, 64, 64),
    (1, 130, 200, 2, 2, 96, 128), (9, 70, 70, 4, 2, 16, 16), (1, 257, 320, 9, 3, 128, 96),
]  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seen", [(True, None), (True, 50), (True, 128), (False, None)], ids=str)
def test_every_block_equals_the_equation(seen, padded, shape, variant, poisoned):
    options = {"causal": seen[0], "window": seen[1], "mask": padding(shape[0], shape[2], padded)}
    agree(softmax_attention, dense, inputs(*shape), 3e-6, **options)


def test_drawn_shape_equals_the_equation():
    g = torch.Generator().manual_seed(11)

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=g))

    for seed in range(40):
        t, shared = draw(1, 140), draw(1, 3)
        shape = draw(1, 3), t, t + draw(0, 1) * draw(0, 140), shared * draw(1, 3), shared, draw(1, 70), draw(1, 70)
        causal = draw(0, 3) > 0
        window = draw(1, 150) if causal and draw(0, 1) else None
        options = {"causal": causal, "window": window, "mask": padding(shape[0], shape[2], draw(0, 1))}
        agree(softmax_attention, dense, inputs(*shape, seed=seed), 3e-6, **options)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("d", [5, 33, 64, 128])
def test_errors_are_those_of_pytorch(d, size, window):
    """Against float64, at most three times as large; `size` multiplies the scores."""
    given = inputs(1, 400, 400, 4, 4, d, d)
    given["q"].data.mul_(size)
    exact = results(dense, exactly(given), window=window)
    ours, theirs = results(softmax_attention, given, window=window), results(fused, given, window=window)
    for name, a, b, c in zip(("y", *given), ours, theirs, exact, strict=True):
        error, other = ((x.double() - c).abs() for x in (a, b))
        assert error.square().mean().sqrt() <= 3 * other.square().mean().sqrt() + 1e-9, name
        assert error.max() <= 3 * other.max() + 1e-9, name


@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores_choose_a_key(sign, variant):
    """Scores of ±1e4 and beyond: the weight is one key's, and nothing overflows."""
    given = inputs(1, 150, 150, 2, 2, 16, 16)
    q, k = given["q"].data, given["k"].data
    q.abs_().add_(1)
    k.abs_().add_(1).mul_(sign * torch.rand(1, 150, 1, 1).mul(400).add(1))
    assert (q[:, -1, 0] @ k[0, :, 0].T).abs().max() > 1e4
    found = results(softmax_attention, given)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0].double(), dense(**exactly(given)).detach(), rtol=0, atol=1e-2)


def test_infinite_scores(variant):
    """Keys of −∞ have no weight, as in PyTorch; where all have none, y is 0."""
    q, k, v = (x.detach() for x in inputs(1, 80, 80, 1, 1, 4, 4).values())
    q = q.abs() + 0.1
    k[0, 3:70] = -torch.inf
    torch.testing.assert_close(softmax_attention(q, k, v), dense(q, k, v))
    k[0, :3] = -torch.inf
    assert not softmax_attention(q, k, v)[:, :70].any()


def test_a_number_that_is_not_finite_is_seen_and_not_lost(variant):
    q, k, v = (x.detach() for x in inputs(1, 200, 200, 1, 1, 8, 8).values())
    for x in (q, k, v):
        y = x.clone()
        y[0, 130] = torch.nan
        found = softmax_attention(*[y if x is z else z for z in (q, k, v)])
        assert found[0, 130].isnan().any()
        assert found[0, :128].isfinite().all()  # of earlier blocks; within a block it is multiplied by 0, as in PyTorch
        assert found[0, 131:].isnan().any() == (x is not q)


@pytest.mark.parametrize("holds", [torch.nan, torch.inf])
def test_what_padding_holds_changes_nothing(holds, variant):
    given, mask = inputs(2, 150, 150, 2, 1, 8, 8), torch.ones(2, 150, dtype=torch.bool)
    mask[0, :70] = mask[1, 90] = False
    clean = results(softmax_attention, given, mask=mask)
    hidden = ~mask[..., None, None]
    dirty = given | {x: given[x].detach().masked_fill(hidden, holds).requires_grad_() for x in ("k", "v")}
    assert not clean[0][0, :70].any(), "a query that reads nothing"
    assert not clean[1][0, :70].any()
    assert not clean[2][~mask].any()
    assert not clean[3][~mask].any()
    assert all(torch.equal(a, b) for a, b in zip(clean, results(softmax_attention, dirty, mask=mask), strict=True))


def test_any_number_of_threads_gives_the_same_bits(threads):
    given = inputs(1, 700, 700, 6, 2, 64, 64)
    same_bits_on_any_threads(threads, lambda: results(softmax_attention, given, window=300))


def test_only_inputs_output_and_sums_are_kept():
    given = inputs(2, 100, 100, 4, 2, 16, 16)
    assert kept_bytes(lambda: softmax_attention(**given), *given.values()) == 4 * (2 * 100 * 4 * 16 + 2 * 2 * 4 * 100)


@pytest.mark.each_value
@pytest.mark.parametrize(("shape", "window"), [((2, 7, 9, 2, 1, 5, 3), 3), ((1, 130, 200, 6, 2, 33, 20), 70)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_sums_and_largest_scores_are_results_with_gradients(padded, shape, window, variant, poisoned):
    given, mask = inputs(*shape), None
    if padded:  # every query sees a key
        mask = padding(shape[0], shape[2]) | (torch.arange(shape[2]) % 3 == 0)

    def ours(q, k, v):
        return native.attend(q, k, v, mask, True, window, 0.5)

    def equation(q, k, v):
        scores = 0.5 * torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(shape[3] // shape[4], 2))
        scores = scores.masked_fill(~visible(shape[1], shape[2], True, window, mask), -torch.inf)
        return dense(q, k, v, window=window, mask=mask, scale=0.5), scores.logsumexp(-1), scores.amax(-1)

    agree(ours, equation, given, 3e-6)


def test_a_second_derivative_is_refused():
    given = inputs(2, 20, 20, 2, 2, 4, 4)
    first = torch.autograd.grad(softmax_attention(**given).sum(), given["q"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"^softmax_attention is differentiable once"):
        first.sum().backward()


def test_calls_that_are_not_for_the_kernels():
    q, k, v = (x.detach() for x in inputs(1, 3, 3, 1, 1, 4, 4).values())
    assert can_attend(q, k, v)
    assert not can_attend(q.double(), k.double(), v.double())
    assert not can_attend(q.bfloat16(), k, v)
    assert not can_attend(q.to("meta"), k.to("meta"), v.to("meta"))
    with FlopCounterMode(display=False):
        assert not can_attend(q, k, v)
    per_row = torch.func.vmap(lambda *x: softmax_attention(*(y[None] for y in x), window=2)[0])(q, k, v)
    torch.testing.assert_close(per_row, softmax_attention(q, k, v, window=2))


@pytest.mark.parametrize(
    "changed",
    [
        {"k": torch.zeros(1, 2, 1, 4)},
        {"window": 0},
        {"causal": False, "window": 2},
        {"q": torch.zeros(1, 3, 2, 5)},
        {"q": torch.zeros(1, 3, 0, 4)},
        {"mask": torch.ones(1, 3)},
        {"v": torch.zeros(1, 3, 1, 4).double()},
    ],
)
def test_errors_say_what_was_expected(changed):
    q, k, v = torch.zeros(1, 3, 2, 4), torch.zeros(1, 3, 1, 4), torch.zeros(1, 3, 1, 4)
    with pytest.raises(InputError, match=r"expected .*found"):
        softmax_attention(**{"q": q, "k": k, "v": v, **changed})
