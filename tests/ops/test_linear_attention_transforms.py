"""Linear attention under `torch.func` and forward-mode AD, and of tensors whose memory does not hold their values."""

import itertools

import pytest
import torch
from linear_attention_cases import HERE, holes
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vjp, vmap

from mnemos.ops import linear_attention
from mnemos.ops.linear.reference import reference_linear_attention


def drawn(seed, t=40):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, t, 2, 5, generator=g) for _ in range(3)]


def loss_of(backend, t=40, **options):
    mask = holes(t)

    def loss(q, k, v):
        y, state = linear_attention(q, k, v, backend=backend, mask=mask, eps=0.1, **options)
        return y.square().sum() + state.s.sin().sum()

    return loss


def expected(given, **options):
    exact = [x.double().requires_grad_() for x in given]
    return torch.autograd.grad(loss_of("chunked", given[0].shape[1], **options)(*exact), exact)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("t", [1, 40])
def test_transforms_have_the_derivatives_of_the_equations(backend, t):
    given = drawn(0, t)
    for phi in ("elu", torch.sigmoid):
        loss = loss_of(backend, t, feature_map=phi)
        rows = vmap(grad(loss, (0, 1, 2)))(*(torch.stack([x, -x]) for x in given))
        ways = (grad(loss, (0, 1, 2))(*given), vjp(loss, *given)[1](torch.tensor(1.0)), [x[0] for x in rows])
        for found in ways:
            for a, b in zip(found, expected(given, feature_map=phi), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_forward_mode_has_the_derivatives_of_the_equations():
    """One test for all backends, because PyTorch imports for seconds when it first differentiates forwards."""
    for backend, t in itertools.product(HERE, (1, 40)):
        given, tangents, loss = drawn(0, t), drawn(1, t), loss_of(backend, t)
        slope = sum((a * b).sum() for a, b in zip(expected(given), tangents, strict=True))
        torch.testing.assert_close(jvp(loss, tuple(given), tuple(tangents))[1].double(), slope, rtol=1e-4, atol=1e-4)
        with forward_ad.dual_level():
            dual = loss(*map(forward_ad.make_dual, given, tangents))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent.double(), slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", HERE)
def test_transforms_have_second_derivatives(backend):
    q, k, v = (x[:, :3, :1, :2].double() for x in drawn(0))

    def loss(q, backend=backend):
        return linear_attention(q, k, v, backend=backend)[0].square().sum()

    x = q.clone().requires_grad_()
    wanted = torch.autograd.functional.hessian(lambda q: reference_linear_attention(q, k, v)[0].square().sum(), x)
    torch.testing.assert_close(hessian(lambda q: loss(q, "auto"))(q), wanted)


@pytest.mark.parametrize("backend", HERE)
def test_a_gradient_that_is_batched(backend):
    q, k, v = drawn(0)
    several = torch.randn(3, 2, 40, 2, 5)
    found = vmap(vjp(lambda q: linear_attention(q, k, v, backend=backend)[0], q)[1])(several)[0]
    x = q.clone().requires_grad_()
    y, _ = linear_attention(x, k, v, backend=backend)
    for i in range(3):
        wanted = torch.autograd.grad(y, x, several[i], retain_graph=True)[0]
        torch.testing.assert_close(found[i], wanted, rtol=1e-4, atol=1e-4)


class Named(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("backend", HERE)
def test_tensors_whose_memory_does_not_hold_their_values(backend):
    def run(q, k, v, g):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y, state = linear_attention(*leaves, backend=backend)
        return [y, *state, *torch.autograd.grad(y, leaves, g)]

    given = [*drawn(0), torch.randn(2, 40, 2, 5)]
    kinds = {
        "negative": (lambda x: torch._neg_view(x), lambda x: -x),
        "zero": (lambda x: torch._efficientzerotensor(x.shape), torch.zeros_like),
        "subclass": (lambda x: x.as_subclass(Named), lambda x: x),
    }
    for name, (strange, plain) in kinds.items():
        for i in range(4):
            inputs = [[x.detach().clone() for x in given] for _ in range(2)]
            inputs[0][i], inputs[1][i] = strange(inputs[0][i]), plain(inputs[1][i])
            for a, b in zip(run(*inputs[0]), run(*inputs[1]), strict=True):
                torch.testing.assert_close(torch.as_tensor(a), b, msg=lambda m, at=(name, i): f"{at}: {m}")
