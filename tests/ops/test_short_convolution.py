"""The short convolution is its equation: padding, resets, derivatives; every backend and variant."""

import pytest
import torch
from kernel_cases import FOLDED, agree, folds, holes, kept_bytes, results, same_bits_on_any_threads, starts
from native_kernels import needs_kernels

import mnemos
from mnemos.ops import short_convolution
from mnemos.ops.convolution import BACKENDS
from mnemos.ops.convolution.reference import reference_short_convolution
from mnemos.types import InputError

HERE = mnemos.ops.backends("short_convolution")
EXACT = [name for name in HERE if BACKENDS.by_name[name].takes(*torch.zeros(2, 1, 2, 2).double())]
B = 3
SHAPES = [(37, 5, 4), (1, 3, 4), (2, 70, 4), (0, 4, 3), (9, 33, 8), (5, 1, 2), (6, 17, 3)]


def inputs(t, c, w, dtype=torch.float64):
    """A dictionary of leaves, none contiguous."""
    g = torch.Generator().manual_seed(0)
    given = {
        "x": torch.randn(c, B, 2 * t, generator=g, dtype=torch.float64)[..., ::2].permute(1, 2, 0),
        "weight": torch.randn(w, c, generator=g, dtype=torch.float64).T,
        "bias": torch.randn(2 * c, generator=g, dtype=torch.float64)[::2],
        "state": torch.randn(B, c, w - 1, generator=g, dtype=torch.float64).mT,
    }
    return {name: x.to(dtype).detach().requires_grad_() for name, x in given.items()}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("folded", FOLDED)
@pytest.mark.parametrize("absent", [(), ("bias", "state")], ids="+".join)
def test_equals_the_equation(absent, folded, shape, activation, backend, poisoned):
    dtype, tolerance = (torch.float64, 1e-12) if backend in EXACT else (torch.float32, 2e-6)
    given = {name: x for name, x in inputs(*shape, dtype).items() if name not in absent}
    options = {"backend": backend, "activation": activation, **folds(folded, B, shape[0], empty_row=True)}
    agree(short_convolution, reference_short_convolution, given, tolerance, **options)


@pytest.mark.parametrize("backend", HERE)
def test_is_the_layer_of_pytorch(backend):
    layer = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3)
    x = torch.randn(2, 6, 11)
    y, state = short_convolution(x.mT, layer.weight[:, 0], layer.bias, backend=backend)
    torch.testing.assert_close(y.mT, layer(x)[..., :11])
    assert torch.equal(state.mT, x[..., -3:])


def test_second_derivatives_of_pytorch():
    options = {"mask": holes(B, 6, True), "resets": starts(B, 6), "activation": "silu", "backend": "chunked"}
    leaves = tuple(inputs(6, 2, 3).values())
    assert torch.autograd.gradgradcheck(lambda *x: short_convolution(*x, **options), leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": torch.zeros(2, 3)}, r"x \[B, T, C\]"),
        ({"weight": torch.zeros(5, 1, 4)}, r"weight\[:, 0\]"),
        ({"state": torch.zeros(B, 4, 5)}, r"found \[5, 4\] and \[3, 4, 5\]"),
        ({"activation": "gelu"}, "'gelu'"),
        ({"backend": "chunk"}, "did you mean 'chunked'?"),
    ],
)
def test_errors_say_what_was_expected(changed, words):
    with pytest.raises(InputError, match=f"expected .*{words}"):
        short_convolution(**{**inputs(7, 5, 4, torch.float32), **changed})


# T, C, W: 8 positions are computed at once, 64 in a part of the backward, 512 in a unit; 512 channels are a group.
NATIVE_SHAPES = [(1, 515, 4), (70, 17, 4), (530, 40, 3), (1100, 3, 4), (67, 530, 2), (140, 20, 7), (9, 5, 1)]


@needs_kernels
@pytest.mark.each_value
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
@pytest.mark.parametrize("folded", [*FOLDED, "rare resets"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_kernels_equal_the_equation(activation, folded, shape, variant, poisoned):
    options = {"backend": "native", "activation": activation, **folds(folded, B, shape[0])}
    if "rare" in folded:
        options["resets"] = starts(B, shape[0], share=0.01)
    agree(short_convolution, reference_short_convolution, inputs(*shape, torch.float32), 2e-6, **options)


@needs_kernels
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


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_round_half_precision_once(dtype, variant):
    given, options = inputs(70, 37, 4, dtype), {"backend": "native", "mask": holes(B, 70), "activation": "silu"}
    agree(short_convolution, reference_short_convolution, given, torch.finfo(dtype).eps, **options)


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits(threads):
    given, options = inputs(1100, 530, 4, torch.float32), {"mask": holes(B, 1100), "activation": "silu"}
    same_bits_on_any_threads(threads, lambda: results(short_convolution, given, **options))


@needs_kernels
def test_only_the_inputs_are_kept():
    given = inputs(40, 6, 4, torch.float32)
    assert not kept_bytes(lambda: short_convolution(**given, activation="silu", backend="native"), *given.values())
