"""Relative attention against its equations, and the shift against looking distances up."""

import itertools

import pytest
import torch

from mnemos.ops import relative_attention
from mnemos.ops.relative_position import distance_scores, seen_keys, sinusoids
from mnemos.ops.relative_position.reference import reference_relative_attention, reference_sinusoid
from mnemos.types import InputError

B, H, D, M = 2, 3, 5, 4


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def given(t: int, n: int, causal: bool = True, width: int = M) -> list[torch.Tensor]:
    """q, k, v, r, u, v as some projection may give them: not contiguous."""
    rows = n if causal else n + t - 1
    q, k, v = numbers(B, H, t, D).transpose(1, 2), numbers(B, H, n, D, seed=1).transpose(1, 2), numbers(B, n, H, width)
    r = numbers(H, rows, D).transpose(0, 1)
    return [x.requires_grad_() for x in (q, k, v, r, numbers(H, D), numbers(H, D, seed=2))]


def expected(q, k, v, r, u, w, *rest):
    """The oracle, which is given the vectors by their distance."""
    n = k.shape[1]
    return reference_relative_attention(q, k, v, {n - 1 - i: row for i, row in enumerate(r)}, u, w, *rest)


def same(sources, *options):
    """Values, with and without gradient, which take different paths; gradients for one from above that is strided."""
    found, wanted = relative_attention(*sources, *options), expected(*sources, *options)
    torch.testing.assert_close(found, wanted)
    upstream = numbers(*reversed(found.shape)).permute(3, 2, 1, 0)
    for a, b in zip(*(torch.autograd.grad(y, sources, upstream) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(relative_attention(*sources, *options), wanted)


def maybe(masked, n):
    return torch.rand(B, n, generator=torch.Generator().manual_seed(4)) < 0.6 if masked else None


@pytest.mark.parametrize(("t", "n"), [(1, 1), (7, 7), (3, 10), (7, 9), (1, 6), (2, 3), (5, 23)])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_equation(t, n, window, masked):
    same(given(t, n), True, maybe(masked, n), window)


@pytest.mark.parametrize(("t", "n"), [(1, 1), (7, 7), (3, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_looks_both_ways(t, n, masked):
    same(given(t, n, causal=False), False, maybe(masked, n))


def test_no_mask_stands_for_all_keys():
    for t, causal, window in ((1, True, None), (1, True, 4), (3, False, None)):
        for mask in (None, torch.ones(B, 4, dtype=torch.bool)):
            assert seen_keys(t, 4, causal, mask, window, "cpu") is None


def test_values_as_wide_as_keys():
    """The width that torch's fused kernel takes as it is."""
    same(given(6, 11, width=D), True)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("t", "n"), [(1, 1), (1, 5), (4, 4), (5, 8), (3, 11)])
def test_the_shift_looks_distances_up(t, n, ahead):
    q, r = numbers(H, B, t, D), numbers(H, n + t - 1 if ahead else n, D)
    found = distance_scores(q, r, n)
    assert found.shape == (H, B, t, n)
    for i, j in itertools.product(range(t), range(n)):
        distance = n - t + i - j
        if distance >= 0 or ahead:
            wanted = torch.stack([q[h, :, i] @ r[h, n - 1 - distance] for h in range(H)])
            torch.testing.assert_close(found[:, :, i, j], wanted)
    assert found.isfinite().all()


def test_more_rows_of_distances_than_needed_change_nothing():
    q, k, v, _, u, w = given(3, 6)
    r = numbers(8, H, D)
    torch.testing.assert_close(
        relative_attention(q, k, v, r, u, w), relative_attention(q, k, v, r[:6], u, w), rtol=0, atol=0
    )


@pytest.mark.parametrize("dim", [6, 7])
@pytest.mark.parametrize("clamp", [0, 3])
def test_sinusoids(dim, clamp):
    table = sinusoids(6, -4, dim, clamp)
    assert table.shape == (11, dim)
    for row, distance in enumerate(range(6, -5, -1)):
        at = max(-clamp, min(clamp, distance)) if clamp else distance
        torch.testing.assert_close(table[row].double(), reference_sinusoid(at, dim), rtol=0, atol=1e-6)


def test_dropout_is_the_same_with_and_without_gradient():
    sources = given(9, 14)
    torch.manual_seed(1)
    y = relative_attention(*sources, dropout=0.5)
    torch.manual_seed(1)
    with torch.no_grad():
        torch.testing.assert_close(relative_attention(*sources, dropout=0.5), y, rtol=0, atol=0)
    assert not torch.allclose(y, relative_attention(*sources))


def test_low_precision_and_empty_calls():
    sources = [x.detach().bfloat16() for x in given(6, 9)]
    wanted = relative_attention(*(x.float() for x in sources))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = relative_attention(*sources)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
            assert relative_attention(*given(0, 4)).shape == (B, 0, H, M)


def test_refuses_what_does_not_fit():
    q, k, v, r, u, w = given(3, 6)
    for arguments, message in (
        ((q[0], k, v, r, u, w), "floating q"),
        ((q, k, v[:, :5], r, u, w), "floating v"),
        ((q, k, v, r[:5], u, w), "r of at least 6 distances, found 5"),
        ((q, k, v, r, u[:2], w), "content_bias"),
        ((q, k, v, r, u, w, True, None, 0), "window of at least 1 position, found 0"),
    ):
        with pytest.raises(InputError, match=message):
            relative_attention(*arguments)
