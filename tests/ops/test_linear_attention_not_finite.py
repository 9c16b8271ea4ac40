"""Numbers that are not finite: they reach no earlier token, and nothing at all where the mask hides them."""

import functools

import pytest
import torch
from linear_attention_cases import HERE

from mnemos.ops import linear_attention
from mnemos.ops.linear.feature_maps import Pointwise, favor, random_projection

MAPS = {
    "elu": "elu",
    "polynomial": "polynomial",
    "favor": functools.partial(favor, projection=random_projection(6, 4)),
    "exponential": torch.exp,
    "root": torch.sqrt,
    "pointwise": Pointwise("exponential", torch.exp, lambda phi: phi),
}


@pytest.mark.parametrize("backend", [*HERE, "reference"])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("t", "causal"), [(1, True), (9, True), (9, False)])
def test_a_masked_token_reaches_nothing(backend, name, t, causal):
    """NaN, infinity, or a number whose exponential overflows: outputs and gradients are those of a zero there."""
    g = torch.Generator().manual_seed(0)
    given = [torch.rand(2, t, 1, 4, generator=g) + 0.1 for _ in range(3)]
    state = [torch.rand(2, 1, n, *rest, generator=g) for rest in ((4,), ()) for n in [_width(name)]]
    mask = torch.ones(2, t, dtype=torch.bool)
    mask[0, t // 2] = False
    found = []
    for hidden in (0.0, torch.nan, torch.inf, 1e30):
        q, k, v = (x.clone() for x in given)
        k[0, t // 2], v[0, t // 2] = hidden, hidden
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y, after = linear_attention(*leaves, causal, MAPS[name], tuple(state), mask, backend=backend)
        found.append([y, *after, *torch.autograd.grad(y.sum() + after[0].sum(), leaves)])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert a.isfinite().all()
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not found[0][4][0, t // 2].any()  # dk of the masked key


def _width(name: str) -> int:
    return {"polynomial": 10, "favor": 6}.get(name, 4)


@pytest.mark.parametrize("backend", [*HERE, "reference"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nothing_travels_back_in_time(backend, which, value):
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 40, 2, 4, generator=g) for _ in range(3)]
    clean, _ = linear_attention(*given, backend=backend)
    given[which][0, 21, 0, 1] = value
    y, state = linear_attention(*given, backend=backend)
    torch.testing.assert_close(y[:, :21], clean[:, :21])
    torch.testing.assert_close(y[:, :, 1], clean[:, :, 1])
    assert not y[0, 21, 0].isfinite().all()
    if which:
        assert not y[0, 39, 0].isfinite().all()
        assert not state[0][0, 0].isfinite().all()
    else:
        torch.testing.assert_close(y[:, 22:], clean[:, 22:])
