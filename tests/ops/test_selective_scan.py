"""The selective scan is its equation: padding, resets, strong decays, cut calls, derivatives; every backend.

The kernels: every variant that this processor can run.
"""

import pytest
import torch
from kernel_cases import agree, results, same_bits_on_any_threads
from native_kernels import needs_kernels
from torch.func import grad, vmap
from torch.nn.functional import softplus

import mnemos
from mnemos.ops import rewindable, selective_scan
from mnemos.ops.selective.reference import reference_selective_scan
from mnemos.types import InputError

HERE = mnemos.ops.backends("selective_scan")
EACH = pytest.mark.parametrize("backend", HERE)
B = 2
SHAPES = [(0, 4, 3), (9, 0, 4), (1, 5, 16), (15, 3, 2), (33, 18, 5), (64, 7, 16), (65, 2, 1)]


def inputs(t, c, n, dtype=torch.float64, seed=0):
    """A dictionary of leaves, none contiguous. Steps are 0, small and so large that dt A is −120 and beyond."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape[::-1], generator=g, dtype=torch.float64).permute(*reversed(range(len(shape))))

    dt = softplus(normal(B, t, c) - 1)
    dt[:, 3::7] = 0
    dt[:, 5::7] *= 200
    given = {"x": normal(B, t, c), "dt": dt, "A": -(normal(c, n).exp()), "B": normal(B, t, n), "C": normal(B, t, n)}
    given |= {"D": normal(2 * c)[::2], "state": normal(B, c, n)}
    return {name: x.to(dtype).detach().requires_grad_() for name, x in given.items()}


def holes(t):
    """Padding on the left of a row, in the middle and at the end."""
    mask = torch.rand(t, B, generator=torch.Generator().manual_seed(4)).T > 0.3
    mask[0, : t // 3] = False
    return mask


def starts(t):
    return torch.rand(B, t, generator=torch.Generator().manual_seed(5)) > 0.9


def close(backend):
    return (torch.float64, 1e-12) if backend == "chunked" else (torch.float32, 2e-6)


@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("folded", [(), ("mask",), ("resets",), ("mask", "resets")], ids="+".join)
@pytest.mark.parametrize("absent", [(), ("D", "state")], ids="+".join)
def test_equals_the_equation(absent, folded, shape, backend, poisoned):
    dtype, tolerance = close(backend)
    given = {name: x for name, x in inputs(*shape, dtype).items() if name not in absent}
    options = {name: {"mask": holes, "resets": starts}[name](shape[0]) for name in folded}
    agree(selective_scan, reference_selective_scan, given, tolerance, backend=backend, **options)


@EACH
def test_half_precision_is_rounded_once(backend):
    agree(
        selective_scan,
        reference_selective_scan,
        inputs(9, 18, 4, torch.bfloat16),
        torch.finfo(torch.bfloat16).eps,
        backend=backend,
        mask=holes(9),
    )


def test_transforms_and_second_derivatives_of_pytorch():
    given = {name: x.detach() for name, x in inputs(5, 2, 3).items()}
    options = {"mask": holes(5), "resets": starts(5)}
    plain, seconds = list(given.values()), []
    for scan in (selective_scan, reference_selective_scan):
        loss = lambda x: sum(y.sin().sum() for y in scan(x, *plain[1:], **options))  # noqa: B023, E731
        seconds.append(torch.func.hessian(loss)(plain[0]))
    torch.testing.assert_close(*seconds)
    x, rest = given["x"].float(), [given[name][:1].float() for name in ("dt", "A", "B", "C")]
    rest[1] = given["A"].float()
    per_row = vmap(grad(lambda row: selective_scan(row[None], *rest)[0].sum()))(x)
    leaf = x.clone().requires_grad_()
    dt, A, writes, reads = rest
    selective_scan(leaf, dt.expand(B, -1, -1), A, writes.expand(B, -1, -1), reads.expand(B, -1, -1))[0].sum().backward()
    torch.testing.assert_close(per_row, leaf.grad)


def test_goes_back_to_the_state_after_any_token():
    given = {name: x.detach() for name, x in inputs(9, 3, 4, torch.float32).items()}
    options = {"mask": holes(9), "resets": starts(9)}
    with rewindable() as calls:
        end = selective_scan(**given, **options)[1]
    found = calls.rewind(end, (7, 2))
    for row, n in enumerate((7, 2)):
        at, cut = slice(row, row + 1), {name: x if name in "AD" else x[row : row + 1] for name, x in given.items()}
        cut |= {name: cut[name][:, :n] for name in ("x", "dt", "B", "C")}
        wanted = selective_scan(**cut, **{name: z[at, :n] for name, z in options.items()})[1]
        assert torch.equal(found[at], wanted)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x": torch.zeros(2, 3)}, "x [B, T, C]"),
        ({"dt": -torch.ones(B, 7, 5)}, "use softplus(dt)"),
        ({"A": torch.ones(5, 4)}, "use -A_log.exp()"),
        ({"backend": "chunk"}, "did you mean 'chunked'?"),
    ],
)
def test_errors_say_what_was_expected(changed, words):
    given = {**inputs(7, 5, 4, torch.float32), **changed}
    with pytest.raises(InputError, match="expected") as error:
        selective_scan(**given)
    assert words in str(error.value)


# T, C, N: a state is kept every 32 tokens, 128 channels are a group, 16 a tile.
NATIVE_SHAPES = [(1, 130, 16), (17, 257, 3), (63, 20, 16), (97, 129, 17)]


@needs_kernels
@pytest.mark.each_value
@pytest.mark.parametrize("shape", NATIVE_SHAPES, ids=str)
@pytest.mark.parametrize("folded", ["nothing", "mask", "resets", "mask and resets"])
def test_the_kernels_equal_the_equation(folded, shape, variant, poisoned):
    t = shape[0]
    options = {"mask": holes(t)} if "mask" in folded else {}
    options |= {"resets": starts(t)} if "resets" in folded else {}
    agree(selective_scan, reference_selective_scan, inputs(*shape, torch.float32), 2e-6, backend="native", **options)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_round_half_precision_once(dtype, variant):
    given = inputs(34, 37, 4, torch.float32)
    given["x"] = given["x"].detach().to(dtype).requires_grad_()
    agree(selective_scan, reference_selective_scan, given, torch.finfo(dtype).eps, backend="native", mask=holes(34))


@needs_kernels
def test_compiled_equals_eager():
    given, options = inputs(3, 5, 4, torch.float32), {"mask": holes(3), "backend": "native"}
    compiled = torch.compile(selective_scan, backend="eager", fullgraph=True)
    both = results(compiled, given, **options), results(selective_scan, given, **options)
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits(threads):
    given, options = inputs(70, 300, 4, torch.float32), {"mask": holes(70)}
    same_bits_on_any_threads(threads, lambda: results(selective_scan, given, **options))


@needs_kernels
def test_the_inputs_and_a_state_of_32_tokens_are_kept():
    given, kept = {name: x.detach().contiguous() for name, x in inputs(70, 128, 4, torch.float32).items()}, {}
    given = {name: x.requires_grad_() for name, x in given.items()}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        selective_scan(**given, backend="native")
    assert sum(kept.values()) == sum(x.numel() for x in given.values()) + 2 * given["state"].numel()


@needs_kernels
def test_the_operators_are_registered_as_pytorch_wants_them():
    given, mask = inputs(40, 6, 4, torch.float32), holes(40)
    tensors = *given.values(), mask, None
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.mnemos.selective_scan, (*tensors, True), test_utils=checks)

    def operator(*tensors, **named):
        return torch.ops.mnemos.selective_scan(*tensors, *named.values(), mask, None, True)[:2]

    both = results(operator, given), results(selective_scan, given, mask=mask, backend="native")
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
