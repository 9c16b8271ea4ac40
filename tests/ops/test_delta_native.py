"""The kernels of the delta rule against the equations: every variant that this processor can run."""

import pytest
import torch
from delta_cases import KINDS, equations, inputs, run
from kernel_cases import close, exactly, results, same_bits_on_any_threads, weights
from native_kernels import needs_kernels

pytestmark = needs_kernels
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


def hostile(kind, b, t, shared, h, d, m, dtype=torch.float32):
    """q, k, v of that type; decays from −10 to −1e-6, 0, −120 and −∞; β from 0 to 1 and both; keys of length 1."""
    given = inputs(kind, t, torch.float32, b, shared, h, d, m)
    g = torch.Generator().manual_seed(1)
    given["k"].data.div_(given["k"].detach().norm(dim=-1, keepdim=True).clamp_min(0.1))
    if "beta" in given:
        given["beta"].data.mul_(1.4).sub_(0.2).clamp_(0, 1)
    if "decay" in given:
        decay = given["decay"].data
        decay.copy_(-(10 ** (7 * torch.rand(decay.shape, generator=g) - 6)))
        kinds = torch.rand(decay.shape, generator=g)
        for least, value in ((0.9, 0.0), (0.95, -120.0), (0.98, -torch.inf)):
            decay[kinds > least] = value
    return given | {name: given[name].detach().to(dtype).requires_grad_() for name in ("q", "k", "v")}


def agrees(given, tolerance):
    """As `agree`, but that a decay of −∞ has the gradient 0, and not autograd's 0·∞."""
    found = results(run, given, backend="native")
    expected = results(equations, exactly(given), weights(found[:2]))
    if "decay" in given:
        at = 2 + list(given).index("decay")
        expected[at] = torch.where(given["decay"] == -torch.inf, 0, expected[at])
    close(found, expected, given, tolerance)
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_equations(shape, kind, variant, poisoned):
    agrees(hostile(kind, *shape), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_bits(kind, threads):
    given = hostile(kind, 2, 200, 2, 4, 24, 40)
    same_bits_on_any_threads(threads, lambda: results(run, given, backend="native"))


@pytest.mark.parametrize("kind", ["gated delta", "decayed per channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_that_of_inputs_and_outputs_alone(kind, dtype, variant):
    """The sums over 129 tokens and over three heads are float32: a result is rounded once."""
    given = hostile(kind, 1, 129, 1, 3, 20, 33, dtype)
    found = agrees(given, torch.finfo(dtype).eps)
    assert [x.dtype for x in found] == [dtype, torch.float32, *(x.dtype for x in given.values())]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_gradient_of_a_strong_decay_keeps_its_digits(kind, variant):
    """What passes a decay of e^-30 is 1e-13 of what does not: a difference of sums would be rounding errors alone."""
    given = hostile(kind, 1, 100, 1, 2, 16, 16)
    strong = [3, 31, 40, 64, 90]
    given["decay"].data.fill_(-0.01)[:, strong] = -30
    found, expected = results(run, given, backend="native"), results(equations, exactly(given))
    at = 2 + list(given).index("decay")
    a, b = found[at][:, strong].double(), expected[at][:, strong]
    size = b.abs().mean()
    assert size < 1e-10
    assert (a - b).abs().max() < 1e-4 * size
