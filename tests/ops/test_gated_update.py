"""The update's backward by hand against autograd through the equations written slot by slot."""

import pytest
import torch
from kernel_cases import kept_bytes

from mnemos.ops.gated_cache import gated_update, nearest_tokens
from mnemos.ops.gated_cache.reference import reference_resample, reference_update

NAMES = ("W_u", "b_u", "W_r", "b_r", "W_c", "b_c", "gain", "shift")


def parts(d: int, candidate: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(d, 2 * d), (d,)] * 3 + [(d,), (d,)] * (candidate == "layernorm_gelu")
    names = NAMES if candidate == "layernorm_gelu" else NAMES[:6]
    return {
        name: torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for name, shape in zip(names, shapes, strict=True)
    }


def fast(source, cache, weights, takes=None):
    w = list(weights.values())
    norm = (w[6], w[7]) if len(w) == 8 else None
    return gated_update(source, cache, (w[0], w[1]), (w[2], w[3]), (w[4], w[5]), norm, takes)[0]


def slow(source, cache, weights, length, candidate):
    rows = [
        reference_update(reference_resample(s, length), c, weights, candidate)
        for s, c in zip(source, cache.expand(len(source), *cache.shape[-2:]), strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("candidate", ["linear", "layernorm_gelu"])
@pytest.mark.parametrize("each", [False, True], ids=["shared", "a row"])
@pytest.mark.parametrize(("tokens", "length"), [(5, 5), (7, 3), (3, 5), (1, 4), (4, 1)])
def test_values_and_gradients_equal_the_equations(candidate, each, tokens, length):
    d, rows = 5, 3
    weights = parts(d, candidate)
    wide = torch.randn(rows, tokens, d + 2, dtype=torch.float64, requires_grad=True)
    source = wide[..., :d]  # rows stand apart, as the first channels of a host's do
    cache = torch.randn(*((rows,) if each else ()), length, d, dtype=torch.float64, requires_grad=True)
    found = fast(source, cache, weights, None if tokens == length else nearest_tokens(tokens, length))
    expected = slow(source, cache, weights, length, candidate)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    inputs = (wide, cache, *weights.values())
    for a, b in zip(*(torch.autograd.grad(y.sin().sum(), inputs) for y in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("candidate", ["linear", "layernorm_gelu"])
def test_a_gradient_can_be_differentiated(candidate):
    weights = parts(3, candidate)
    source = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    cache = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def call(source, cache, *rest):
        return fast(source, cache, dict(zip(weights, rest, strict=True)), nearest_tokens(4, 3))

    assert torch.autograd.gradgradcheck(call, (source, cache, *weights.values()), fast_mode=True)


def test_it_keeps_nothing_of_its_own():
    weights = parts(4, "layernorm_gelu")
    source, cache = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, 4).double()
    assert not kept_bytes(lambda: fast(source, cache, weights), source, cache, *weights.values())


def test_float16_sources_get_gradients_of_their_own_type():
    weights = {name: w.detach().float().requires_grad_() for name, w in parts(4, "linear").items()}
    source = torch.randn(2, 5, 4).half().requires_grad_()
    fast(source, torch.randn(3, 4), weights, nearest_tokens(5, 3)).sum().backward()
    assert source.grad is not None
    assert source.grad.dtype == torch.float16


def test_autocast_changes_nothing():
    """Around the update, its backward, or both; also a backward that is to be differentiated."""
    weights = {name: w.detach().float().requires_grad_() for name, w in parts(4, "layernorm_gelu").items()}
    source, cache = torch.randn(2, 3, 4, requires_grad=True), torch.randn(3, 4)
    given = source, *weights.values()
    expected = fast(source, cache, weights)
    gradients = torch.autograd.grad(expected.sin().sum(), given, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        within = fast(source, cache, weights)
        first, second = (torch.autograd.grad(y.sin().sum(), given, retain_graph=True) for y in (expected, within))
        third = torch.autograd.grad(within.sin().sum(), given, create_graph=True)
    assert torch.equal(within, expected)
    assert all(map(torch.equal, first, gradients))
    assert all(map(torch.equal, second, gradients))
    for a, b in zip(third, gradients, strict=True):
        torch.testing.assert_close(a, b)


def walk(weights, source, cache, steps=3):
    for _ in range(steps):
        cache = fast(source, cache, weights)
    return cache.sin().sum()


@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_to_be_differentiated_counts_each_update_once(tied):
    """What is given may be made of what is given: an earlier update of the same weights, one weight twice."""
    weights = parts(3, "layernorm_gelu")
    if tied:
        weights |= {"W_r": weights["W_u"], "b_r": weights["b_u"]}
    source, cache = torch.randn(2, 4, 3).double().requires_grad_(), torch.randn(4, 3).double()
    inputs = [source, *dict.fromkeys(weights.values())]
    once = torch.autograd.grad(walk(weights, source, cache), inputs)
    again = torch.autograd.grad(walk(weights, source, cache), inputs, create_graph=True)
    for a, b in zip(again, once, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("candidate", ["linear", "layernorm_gelu"])
def test_gradients_of_a_sample_by_vmap(candidate):
    weights = {name: w.detach() for name, w in parts(4, candidate).items()}
    source, cache = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    of_sample = torch.func.grad(lambda weights, sample: fast(sample[None], cache, weights).sin().sum())
    found = torch.vmap(of_sample, in_dims=(None, 0))(weights, source)
    for i, sample in enumerate(source):
        for name, gradient in of_sample(weights, sample).items():
            torch.testing.assert_close(found[name][i], gradient)


@pytest.mark.parametrize("candidate", ["linear", "layernorm_gelu"])
def test_transformations_of_functions(candidate):
    weights = {name: w.detach() for name, w in parts(3, candidate).items()}
    source, cache = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)

    def loss(x):
        return walk(weights, x, cache)

    x = source.clone().requires_grad_()
    expected = torch.autograd.grad(loss(x), x)[0]
    torch.testing.assert_close(torch.func.jacrev(loss)(source), expected)
    torch.testing.assert_close(torch.func.jacfwd(loss)(source), expected)
    second = torch.func.hessian(loss)(source)
    torch.testing.assert_close(second, second.permute(3, 4, 5, 0, 1, 2))
    y = fast(x, cache, weights)
    each = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
    found = torch.autograd.grad(y, x, each, is_grads_batched=True, retain_graph=True)[0]
    torch.testing.assert_close(found[4], torch.autograd.grad(y, x, each[4])[0])
