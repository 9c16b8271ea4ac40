"""The kernels of the short convolution: every variant of this processor, long rows, threads, and the operators."""

import pytest
import torch
from native_kernels import needs_kernels, words
from test_short_convolution import agrees, inputs, results

import mnemos
from mnemos.ops import short_convolution
from mnemos.ops.convolution import native

pytestmark = needs_kernels


def marks(b, t, share, seed=4):
    drawn = torch.rand(t, b, generator=torch.Generator().manual_seed(seed)).T
    return drawn < share


# T, C, W: 8 positions are computed at once, 64 in a part of the backward, 512 in a unit; 512 channels are a group.
SHAPES = [(1, 515, 4), (70, 17, 4), (530, 40, 3), (1100, 3, 4), (67, 530, 2), (140, 20, 7), (9, 5, 1)]


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("folded", ["nothing", "mask", "resets", "rare resets", "mask and resets"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_equals_the_equation(activation, folded, shape, variant, poisoned):
    t = shape[0]
    options = {"mask": marks(3, t, 0.8)} if "mask" in folded else {}
    if "resets" in folded:
        options["resets"] = marks(3, t, 0.01 if "rare" in folded else 0.2, seed=5)
    agrees(inputs(*shape, torch.float32), "native", 2e-6, activation=activation, **options)


@pytest.mark.parametrize("w", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_stays_in_its_window(bad, w, variant):
    """Values and dx: the kernels are compiled for W = 4 and 8, and the taps before the window must not multiply it."""
    given = inputs(30, 19, w, torch.float32)
    del given["state"]
    given["x"].data[1, 14, 2] = bad
    y, _ = short_convolution(**given, backend="native")
    above = torch.ones_like(y)
    (clean,) = torch.autograd.grad(y, given["x"], above, retain_graph=True)
    above[0, 12, 17] = bad
    (dx,) = torch.autograd.grad(y, given["x"], above)
    hit = torch.zeros(2, *y.shape, dtype=torch.bool)
    hit[0, 1, 14 : 14 + w, 2] = True
    hit[1, 0, 13 - w : 13, 17] = True
    assert torch.equal(~y.isfinite(), hit[0])
    assert torch.equal(~dx.isfinite(), hit[1])
    assert torch.equal(dx[~hit[1]], clean[~hit[1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, variant):
    agrees(inputs(70, 37, 4, dtype), "native", torch.finfo(dtype).eps, mask=marks(3, 70, 0.8), activation="silu")


def test_any_number_of_threads_gives_the_same_bits(threads):
    given, options = inputs(1100, 530, 4, torch.float32), {"mask": marks(3, 1100, 0.9), "activation": "silu"}
    threads(1)
    one = results(short_convolution, given, **options)
    threads(3)
    assert all(torch.equal(a, b) for a, b in zip(one, results(short_convolution, given, **options), strict=True))


def test_only_the_inputs_are_kept():
    given, kept = inputs(40, 6, 4, torch.float32), set()

    def pack(x):
        kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        short_convolution(**given, activation="silu", backend="native")
    assert kept == {x.untyped_storage().data_ptr() for x in given.values()}


def test_the_operators_are_registered_as_pytorch_wants_them():
    given, mask = inputs(20, 6, 4, torch.float32), marks(3, 20, 0.8)
    tensors = *given.values(), mask, None
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.mnemos.short_convolution, (*tensors, True), test_utils=checks)

    def operator(x, weight, bias, state):
        return torch.ops.mnemos.short_convolution(x, weight, bias, state, mask, None, True)

    both = results(operator, given), results(short_convolution, given, mask=mask, activation="silu", backend="native")
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_a_second_derivative_is_refused():
    given = inputs(9, 5, 4, torch.float32)
    y, _ = short_convolution(**given, backend="native")
    (dx,) = torch.autograd.grad(y.square().sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


def test_the_call_has_the_words_of_the_header():
    assert words("convolution.h", "Convolution") * 8 == native.CALL.size
    assert mnemos.ops.which("short_convolution", torch.zeros(1, 1, 2), torch.zeros(2, 9)) == "chunked"
