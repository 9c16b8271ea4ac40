"""The Triton kernels against the equations: on a GPU where there is one, else in Triton's interpreter, in a child.

The interpreter must be chosen before Triton is first imported, and torch.compile in another test may have done that.
"""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import REFERENCES, close, exactly, gradients, weights
from kernel_cases import holes as holes_on
from kernel_cases import inputs as inputs_on
from kernel_cases import run as run_backend
from torch.autograd import forward_ad

import mnemos
from mnemos.ops.linear import LinearState, choose, linear_attention
from mnemos.ops.linear import triton as backend
from mnemos.ops.linear import triton as launch
from mnemos.ops.linear.reference import reference_elu, reference_linear_attention
from mnemos.types import InputError

INSTALLED = importlib.util.find_spec("triton") is not None
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
needs_triton = pytest.mark.skipif(not backend.runs_here(), reason="runs in the child of test_in_the_interpreter")
needs_gpu = pytest.mark.skipif(not (GPU and INSTALLED), reason="needs a GPU")


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED or backend.runs_here(), reason="the tests run here themselves")
def test_in_the_interpreter(exhaustive):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Of the other file, by default the cheap tests.
    others = "triton" if exhaustive else "attention_triton or triton and (second_derivative or types_may_differ)"
    command += ["-k", others]
    command += [__file__, str(Path(__file__).with_name("test_linear_attention_kernels.py"))]
    command += ["--exhaustive"] if exhaustive else ["--cases", "1"]  # the interpreter takes seconds for a case
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.fixture(params=["in parts", "whole"])  # in parts every kernel runs, so that is the case of `--cases 1`
def parts(request, monkeypatch):
    if request.param == "in parts":
        monkeypatch.setattr(launch, "to_fill", lambda _: 2**20)
        monkeypatch.setattr(launch, "SHORTEST_PART", 16)


inputs = functools.partial(inputs_on, device=DEVICE)
holes = functools.partial(holes_on, device=DEVICE)
run = functools.partial(run_backend, backend="triton")


def equations(given, mask=None, phi=reference_elu, eps=0.1):
    """The same in float64 on the CPU."""
    exact = [x.detach().double().cpu().requires_grad_() for x in given]
    q, k, v, s, z = exact
    outputs = reference_linear_attention(
        q, k, v, phi=phi, state=(s, z), mask=None if mask is None else mask.cpu(), eps=eps
    )
    return [*outputs, *gradients(outputs, exact)]


SHAPES = [(2, 19, 2, 5, 4), (2, 1, 3, 7, 9), (1, 67, 2, 70, 6)]
MORE_SHAPES = [(2, 37, 3, 5, 4), (1, 16, 1, 32, 32), (1, 100, 1, 17, 33), (2, 4, 1, 1, 1), (1, 130, 1, 16, 70)]
SHAPES += [pytest.param(shape, marks=pytest.mark.exhaustive) for shape in MORE_SHAPES]


@needs_triton
@pytest.mark.each_value
@pytest.mark.parametrize(("name", "masked"), [("elu", False), ("relu", True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_equations(shape, masked, name, parts, poisoned):
    given = inputs(*shape)
    mask = holes(*shape[:2]) if masked else None
    found = run(given, mask=mask, feature_map=name, eps=0.1)
    close(found, equations(given, mask, REFERENCES[name]), 1e-5)


@needs_triton
@pytest.mark.each_value
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 200, 1, 40, 24), marks=pytest.mark.exhaustive),
        (1, 35, 1, 128, 96),
        pytest.param((1, 70, 1, 128, 96), marks=pytest.mark.exhaustive),
        pytest.param((1, 40, 1, 256, 5), marks=pytest.mark.exhaustive),
        (1, 40, 1, 3, 256),
    ],
    ids=str,
)
def test_equals_chunked_where_the_equations_take_long(shape, parts, poisoned):
    given = inputs(*shape)
    mask, phi = holes(*shape[:2]), torch.sigmoid if shape[3] > shape[1] else "elu"
    exact = exactly(given)
    wanted = run(exact, backend="chunked", mask=mask, feature_map=phi, eps=0.1)
    close(run(given, mask=mask, feature_map=phi, eps=0.1), wanted, 2e-5)


@needs_triton
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 19, 2, 5, 4), (1, 70, 2, 32, 48), (2, 1, 3, 16, 9)], ids=str)
def test_half_precision(shape, dtype, parts, poisoned):
    given = inputs(*shape, dtype=dtype)
    mask = holes(*shape[:2])
    found = run(given, eps=0.1, mask=mask)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32] + [dtype] * 3 + [torch.float32] * 2
    exact = exactly(given)
    y, state = linear_attention(*exact[:3], state=LinearState(*exact[3:]), eps=0.1, mask=mask, backend="chunked")
    expected = (y, *state)
    # The upstream gradient was rounded too, so the exact one gets the rounded one.
    rounded = [w.double() for w in weights([x.to(f.dtype) for x, f in zip(expected, found, strict=False)])]
    wanted = torch.autograd.grad(expected, exact, rounded)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-11
    # On a GPU, products of these types take tf32's 10 bits of each factor.
    close([found[0], *found[3:]], [y, *wanted], 3 * max(rounding, 2**-10 if GPU else 0))
    close(found[1:3], state, 1e-5)


@needs_triton
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_gradients_of_half_precision_where_the_values_have_a_mean(dtype, tolerance, parts):
    """dq = S·ĝ + γ·z, which cancel. bfloat16 products round every factor; a rounded γ would be wrong by a third."""
    g = torch.Generator().manual_seed(0)
    q, k, v, above = (torch.randn(1, 160, 1, 24, generator=g).to(DEVICE) for _ in range(4))
    given = [x.to(dtype).requires_grad_() for x in (q, k, v + 8)]
    y, _ = linear_attention(*given, backend="triton")
    found = torch.autograd.grad(y, given, above.to(dtype))
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = torch.autograd.grad(linear_attention(*exact)[0], exact, above.to(dtype).double())
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < tolerance * b.norm()


@needs_triton
def test_features_of_both_signs(parts):
    """Their sum may be near 0: a mean of the values over it would be huge, and y would lose its digits to it."""
    g = torch.Generator().manual_seed(1)
    sign = torch.tensor([2.0, -2.0]).repeat(8)
    features = [torch.randn(1, 96, 1, 16, generator=g) * 0.3 + sign for _ in range(2)]
    given = [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in (*features, torch.randn(1, 96, 1, 16, generator=g))]
    exact = [x.detach().double().requires_grad_() for x in given]
    outputs = [
        linear_attention(*x, feature_map=torch.clone, backend=b)[0] for x, b in ((given, "triton"), (exact, "chunked"))
    ]
    found, wanted = ([y, *torch.autograd.grad(y.sin().sum(), x)] for y, x in zip(outputs, (given, exact), strict=True))
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() < 2e-2 * b.norm()


@needs_triton
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_travels_back_in_time(value, parts):
    given = [torch.randn(1, 40, 1, 4, generator=torch.Generator().manual_seed(0)).to(DEVICE) for _ in range(3)]
    clean, _ = linear_attention(*given, backend="triton")
    for which in (0, 1, 2):
        spoilt = [x.clone() for x in given]
        spoilt[which][0, 21, 0, 1] = value
        y, _ = linear_attention(*spoilt, backend="triton")
        torch.testing.assert_close(y[:, :21], clean[:, :21])
        assert not y[0, 21, 0].isfinite().all()


@needs_triton
@pytest.mark.each_value
@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("t", [1, 40])
def test_a_nan_that_is_not_masked_is_not_hidden(t, name):
    for which in range(3):
        given = inputs(1, t, 1, 4, 4)
        with torch.no_grad():
            given[which][0, 0, 0, 0] = torch.nan
        q, k, v, s, z = given
        y, _ = linear_attention(q, k, v, state=(s, z), feature_map=name, backend="triton")
        assert y[0, 0, 0].isnan().any()


@needs_triton
def test_elu_plus_one_does_not_cancel():
    q = torch.tensor([-60.0, -20.0, -6.0, 0.0, 2.0], device=DEVICE)[None, :, None, None].requires_grad_()
    k = q.detach().clone().requires_grad_()
    v = torch.arange(5.0, device=DEVICE)[None, :, None, None].requires_grad_()
    zero = [torch.zeros(1, 1, 1, n, device=DEVICE).requires_grad_() for n in (1, 1)]
    given = (q, k, v, zero[0], zero[1][..., 0].detach().requires_grad_())
    found, expected = run(given, eps=1e-30), equations(given, eps=1e-30)
    for a, b in zip(found[:6], expected[:6], strict=True):
        torch.testing.assert_close(a.double().cpu(), b, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[5, 0, 35, 1], [5, 0, 70, 1, 33], [0], [40]], ids=str)
def test_packed_sequences(lengths, dtype, poisoned):
    """One launch, against a call a sequence; values and gradients, the states' too."""
    q, k, v, _, _ = inputs(1, sum(lengths), 2, 9, 20, dtype=dtype)
    _, _, _, s, z = inputs(len(lengths), 1, 2, 9, 20)
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    outcomes = []
    for name in ("triton", "chunked"):
        wide = torch.float64 if name == "chunked" else dtype
        x = [i.detach().to(wide).requires_grad_() for i in (q[0], k[0], v[0])]
        x += [i.detach().to(torch.float64 if name == "chunked" else i.dtype).requires_grad_() for i in (s, z)]
        y, state = mnemos.ops.linear_attention_varlen(*x[:3], offsets, "elu", x[3:], eps=0.1, backend=name)
        above = [w.to(dtype).to(wide) if w.dim() == 3 else w for w in weights([y, *state])]
        outcomes.append([y, *state, *torch.autograd.grad((y, *state), x, above)])
    close(*outcomes, 1e-5 if dtype == torch.float32 else 3 * 2**-8)


@needs_triton
def test_offsets_beyond_the_tokens_touch_nothing_else():
    q, k, v, _, _ = inputs(1, 20, 1, 4, 4)
    wrong = torch.tensor([-5, 10, 1000], device=DEVICE)
    zero = torch.zeros(2, 1, 4, 4, device=DEVICE)
    y, _, _ = backend.packed(q[0], k[0], v[0], zero, zero[..., 0].contiguous(), wrong, None, 0.1)
    assert y.shape == v[0].shape


@needs_triton
@pytest.mark.parametrize("t", [*(pytest.param(t, marks=pytest.mark.exhaustive) for t in (0, 1, 40)), 17])
def test_opcheck(t, monkeypatch, exhaustive):
    monkeypatch.setattr(launch, "to_fill", lambda _: 4)
    monkeypatch.setattr(launch, "SHORTEST_PART", 16)
    q, k, v, s, z = inputs(1, t, 2, 6, 5)
    mask = torch.arange(t, device=DEVICE)[None] % 3 > 0 if t else None
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # the fourth takes as long as all others
    tests += ("test_aot_dispatch_dynamic",) * exhaustive
    check = functools.partial(torch.library.opcheck, test_utils=tests)
    found = check(torch.ops.mnemos.linear_attention_triton, (q, k, v, s, z, mask, None, 1, 0.1))
    assert set(found.values()) == {"SUCCESS"}
    y, gs, gz, _, den = torch.ops.mnemos.linear_attention_triton(q, k, v, s, z, None, None, 1, 0.1)
    given = [x.detach() for x in (q, k, v, s, z)]
    upstream = [x.detach() for x in (y, den, torch.randn_like(y), gs, gz)]
    check(torch.ops.mnemos.linear_attention_triton_backward, (*given, None, None, 1, *upstream))


@needs_triton
@pytest.mark.exhaustive
def test_opcheck_of_packed_sequences():
    q, k, v, _, _ = inputs(1, 30, 2, 6, 5)
    _, _, _, s, z = inputs(3, 1, 2, 6, 5)
    offsets = torch.tensor([0, 11, 11, 30], device=DEVICE)
    found = torch.library.opcheck(torch.ops.mnemos.linear_attention_triton, (q, k, v, s, z, None, offsets, 2, 0.1))
    assert set(found.values()) == {"SUCCESS"}


@needs_triton
@pytest.mark.exhaustive
def test_packed_sequences_compiled_equal_eager():
    torch._dynamo.reset()
    varlen = torch.compile(mnemos.ops.linear_attention_varlen, backend="aot_eager", fullgraph=True)
    offsets = torch.tensor([0, 11, 40], device=DEVICE)
    q, k, v = (x[0] for x in inputs(1, 40, 3, 5, 4)[:3])
    y, _ = varlen(q, k, v, offsets, backend="triton")
    assert torch.equal(y, mnemos.ops.linear_attention_varlen(q, k, v, offsets, backend="triton")[0])


@needs_triton
def test_packed_sequences_in_forward_mode():
    """The kernel ignores tangents: that of the result would be missing."""
    offsets, tangent = torch.tensor([0, 4, 9], device=DEVICE), torch.ones(9, 1, 4, device=DEVICE)
    q, k, v = (x[0].detach() for x in inputs(1, 9, 1, 4, 4)[:3])
    x = q.clone().requires_grad_()
    y, _ = mnemos.ops.linear_attention_varlen(x, k, v, offsets, backend="triton")
    slope = torch.autograd.grad(y.sum(), x)[0].sum()
    with forward_ad.dual_level():
        dual, _ = mnemos.ops.linear_attention_varlen(forward_ad.make_dual(q, tangent), k, v, offsets, backend="triton")
        found = forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(found.sum(), slope, rtol=1e-4, atol=1e-4)


@needs_triton
def test_which_backend_runs():
    q, k, v, _, _ = inputs(1, 9, 1, 4, 4)
    which = mnemos.ops.which
    assert "triton" in mnemos.ops.backends("linear_attention")
    assert which("linear_attention", q, k, v) != "triton"  # it runs where it is named
    assert which("linear_attention", q, k, v, backend="triton") == "triton"
    with pytest.raises(InputError, match=r"does not take torch\.float64"):
        linear_attention(q.double(), k.double(), v.double(), backend="triton")
    wide, head = torch.zeros(1, 9, 1, 300, device=DEVICE), torch.zeros(1, 9, 1, 32, device=DEVICE)
    with pytest.raises(InputError, match=r"shapes \(1, 9, 1, 300\)"):
        linear_attention(wide, wide, v, backend="triton")
    for ask in (linear_attention, functools.partial(which, "linear_attention")):
        with pytest.raises(InputError, match=r", 528\)"):  # the map's width counts, not the head's
            ask(head, head, v, feature_map="polynomial", backend="triton")


@needs_triton
@pytest.mark.exhaustive
def test_smaller_chunks_where_shared_memory_is_small(monkeypatch):
    kernels = launch.kernels()
    tried = []

    class Scan:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                tried.append(options["C"])
                if options["C"] > 16:
                    raise kernels.OutOfResources(300_000, 200_000, "shared memory")
                return scan[grid](*arguments, **options)

            return launch

    scan = kernels.scan
    given = inputs(1, 100, 1, 8, 8)
    expected = run(given)
    monkeypatch.setattr(launch.Scans, "chunk", lambda *_: 64)
    monkeypatch.setattr(kernels, "scan", Scan())
    close(run(given), expected, 1e-5)
    assert set(tried) == {64, 32, 16}


def test_on_a_gpu_auto_is_pytorch(monkeypatch):
    """Kernels that never ran on a GPU are not the default there."""
    for name in ("runs_here", "_has_tensor_cores"):
        monkeypatch.setattr(backend, name, lambda: True)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, shape=(1, 9, 1, 4))
    assert backend.takes(on_gpu, on_gpu, on_gpu)
    assert choose(on_gpu, on_gpu, on_gpu, "auto") == "chunked"
    assert choose(on_gpu, on_gpu, on_gpu, "triton") == "triton"
    assert mnemos.ops.backends("linear_attention")[-1] == "triton"


def test_where_it_cannot_run_the_error_says_what_to_do(monkeypatch):
    q, k, v, _, _ = inputs(1, 9, 1, 4, 4)
    monkeypatch.setattr(backend, "_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if INSTALLED:
        with pytest.raises(InputError, match="PyTorch sees no CUDA device; use 'auto'"):
            linear_attention(q, k, v, backend="triton")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"pip install 'mnemos-torch\[triton\]'"):
        linear_attention(q, k, v, backend="triton")
    assert "triton" not in mnemos.ops.backends("linear_attention")


def test_precision_follows_the_setting():
    def asked(what):
        torch.backends.cuda.matmul.fp32_precision = what
        return [launch.precision(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)]

    before = torch.backends.cuda.matmul.fp32_precision
    try:
        assert asked("none") == [("tf32x3", "tf32x3"), ("tf32", "tf32x3"), ("bf16", "bf16x2")]
        assert asked("ieee") == [("ieee", "ieee"), ("tf32", "ieee"), ("bf16", "bf16x2")]
        assert asked("tf32") == [("tf32", "tf32"), ("tf32", "tf32x3"), ("bf16", "bf16x2")]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@needs_gpu
@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sizes_on_the_gpu(dtype, width):
    """What the interpreter cannot reach: real parts, every tile, and offsets beyond 2³¹ numbers do not matter here."""
    g = torch.Generator().manual_seed(0)
    for b, t, h in ((1, 5000, 2), (8, 333, 40)):
        x = [torch.randn(b, t, h, width, generator=g).to(DEVICE, dtype).requires_grad_() for _ in range(3)]
        s = torch.rand(b, h, width, width, generator=g).to(DEVICE).requires_grad_()
        z = torch.rand(b, h, width, generator=g).to(DEVICE).requires_grad_()
        given = (*x, s, z)
        exact = exactly(given)
        found, expected = run(given), run(exact, backend="chunked")
        close(found, expected, 5e-5 if dtype == torch.float32 else 2**-6)
        for a, b in zip(found, run(given), strict=True):
            assert torch.equal(a, b)  # the same at every run


@needs_gpu
def test_compiled_by_inductor_on_the_gpu():
    torch._dynamo.reset()
    given = inputs(2, 300, 3, 32, 32)
    q, k, v, s, z = given
    compiled = torch.compile(linear_attention, fullgraph=True)
    y, state = compiled(q, k, v, state=LinearState(s, z))
    outputs = (y, *state)
    close([*outputs, *gradients(outputs, given)], run(given), 1e-5)
