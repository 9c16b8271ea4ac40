"""The short convolution is its equation: padding, resets, calls that are cut, derivatives; every backend.

The kernels: every variant that this processor can run.
"""

import pytest
import torch
from kernel_cases import agree, results, same_bits_on_any_threads
from native_kernels import needs_kernels
from torch.func import grad, vmap

import mnemos
from mnemos.ops import short_convolution
from mnemos.ops.convolution import BACKENDS
from mnemos.ops.convolution.reference import reference_short_convolution
from mnemos.types import InputError

HERE = mnemos.ops.backends("short_convolution")
EXACT = [name for name in HERE if BACKENDS.by_name[name].takes(*torch.zeros(2, 1, 2, 2).double())]
B = 3


def inputs(t, c, w, dtype=torch.float64, seed=0):
    """A dictionary of leaves, none contiguous."""
    g = torch.Generator().manual_seed(seed)
    given = {
        "x": torch.randn(c, B, 2 * t, generator=g, dtype=torch.float64)[..., ::2].permute(1, 2, 0),
        "weight": torch.randn(w, c, generator=g, dtype=torch.float64).T,
        "bias": torch.randn(2 * c, generator=g, dtype=torch.float64)[::2],
        "state": torch.randn(B, c, w - 1, generator=g, dtype=torch.float64).mT,
    }
    return {name: x.to(dtype).detach().requires_grad_() for name, x in given.items()}


def holes(t, seed=4):
    """Padding on the left of a row, in the middle and at the end; a row without valid tokens."""
    mask = torch.rand(B, t, generator=torch.Generator().manual_seed(seed)) > 0.3
    mask[0, : t // 2] = False
    mask[2] = False
    return mask


def starts(t, seed=5):
    return torch.rand(B, t, generator=torch.Generator().manual_seed(seed)) > 0.8


def tolerance(backend):
    return (torch.float64, 1e-12) if backend in EXACT else (torch.float32, 2e-6)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    "shape", [(37, 5, 4), (1, 3, 4), (2, 70, 4), (0, 4, 3), (9, 33, 8), (5, 1, 2), (6, 17, 3)], ids=str
)
@pytest.mark.parametrize("folded", [(), ("mask",), ("resets",), ("mask", "resets")], ids="+".join)
@pytest.mark.parametrize("absent", [(), ("bias", "state")], ids="+".join)
def test_equals_the_equation(absent, folded, shape, activation, backend, poisoned):
    dtype, close = tolerance(backend)
    given = inputs(*shape, dtype)
    for name in absent:
        del given[name]
    options = {name: {"mask": holes, "resets": starts}[name](shape[0]) for name in folded}
    agree(
        short_convolution, reference_short_convolution, given, close, backend=backend, activation=activation, **options
    )


@pytest.mark.parametrize("backend", HERE)
def test_is_the_layer_of_pytorch(backend):
    layer = torch.nn.Conv1d(6, 6, 4, groups=6, padding=3)
    x = torch.randn(2, 6, 11)
    y, state = short_convolution(x.mT, layer.weight[:, 0], layer.bias, backend=backend)
    torch.testing.assert_close(y.mT, layer(x)[..., :11])
    assert torch.equal(state.mT, x[..., -3:])


def test_transforms_and_second_derivatives_of_pytorch():
    given = inputs(6, 2, 3)
    leaves = [x.detach().requires_grad_() for x in given.values()]
    options = {"mask": holes(6), "resets": starts(6), "activation": "silu"}
    assert torch.autograd.gradgradcheck(
        lambda *x: short_convolution(*x, **options, backend="chunked"), leaves, fast_mode=True
    )
    x, weight = given["x"].detach().float(), given["weight"].detach().float()
    per_row = vmap(grad(lambda row: short_convolution(row[None], weight, activation="silu")[0].sum()))(x)
    leaf = x.clone().requires_grad_()
    short_convolution(leaf, weight, activation="silu")[0].sum().backward()
    torch.testing.assert_close(per_row, leaf.grad)


@pytest.mark.parametrize("backend", HERE)
def test_compiled_equals_eager(backend):
    given, options = inputs(9, 5, 4, torch.float32), {"mask": holes(9), "activation": "silu", "backend": backend}
    compiled = torch.compile(short_convolution, backend="aot_eager", fullgraph=True)
    both = results(compiled, given, **options), results(short_convolution, given, **options)
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": torch.zeros(2, 3)}, "x [B, T, C]"),
        ({"weight": torch.zeros(5, 1, 4)}, "weight[:, 0]"),
        ({"state": torch.zeros(B, 4, 5)}, "found [5, 4] and [3, 4, 5]"),
        ({"activation": "gelu"}, "'gelu'"),
        ({"backend": "chunk"}, "did you mean 'chunked'?"),
    ],
)
def test_errors_say_what_was_expected(changed, words):
    given = {**inputs(7, 5, 4, torch.float32), **changed}
    with pytest.raises(InputError, match="expected") as error:
        short_convolution(**given)
    assert words in str(error.value)


def marks(b, t, share, seed=4):
    drawn = torch.rand(t, b, generator=torch.Generator().manual_seed(seed)).T
    return drawn < share


# T, C, W: 8 positions are computed at once, 64 in a part of the backward, 512 in a unit; 512 channels are a group.
NATIVE_SHAPES = [(1, 515, 4), (70, 17, 4), (530, 40, 3), (1100, 3, 4), (67, 530, 2), (140, 20, 7), (9, 5, 1)]


@needs_kernels
@pytest.mark.each_value
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
@pytest.mark.parametrize("folded", ["nothing", "mask", "resets", "rare resets", "mask and resets"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_kernels_equal_the_equation(activation, folded, shape, variant, poisoned):
    t = shape[0]
    options = {"mask": marks(3, t, 0.8)} if "mask" in folded else {}
    if "resets" in folded:
        options["resets"] = marks(3, t, 0.01 if "rare" in folded else 0.2, seed=5)
    options |= {"backend": "native", "activation": activation}
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
    options = {"backend": "native", "mask": marks(3, 70, 0.8), "activation": "silu"}
    agree(short_convolution, reference_short_convolution, inputs(70, 37, 4, dtype), torch.finfo(dtype).eps, **options)


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits(threads):
    given, options = inputs(1100, 530, 4, torch.float32), {"mask": marks(3, 1100, 0.9), "activation": "silu"}
    same_bits_on_any_threads(threads, lambda: results(short_convolution, given, **options))


@needs_kernels
def test_only_the_inputs_are_kept():
    given, kept = inputs(40, 6, 4, torch.float32), set()

    def pack(x):
        kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        short_convolution(**given, activation="silu", backend="native")
    assert kept == {x.untyped_storage().data_ptr() for x in given.values()}


@needs_kernels
def test_the_operators_are_registered_as_pytorch_wants_them():
    given, mask = inputs(20, 6, 4, torch.float32), marks(3, 20, 0.8)
    tensors = *given.values(), mask, None
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.mnemos.short_convolution, (*tensors, "silu"), test_utils=checks)

    def operator(x, weight, bias, state):
        return torch.ops.mnemos.short_convolution(x, weight, bias, state, mask, None, "silu")

    both = results(operator, given), results(short_convolution, given, mask=mask, activation="silu", backend="native")
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
