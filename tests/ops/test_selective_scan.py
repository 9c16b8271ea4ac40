"""The selective scan is its equation: padding, resets, strong decays, derivatives; every backend and variant."""

import pytest
import torch
from kernel_cases import FOLDED, agree, folds, holes, kept_bytes, results, same_bits_on_any_threads, starts
from native_kernels import needs_kernels
from torch.nn.functional import softplus

import mnemos
from mnemos.ops import selective_scan
from mnemos.ops.selective.reference import reference_selective_scan
from mnemos.types import InputError

B = 2
SHAPES = [(0, 4, 3), (9, 0, 4), (1, 5, 16), (15, 3, 2), (33, 18, 5), (64, 7, 16), (65, 2, 1)]


def inputs(t, c, n, dtype=torch.float64):
    """A dictionary of leaves, none contiguous. Steps are 0, small and so large that dt A is −120 and beyond."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape[::-1], generator=g, dtype=torch.float64).permute(*reversed(range(len(shape))))

    dt = softplus(normal(B, t, c) - 1)
    dt[:, 3::7] = 0
    dt[:, 5::7] *= 200
    given = {"x": normal(B, t, c), "dt": dt, "A": -(normal(c, n).exp()), "B": normal(B, t, n), "C": normal(B, t, n)}
    given |= {"D": normal(2 * c)[::2], "state": normal(B, c, n)}
    return {name: x.to(dtype).detach().requires_grad_() for name, x in given.items()}


@pytest.mark.parametrize("backend", mnemos.ops.backends("selective_scan"))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("folded", FOLDED)
@pytest.mark.parametrize("absent", [(), ("D", "state")], ids="+".join)
def test_equals_the_equation(absent, folded, shape, backend, poisoned):
    dtype, tolerance = (torch.float64, 1e-12) if backend == "chunked" else (torch.float32, 2e-6)
    given = {name: x for name, x in inputs(*shape, dtype).items() if name not in absent}
    options = folds(folded, B, shape[0])
    agree(selective_scan, reference_selective_scan, given, tolerance, backend=backend, **options)


def test_second_derivatives_of_pytorch():
    given = {name: x.detach() for name, x in inputs(5, 2, 3).items()}
    options = {"mask": holes(B, 5), "resets": starts(B, 5)}
    x, *rest = given.values()

    def loss(x, scan):
        return sum(y.sin().sum() for y in scan(x, *rest, **options))

    scans = selective_scan, reference_selective_scan
    torch.testing.assert_close(*(torch.func.hessian(lambda x, scan=scan: loss(x, scan))(x) for scan in scans))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": torch.zeros(2, 3)}, r"x \[B, T, C\]"),
        ({"dt": -torch.ones(B, 7, 5)}, r"use softplus\(dt\)"),
        ({"A": torch.ones(5, 4)}, r"use -A_log.exp\(\)"),
        (
            {"A": torch.ones(5, 0), "B": torch.ones(B, 7, 0), "C": torch.ones(B, 7, 0), "state": None},
            "with N at least 1",
        ),
        ({"backend": "chunk"}, "did you mean 'chunked'?"),
    ],
)
def test_errors_say_what_was_expected(changed, words):
    with pytest.raises(InputError, match=f"expected .*{words}"):
        selective_scan(**{**inputs(7, 5, 4, torch.float32), **changed})


# T, C, N: a state is kept every 32 tokens, 128 channels are a group, 16 a tile.
NATIVE_SHAPES = [(1, 130, 16), (17, 257, 3), (63, 20, 16), (97, 129, 17)]


@needs_kernels
@pytest.mark.each_value
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
@pytest.mark.parametrize("folded", FOLDED)
def test_the_kernels_equal_the_equation(folded, shape, variant, poisoned):
    options = {"backend": "native", **folds(folded, B, shape[0])}
    agree(selective_scan, reference_selective_scan, inputs(*shape, torch.float32), 2e-6, **options)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", ["x", "everything"])
def test_half_precision_is_rounded_once(low, dtype, variant):
    given = inputs(34, 37, 4, dtype if low == "everything" else torch.float32)
    given["x"] = given["x"].detach().to(dtype).requires_grad_()
    options = {"backend": "native", "mask": holes(B, 34)}
    agree(selective_scan, reference_selective_scan, given, torch.finfo(dtype).eps, **options)


def test_half_precision_of_pytorch_is_rounded_once():
    given, options = inputs(9, 18, 4, torch.bfloat16), {"backend": "chunked", "mask": holes(B, 9)}
    agree(selective_scan, reference_selective_scan, given, torch.finfo(torch.bfloat16).eps, **options)


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits(threads):
    given, options = inputs(70, 300, 4, torch.float32), {"mask": holes(B, 70)}
    same_bits_on_any_threads(threads, lambda: results(selective_scan, given, **options))


@needs_kernels
def test_the_inputs_and_a_state_of_32_tokens_are_kept():
    given = {name: x.detach().contiguous().requires_grad_() for name, x in inputs(70, 128, 4, torch.float32).items()}
    inside = kept_bytes(lambda: selective_scan(**given, backend="native"), *given.values())
    assert inside == 2 * given["state"].numel() * 4
