"""What both compiled backends of linear attention keep to: native, of every kind, and Triton, whole and in parts.

Triton's run on a GPU, or in the child that test_linear_attention_triton.py starts: by default the cheap ones.
"""

import contextlib
import functools
import itertools
from typing import NamedTuple

import kernel_cases
import pytest
import torch
from kernel_cases import close, exactly, gradients, run
from native_kernels import NAMES, VARIANTS, needs_kernels, run_variant

from mnemos.ops.linear import LinearState, linear_attention, triton
from mnemos.ops.linear import triton as launch

needs_triton = pytest.mark.skipif(not triton.runs_here(), reason="runs in the child of test_in_the_interpreter")
BOTH = [pytest.param("native", marks=needs_kernels), pytest.param("triton", marks=needs_triton)]
KINDS = [pytest.param(("native", i), marks=needs_kernels, id=f"native {NAMES[i]}") for i in VARIANTS]
KINDS += [pytest.param(("triton", "in parts"), marks=needs_triton, id="triton in parts")]
KINDS += [pytest.param(("triton", "whole"), marks=[needs_triton, pytest.mark.exhaustive], id="triton whole")]
THREADS = {"native": (1, 3), "triton": (1,)}
LENGTH = {"native": 300, "triton": 70}  # long enough for several parts


class Kernel(NamedTuple):
    """A backend, and the device that its tensors lie on."""

    backend: str

    @property
    def device(self):
        return "cuda" if self.backend == "triton" and torch.cuda.is_available() else "cpu"

    @property
    def inputs(self):
        return functools.partial(kernel_cases.inputs, device=self.device)

    def holes(self, b, t):
        return kernel_cases.holes(b, t, self.device)

    def operator(self, *given):
        """q, k, v, s, z, mask, kind, eps, as the backend's operator takes them."""
        if self.backend == "native":
            return torch.ops.mnemos.linear_attention(*given)
        return torch.ops.mnemos.linear_attention_triton(*given[:6], None, *given[6:])


@pytest.fixture(params=BOTH)
def backend(request):
    """Either, as it runs here."""
    return Kernel(request.param)


@pytest.fixture(params=KINDS)
def kernel(request, monkeypatch):
    """Each way there is of either."""
    name, kind = request.param
    if kind == "in parts":
        monkeypatch.setattr(launch, "to_fill", lambda _: 2**20)
        monkeypatch.setattr(launch, "SHORTEST_PART", 16)
    with run_variant(kind) if name == "native" else contextlib.nullcontext():
        yield Kernel(name)


@pytest.mark.each_value
@pytest.mark.parametrize("t", [1, 66])
def test_padding_may_hold_anything(t, kernel):
    q, k, v, s, z = kernel.inputs(2, t, 3, 5, 17)
    mask = kernel.holes(2, t)
    mask[1, -1] = False
    dirty = [torch.where(mask[..., None, None], x, torch.nan).detach().requires_grad_() for x in (k, v)]
    clean, found = (run((q, *kv, s, z), kernel.backend, mask=mask) for kv in ((k, v), dirty))
    for a, b in zip(found, clean, strict=True):
        assert torch.equal(a, b)
    for gradient in found[4:6]:
        assert not gradient[~mask].any()


@pytest.mark.each_value
@pytest.mark.parametrize("t", [1, 40])
def test_a_row_without_a_valid_key_and_a_query_without_features(t, kernel):
    q, k, v, s, z = kernel.inputs(2, t, 2, 8, 8)
    nothing = torch.zeros(2, t, dtype=torch.bool, device=kernel.device)
    zero = (torch.zeros_like(s).requires_grad_(), torch.zeros_like(z).requires_grad_())
    found = run((q, k, v, *zero), kernel.backend, mask=nothing)
    assert not found[0].any()
    assert all(x.isfinite().all() for x in found)
    silent = (-q.detach().abs()).requires_grad_()  # relu: φ(q) = 0, and y = 0/eps
    found = run((silent, k, v, s, z), kernel.backend, feature_map="relu", eps=1e-3)
    assert not found[0].any()
    assert not found[3].any()
    assert all(x.isfinite().all() for x in found)


def test_no_gradient_from_above_for_some_outputs(kernel):
    """What nothing is asked of counts as zero, also where there is no y; and a sum's gradient has strides of 0."""
    given = kernel.inputs(1, 34 if kernel.backend == "triton" else 70, 2, 6, 10)  # its interpreter is slow
    exact = exactly(given)
    for index in range(3):
        found, expected = [], []
        for x, name, to in ((given, kernel.backend, found), (exact, "chunked", expected)):
            y, state = linear_attention(*x[:3], state=LinearState(*x[3:]), backend=name, eps=0.1)
            to += torch.autograd.grad((y, *state)[index].sum(), x, allow_unused=True, materialize_grads=True)
        close(found, expected, 1e-5)


def test_the_given_state_is_never_changed(kernel):
    with torch.no_grad():
        for t in (1, 40):
            q, k, v, s, z = given = kernel.inputs(2, t, 2, 8, 8)
            before = [x.clone() for x in given]
            for _ in range(2):
                _, new = linear_attention(q, k, v, state=(s, z), backend=kernel.backend)
                assert new.s.data_ptr() != s.data_ptr()
            for a, b in zip(given, before, strict=True):
                assert torch.equal(a, b)


def test_the_future_cannot_change_the_past_and_steps_make_the_whole(kernel, threads):
    n = LENGTH[kernel.backend]
    for count in THREADS[kernel.backend]:
        threads(count)
        q, k, v, s, z = kernel.inputs(1, n, 1 if count > 1 else 2, 12, 20)
        whole, end = linear_attention(q, k, v, state=(s, z), backend=kernel.backend)
        other = k.detach().clone()
        other[:, n - 10] += 1
        y, _ = linear_attention(q, other, v, state=(s, z), backend=kernel.backend)
        assert torch.equal(y[:, : n - 10], whole[:, : n - 10])
        assert not torch.equal(y[:, n - 10], whole[:, n - 10])
        state, found = LinearState(s, z), []
        for a, b in itertools.pairwise([0, 1, 2, 19, n // 2, n - 1, n]):
            part, state = linear_attention(q[:, a:b], k[:, a:b], v[:, a:b], state=state, backend=kernel.backend)
            found.append(part)
        close((torch.cat(found, 1), *state), (whole, *end), 1e-5)


def test_no_rows_and_no_heads(backend):
    q, k, v, s, z = backend.inputs(2, 9, 3, 4, 4)
    for rows, heads in ((0, 3), (2, 0)):
        given = [x[:rows, :, :heads] for x in (q, k, v)] + [x[:rows, :heads] for x in (s, z)]
        y, *_ = backend.operator(*given, None, 1, 0.1)
        assert y.shape == (rows, 9, heads, 4)
        y.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("native", marks=needs_kernels),
        pytest.param("triton", marks=[needs_triton, pytest.mark.exhaustive]),  # opcheck tests its shapes by default
    ],
    indirect=True,
)
def test_compiled_equals_eager(backend):
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    for t in (40, 1):
        q, k, v, s, z = given = backend.inputs(2, t, 3, 5, 4)
        mask = backend.holes(2, t)
        y, state = compiled(q, k, v, state=LinearState(s, z), mask=mask, backend=backend.backend)
        found = [y, *state, *gradients((y, *state), given)]
        for a, b in zip(found, run(given, backend.backend, mask=mask), strict=True):
            assert torch.equal(a, b)


def test_a_second_derivative_is_refused(backend):
    q, k, v, _, _ = backend.inputs(1, 9, 1, 4, 4)
    y, _ = linear_attention(q, k, v, backend=backend.backend)
    (gradient,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=f"differentiable once; backend='{backend.backend}'"):
        torch.autograd.grad(gradient.sum(), k)


def test_types_may_differ(backend):
    q, k, v, s, z = backend.inputs(1, 9, 2, 4, 4)
    y, state = linear_attention(q, k.bfloat16(), v.half(), state=(s, z), backend=backend.backend)
    assert (y.dtype, state.s.dtype) == (torch.float16, torch.float32)
    expected, _ = linear_attention(q, k.bfloat16().float(), v.half().float(), state=(s, z), backend="chunked")
    close([y], [expected], 1e-3)
