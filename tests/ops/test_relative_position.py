"""Relative attention: its distances, dropout, precisions, errors. Its equations: test_operators_at_random.py."""

import pytest
import torch

from mnemos.ops import relative_attention
from mnemos.ops.relative_position import seen_keys, sinusoids
from mnemos.ops.relative_position.reference import reference_sinusoid
from mnemos.types import InputError

B, H, D, M = 2, 3, 5, 4


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def given(t, n):
    """q, k, v, r, u, v."""
    found = numbers(B, t, H, D), numbers(B, n, H, D, seed=1), numbers(B, n, H, M), numbers(n, H, D)
    return [x.requires_grad_() for x in (*found, numbers(H, D), numbers(H, D, seed=2))]


def test_no_mask_stands_for_all_keys():
    for t, causal, window in ((1, True, None), (1, True, 4), (3, False, None)):
        for mask in (None, torch.ones(B, 4, dtype=torch.bool)):
            assert seen_keys(t, 4, causal, mask, window, "cpu") is None


@pytest.mark.parametrize("t", [1, 3])
def test_more_rows_of_distances_than_needed_change_nothing(t):
    q, k, v, _, u, w = given(t, 6)
    r = numbers(8, H, D)
    torch.testing.assert_close(relative_attention(q, k, v, r, u, w), relative_attention(q, k, v, r[:6], u, w))


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
    wide = [x.float() for x in sources]
    wanted = relative_attention(*wide)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            found = relative_attention(*sources)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
            torch.testing.assert_close(relative_attention(*sources[:3], *wide[3:]), wanted)  # scores are float32
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
