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


def test_before_and_behind_are_told_apart_in_both_directions():
    layer = PositionBias(1, 8, 20, both=True)
    torch.nn.init.normal_(layer.bias)
    place = torch.arange(12)
    bias = layer(place - place[:, None])[0]  # [query, key]
    assert bias[5, 3] == bias[7, 5] == layer(torch.tensor([[-2]]))[0]  # the key stands two before
    assert bias[3, 5] == bias[5, 7] == layer(torch.tensor([[2]]))[0]
    assert bias[5, 3] != bias[3, 5]
    bias[5, 3].backward()
    assert layer.bias.grad.nonzero().tolist() == [[2, 0]], "distance −2 has a bucket of its own, in the first half"


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


def test_softmax_attention_with_a_bias_is_the_formula_whole_and_split():
    torch.manual_seed(0)
    layer = SoftmaxAttention(6, 2, causal=True).double()
    positions = PositionBias(2, 6, 9).double()
    torch.nn.init.normal_(positions.bias)
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    place = torch.arange(7)
    bias = positions(place - place[:, None])[None]
    whole, _ = layer(x, None, None, bias)
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 3)).unbind(2)
    scores = torch.einsum("bthd,bnhd->bhtn", q, k) / math.sqrt(3) + bias
    scores = scores.masked_fill(place > place[:, None], -torch.inf)
    wanted = torch.einsum("bhtn,bnhd->bthd", scores.softmax(-1), v).flatten(2)
    torch.testing.assert_close(whole, layer.output(wanted))
    first, state = layer(x[:, :3], None, None, bias[..., :3, :3])
    rest, _ = layer(x[:, 3:], state, None, bias[..., 3:, :])
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)
    with torch.no_grad():  # the plain products that short sequences take without gradient
        long = torch.randn(2, 20, 6, dtype=torch.float64)
        place = torch.arange(20)
        bias = positions(place - place[:, None])[None]
        plain = layer(long, None, None, bias)[0]
    torch.testing.assert_close(plain, layer(long, None, None, bias)[0])


def test_cross_attention_is_the_formula():
    torch.manual_seed(0)
    layer = CrossAttention(6, 3).double()
    x, source = torch.randn(2, 4, 6, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
    keys = layer.keys_values(source)
    q, (k, v) = layer.query(x).unflatten(-1, (3, 2)), keys
    scores = torch.einsum("bthd,bnhd->bhtn", q, k) / math.sqrt(2)
    visible = torch.rand(2, 1, 4, 5) > 0.3
    visible[..., 0] = True
    for seen in (None, visible, torch.where(visible, 0.5, -torch.inf).double()):
        shown = scores if seen is None else scores.masked_fill(~visible, -torch.inf)
        wanted = torch.einsum("bhtn,bnhd->bthd", shown.softmax(-1), v).flatten(2)
        torch.testing.assert_close(layer(x, keys, seen), layer.output(wanted))
    with pytest.raises(InputError, match=r"\[B, T, 6\]"):
        layer.keys_values(source[..., :3])
