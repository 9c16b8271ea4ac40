"""The kernels of the delta rule against the equations: every variant that this processor can run."""

import pytest
import torch
from kernel_cases import same_bits_on_any_threads, strange, weights
from native_kernels import needs_kernels

import mnemos
from mnemos.ops.delta import native
from mnemos.ops.delta.reference import reference_delta_rule

pytestmark = needs_kernels
KINDS = ["delta", "head", "channel", "decayed head", "decayed channel"]
# B, T, Hk, H, D, M: chunks have 16 or 32 tokens, 64 are between two states that are kept (of M 130: 128); the backward
# divides the heads of a key head into up to 8 parts.
SHAPES = [
    (2, 37, 1, 3, 5, 4),
    (1, 129, 2, 2, 17, 40),
    (2, 65, 2, 4, 33, 9),
    (1, 300, 1, 2, 3, 130),
    (1, 7, 3, 3, 1, 1),
    (2, 5, 1, 2, 20, 81),
    (1, 1, 2, 4, 7, 65),
    (1, 0, 1, 2, 3, 4),
    (1, 70, 1, 11, 6, 5),
]


def inputs(kind, b, t, shared, h, d, m, dtype=torch.float32, seed=0, weakest=-6):
    """A dictionary of leaves of any strides; decays from −10 to −10^weakest, 0, −120 and −∞; β from 0 to 1 and both."""
    g = torch.Generator().manual_seed(seed)
    given = {"q": strange((b, t, shared, d), g), "k": strange((b, t, shared, d), g), "v": strange((b, t, h, m), g)}
    given["k"] = given["k"] / given["k"].norm(dim=-1, keepdim=True).clamp_min(0.1)
    given = {name: x.to(dtype) for name, x in given.items()}
    if "decayed" not in kind:
        beta = torch.rand(h, t, b, generator=g).permute(2, 1, 0)
        given["beta"] = (beta * 1.4 - 0.2).clamp(0, 1)
    if kind != "delta":
        shape = (d, b, t, h) if "channel" in kind else (b, t, h)
        decay = -(10 ** (torch.rand(shape, generator=g) * (1 - weakest) + weakest))
        kinds = torch.rand(shape, generator=g)
        for least, value in ((0.9, 0.0), (0.95, -120.0), (0.98, -torch.inf)):
            decay[kinds > least] = value
        given["decay"] = decay.permute(1, 2, 3, 0) if "channel" in kind else decay
    given["state"] = torch.randn(b, h, m, d, generator=g).mT
    return {name: x.detach().requires_grad_() for name, x in given.items()}


def outputs_and_gradients(call, given):
    found = call(given)
    return *found, *torch.autograd.grad(found, list(given.values()), weights(found), materialize_grads=True)


def by_kernels(given):
    call = mnemos.ops.delta_rule if "beta" in given else mnemos.ops.decayed_attention
    return call(**given, backend="native")


def by_equations(given):
    return reference_delta_rule(**{"beta": None, **given})


def agrees(given, tolerance, found=None):
    """Relative to the largest of each, and finite: y, the state and the gradients."""
    found = outputs_and_gradients(by_kernels, given) if found is None else found
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    expected = outputs_and_gradients(by_equations, exact)
    for name, a, b in zip(("y", "end", *given), found, expected, strict=True):
        if name == "decay":
            b = torch.where(given["decay"] == -torch.inf, 0, b)  # autograd's 0·∞
        assert a.shape == b.shape, name
        assert a.isfinite().all(), name
        size = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(
            a.double(), b, rtol=0, atol=tolerance * max(1.0, size), msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_equations(shape, kind, variant, poisoned):
    agrees(inputs(kind, *shape), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kind, threads):
    given = inputs(kind, 2, 200, 2, 4, 24, 40)
    same_bits_on_any_threads(threads, lambda: outputs_and_gradients(by_kernels, given))


@pytest.mark.parametrize("kind", ["head", "decayed channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_inputs_and_outputs_alone(kind, dtype, variant):
    """The sums over 129 tokens and over three heads are float32: a result is rounded once."""
    given = inputs(kind, 1, 129, 1, 3, 20, 33, dtype)
    given["state"] = given["state"].detach().float().requires_grad_()
    found = outputs_and_gradients(by_kernels, given)
    types = [given["v"].dtype, torch.float32, *(x.dtype for x in given.values())]
    assert [x.dtype for x in found] == types
    agrees(given, torch.finfo(dtype).eps, found)


def test_the_gradient_of_a_strong_decay_keeps_its_digits(variant):
    """What passes a decay of e^-30 is 1e-13 of what does not: a difference of sums would be rounding errors alone."""
    for kind in ("head", "channel", "decayed head", "decayed channel"):
        given = inputs(kind, 1, 100, 1, 2, 16, 16)
        at = [3, 31, 40, 64, 90]
        decay = torch.full_like(given["decay"], -0.01)
        decay[:, at] = -30
        given["decay"] = decay.detach().requires_grad_()
        (_, _, *found) = outputs_and_gradients(by_kernels, given)
        exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
        (_, _, *expected) = outputs_and_gradients(by_equations, exact)
        place = list(given).index("decay")
        a, b = found[place][:, at].double(), expected[place][:, at]
        size = b.abs().mean()
        assert size < 1e-10
        assert (a - b).abs().max() < 1e-4 * size


@pytest.mark.parametrize("kind", ["head", "decayed channel"])
def test_the_operators_are_registered_as_pytorch_wants_them(kind):
    given = inputs(kind, 1, 66, 1, 2, 5, 6)
    tensors = [given.get(name) for name in ("q", "k", "v", "beta", "decay", "state")]
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.mnemos.delta_rule, (*tensors, 0.5, True), test_utils=checks)
    eager = native.recurrence(*tensors, 0.5)
    found = torch.ops.mnemos.delta_rule(*tensors, 0.5, True)[:2]
    leaves = list(given.values())
    both = (torch.autograd.grad(outputs, leaves, weights(outputs)) for outputs in (found, eager))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)
