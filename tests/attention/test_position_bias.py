"""Relative positions: buckets against T5's own arithmetic, and before told from behind."""

import math

import pytest
import torch

from mnemos.attention import CrossAttention, PositionBias
from mnemos.attention.relative import bucket
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.types import InputError


def published(relative: int, both: bool, n: int, far: int) -> int:
    """T5's bucket of key − query, as its paper's code has it."""
    found = 0
    relative = -relative
    if both:
        n //= 2
        found += (relative < 0) * n
        relative = abs(relative)
    else:
        relative = max(relative, 0)
    exact = n // 2
    if relative < exact:
        return found + relative
    return found + min(exact + int(math.log(relative / exact) / math.log(far / exact) * (n - exact)), n - 1)


@pytest.mark.parametrize(("both", "n", "far"), [(True, 32, 128), (False, 32, 128), (True, 6, 9), (False, 5, 30)])
def test_buckets_are_t5s(both, n, far):
    layer = PositionBias(2, n, far, both).double()
    with torch.no_grad():
        layer.bias.copy_(torch.arange(2 * n).view(n, 2))
    distance = torch.arange(-2 * far, 2 * far + 1)
    found = layer(distance[None])[0, 0] / 2
    assert found.tolist() == [published(d, both, n, far) for d in distance.tolist()]
    assert bucket(far, n, far) == n - 1


@pytest.mark.parametrize(
    ("both", "n", "far", "words"),
    [
        (True, 7, 128, "expected at least 4 buckets, an even number, and"),
        (True, 2, 128, "expected at least 4 buckets, an even number, and"),
        (False, 1, 128, "expected at least 2 buckets and"),
        (False, 32, 16, "max_distance above 16, found 32 buckets and max_distance 16"),
    ],
)
def test_too_few_buckets_or_too_near_are_refused(both, n, far, words):
    with pytest.raises(InputError, match=words):
        PositionBias(2, n, far, both)


@pytest.mark.parametrize("both", [False, True])
def test_it_starts_with_heads_that_look_near_and_one_that_looks_everywhere(both):
    layer = PositionBias(3, 32, 128, both)
    away = torch.arange(128 if both else 1)  # keys behind the query count where both directions do
    distance = torch.cat([-torch.arange(128).flip(0), away])
    bias = layer(distance[None])[:, 0]
    wanted = -torch.tensor([4.0, 2.0, 0.0])[:, None] * distance.abs().log1p()
    near = distance.abs() < (8 if both else 16)  # buckets of their own
    torch.testing.assert_close(bias[:, near], wanted[:, near])
    assert (bias >= wanted - 1e-5).all()  # a shared bucket has the bias of its nearest distance
    assert (bias[:2, distance == -127] < -8).all()
    assert not bias[2].any()


def test_short_calls_without_gradient_add_the_bias_too():
    """They are plain products, not the fused kernel. What the kernel says is in Memformer's equations."""
    torch.manual_seed(0)
    layer, positions = SoftmaxAttention(6, 2, causal=True).double(), PositionBias(2, 6, 9).double()
    torch.nn.init.normal_(positions.bias)
    x, place = torch.randn(2, 20, 6, dtype=torch.float64), torch.arange(20)
    bias = positions(place - place[:, None])[None]
    with torch.no_grad():
        plain = layer(x, None, None, bias)[0]
    torch.testing.assert_close(plain, layer(x, None, None, bias)[0])
    with pytest.raises(InputError, match=r"\[B, T, 6\]"):
        CrossAttention(6, 3).keys_values(torch.randn(2, 5, 3))
