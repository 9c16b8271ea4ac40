"""The kernels of the selective scan: every variant of this processor, many channels, threads, and the operators."""

import pytest
import torch
from native_kernels import needs_kernels, words
from test_selective_scan import agrees, holes, inputs, results, starts

import mnemos
from mnemos.ops import selective_scan
from mnemos.ops.selective import native

pytestmark = needs_kernels
# T, C, N: a state is kept every 32 tokens, 128 channels are a group, 16 a tile.
SHAPES = [(1, 130, 16), (17, 257, 3), (63, 20, 16), (97, 129, 17)]


@pytest.mark.each_value
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("folded", ["nothing", "mask", "resets", "mask and resets"])
def test_equals_the_equation(folded, shape, variant, poisoned):
    t = shape[0]
    options = {"mask": holes(t)} if "mask" in folded else {}
    options |= {"resets": starts(t)} if "resets" in folded else {}
    agrees(inputs(*shape, torch.float32), "native", 2e-6, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype, variant):
    given = inputs(34, 37, 4, torch.float32)
    given["x"] = given["x"].detach().to(dtype).requires_grad_()
    agrees(given, "native", torch.finfo(dtype).eps, mask=holes(34))


def test_compiled_equals_eager():
    given, options = inputs(3, 5, 4, torch.float32), {"mask": holes(3), "backend": "native"}
    compiled = torch.compile(selective_scan, backend="eager", fullgraph=True)
    both = results(compiled, given, **options), results(selective_scan, given, **options)
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_any_number_of_threads_gives_the_same_bits(threads):
    given, options = inputs(70, 300, 4, torch.float32), {"mask": holes(70)}
    threads(1)
    one = results(selective_scan, given, **options)
    threads(3)
    assert all(torch.equal(a, b) for a, b in zip(one, results(selective_scan, given, **options), strict=True))


def test_the_inputs_and_a_state_of_32_tokens_are_kept():
    given, kept = {name: x.detach().contiguous() for name, x in inputs(70, 128, 4, torch.float32).items()}, {}
    given = {name: x.requires_grad_() for name, x in given.items()}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        selective_scan(**given, backend="native")
    assert sum(kept.values()) == sum(x.numel() for x in given.values()) + 2 * given["state"].numel()


def test_the_operators_are_registered_as_pytorch_wants_them():
    given, mask = inputs(40, 6, 4, torch.float32), holes(40)
    tensors = *given.values(), mask, None
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(torch.ops.mnemos.selective_scan, (*tensors, True), test_utils=checks)

    def operator(*tensors, **named):
        return torch.ops.mnemos.selective_scan(*tensors, *named.values(), mask, None, True)[:2]

    both = results(operator, given), results(selective_scan, given, mask=mask, backend="native")
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_a_second_derivative_is_refused():
    y, _ = selective_scan(**(given := inputs(9, 5, 4, torch.float32)), backend="native")
    (dx,) = torch.autograd.grad(y.square().sum(), given["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        dx.sum().backward()


def test_the_call_has_the_words_of_the_header():
    assert words("selective.h", "Selective") * 8 == native.CALL.size
    x = torch.zeros(1, 1, 2)
    assert mnemos.ops.which("selective_scan", x, x, torch.zeros(2, 3).double(), x, x) == "chunked"
