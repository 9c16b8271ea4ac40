"""Dropout by 16-bit numbers: its zeros, mean and gradient, and attention that uses it."""

import pytest
import torch
from torch.nn import functional as F

from mnemos.attention.softmax import attend
from mnemos.ops.dropout import Dropout, dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_elements_are_zero_or_divided_by_what_is_kept_and_gradients_follow(dtype):
    torch.manual_seed(0)
    x = torch.randn(7, 333, dtype=dtype).requires_grad_()
    y = dropout(x, 0.3)
    kept = y != 0
    scale = 1 / (1 - round(0.3 * 2**16) / 2**16)
    assert y.dtype == dtype
    torch.testing.assert_close(y[kept], x[kept] * torch.tensor(scale, dtype=dtype))
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept.to(dtype) * torch.tensor(scale, dtype=dtype))


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_the_share_of_zeros_is_p_at_each_place_of_a_draw_and_neighbours_are_independent(p):
    torch.manual_seed(1)
    n = 400_000
    zeros = (dropout(torch.ones(4 * n), p) == 0).double().view(n, 4)
    error = (p * (1 - p) / n) ** 0.5  # the standard deviation of a share
    assert (zeros.mean(0) - p).abs().max() < 5 * error
    between = torch.corrcoef(zeros.T) - torch.eye(4, dtype=torch.float64)
    assert between.abs().max() < 5 / n**0.5


def test_the_seed_decides_and_the_next_call_differs():
    x = torch.ones(1001)
    torch.manual_seed(2)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(2)
    assert torch.equal(dropout(x, 0.5), first)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_in_evaluation_or_at_0_and_everything_at_1():
    x = torch.randn(33)
    layer = Dropout(0.5).eval()
    assert torch.equal(layer(x), x)
    assert torch.equal(dropout(x, 0.0), x)
    assert not dropout(x, 1.0).any()
    assert dropout(x[:0], 0.5).shape == (0,)


def test_a_function_transform_uses_its_own_random_numbers():
    with pytest.raises(RuntimeError, match="randomness"):  # vmap's default refuses what is random
        torch.func.vmap(lambda x: dropout(x, 0.5))(torch.ones(3, 4))


@pytest.mark.parametrize("form", ["causal", "keys", "bias"])
def test_attention_with_dropout_is_its_equation_with_the_same_zeros(form):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 9, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    visible = {"causal": None, "keys": torch.rand(2, 1, 1, 9) < 0.7, "bias": torch.randn(1, 3, 9, 9).double()}[form]
    scores = torch.einsum("bthd,bnhd->bhtn", q, k) / 5**0.5
    seen = torch.ones(9, 9).tril().bool() if form == "causal" else visible
    scores = scores + seen if form == "bias" else scores.masked_fill(~seen, -torch.inf)
    torch.manual_seed(4)
    expected = torch.einsum("bhtn,bnhd->bthd", dropout(F.softmax(scores, -1), 0.4), v)
    torch.manual_seed(4)
    found = attend(q, k, v, visible, form == "causal", 0.4)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(y, (q, k, v), weights) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("form", [torch.bool, torch.float32])
def test_a_query_that_sees_no_key_reads_nothing(form):
    """As in the fused kernels, which other devices have: with dropout, and in short rows without gradient."""
    q = torch.randn(2, 16, 3, 5, requires_grad=True)
    visible = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    visible[0, :, 7] = False
    if form == torch.float32:
        visible = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf).requires_grad_()
    with torch.no_grad():
        short = attend(q, q, q, visible, False)
    torch.testing.assert_close(short, attend(q, q, q, visible, False).detach())
    found = attend(q, q, q, visible, False, 0.5)
    assert not found[0, 7].any()
    found.sum().backward()
    assert q.grad.isfinite().all()
    assert form == torch.bool or visible.grad.isfinite().all()
