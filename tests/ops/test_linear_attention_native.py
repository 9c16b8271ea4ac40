"""The kernels against the equations and against chunked.py: every variant that this processor can run."""

import platform
import subprocess
import sys

import pytest
import torch
from kernel_cases import agree, exactly, holes, results, weights
from linear_attention_cases import equations, inputs, run
from native_kernels import ALL_VARIANTS, INSTRUCTION_SETS, needs_kernels, run_variant
from refusals import refuses

import mnemos
from mnemos.native import build as building
from mnemos.native import library
from mnemos.ops.linear import linear_attention
from mnemos.ops.linear.reference import reference_elu
from mnemos.types import InputError

FLUSHED = platform.machine().lower() in ("x86_64", "amd64")  # denormal numbers count as zero: native/simd/flush.h


@pytest.fixture(params=ALL_VARIANTS, ids=lambda i: INSTRUCTION_SETS[i])
def variant(request):
    """Every kind of these kernels, that with products of bfloat16 included."""
    with run_variant(request.param):
        yield request.param


def given(b, t, n, h, d, m, dtype=torch.float32):
    """Of shape B, T, N, H, D, M; N None: causal."""
    return inputs(t, n, dtype, b, h, d, m)


SHAPES = [
    (2, 37, None, 3, 5, 4),
    (1, 16, None, 1, 32, 32),
    (2, 1, None, 3, 7, 9),
    (1, 65, None, 1, 40, 17),
    (1, 33, None, 2, 64, 48),
    (2, 4, None, 1, 1, 1),
    (2, 7, 5, 3, 5, 4),
    (1, 1, 33, 1, 16, 16),
    (2, 70, 1, 2, 33, 17),
    (1, 40, 65, 5, 1, 1),
    (3, 0, 31, 1, 8, 40),
]


@needs_kernels
@pytest.mark.parametrize("name", ["elu", "relu"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_equations(shape, masked, name, variant, poisoned):
    rows, tokens, keys = shape[:3]
    options = {"feature_map": name, "eps": 0.1, "causal": keys is None}
    options["mask"] = holes(rows, keys or tokens) if masked else None
    agree(run, equations, given(*shape), 1e-5, backend="native", **options)


@pytest.mark.each_value
@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "shape", [(1, 700, None, 1, 24, 40), (2, 300, None, 2, 33, 31), (3, 130, None, 5, 8, 96)], ids=str
)
def test_equals_chunked_on_any_number_of_threads(shape, count, variant, threads, poisoned):
    threads(count)
    for mask, phi in ((None, "elu"), (holes(*shape[:2]), "relu"), (holes(*shape[:2]), torch.sigmoid)):
        agree(run, run, given(*shape), 2e-5, backend="native", mask=mask, feature_map=phi, eps=0.1)


@needs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8192, None, 4, 32, 32),
        (1, 9001, None, 4, 33, 31),
        pytest.param((1, 65_600, None, 16, 1, 2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_outputs_large_enough_for_large_pages(shape):
    """A whole number of them and not, and the denominators too."""
    agree(run, run, given(*shape), 1e-4, backend="native", eps=0.1)


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", [(1, 700, 1100, 1, 24, 40), (2, 300, 40, 3, 33, 31)], ids=str)
def test_both_ways_on_any_number_of_threads(shape, count, variant, threads, poisoned):
    threads(count)
    options = {"mask": holes(shape[0], shape[2]), "feature_map": torch.sigmoid, "eps": 0.1, "causal": False}
    agree(run, run, given(*shape), 2e-5, backend="native", **options)  # float64 is computed in chunks


@needs_kernels
@pytest.mark.each_value
@pytest.mark.parametrize("name", ["elu", "relu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 60, 300, 2, 16, 12), (2, 70, 33, 3, 33, 17), (1, 50, 40, 3, 2, 1)], ids=str)
def test_half_precision_both_ways(shape, dtype, name, variant, poisoned):
    """The gradient of q is of float32 sums: also where v has a mean. What the mask hides may be anything."""
    clean, mask = given(*shape, dtype), holes(shape[0], shape[2])
    clean["v"].data.add_(3)
    hidden = ~mask[..., None, None]
    spoiled = clean | {x: clean[x].detach().masked_fill(hidden, torch.nan).requires_grad_() for x in ("k", "v")}
    options = {"mask": mask, "feature_map": name, "eps": 0.1, "causal": False}
    found = results(run, spoiled, backend="native", **options)
    expected = results(equations, exactly(clean), weights(found[:3]), **options)
    assert [x.dtype for x in found] == [dtype, torch.float32, torch.float32] + [dtype] * 3 + [torch.float32] * 2
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.double() - b).norm() <= (1e-6 if i in (1, 2) else 4e-3) * b.norm(), i
    assert not any(x[~mask].any() for x in found[4:6])


@needs_kernels
def test_a_long_sum_keeps_its_digits(variant):
    ones = torch.ones(1, 1 << 19, 1, 1)
    third = torch.full_like(ones, 1 / 3)
    _, (s, z) = linear_attention(ones[:, :1], ones, third, False, "relu", backend="native")
    # A chunk of 32 tokens is a plain sum, whose rounding is the same 2¹⁴ times; one plain sum would be off by 10⁻³.
    assert abs(s.item() / third[0, 0].double().item() / (1 << 19) - 1) < 4e-7
    assert z.item() == 1 << 19


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_number_passes_unchanged(dtype, variant):
    """A value that the only key of a row reads: v itself comes out, infinite and float16's subnormal ones included.

    bfloat16's subnormal numbers are so as float32 too, and zero in the kernels of x86 processors.
    """
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.int16).view(dtype)
    v = bits.view(-1, 2, 1, 1).transpose(0, 1).transpose(1, 2)  # [2, 1, 32768, 1]: a token, many heads
    one = torch.ones(2, 1, 2**15, 1, dtype=dtype)
    y, _ = linear_attention(one, one, v, feature_map="relu", eps=0.0, backend="native")
    assert torch.equal(y.isnan(), v.isnan())
    if dtype == torch.bfloat16 and FLUSHED:
        v = torch.where(v.abs() < torch.finfo(dtype).tiny, 0, v)
    assert torch.equal(y[~v.isnan()], v[~v.isnan()])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_to_half_precision_as_torch_does(dtype, variant):
    """z = 1, so y is the state's own number, rounded."""
    g = torch.Generator().manual_seed(0)
    exponents = torch.linspace(-30, 20, 4096)
    numbers = torch.randn(4096, generator=g).sign() * 2**exponents * (1 + torch.rand(4096, generator=g))
    ties = torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-12, 1 + 3 * 2**-12, 65519.0, 65520.0, 2.0**-25, 3e38])
    s = torch.cat([numbers, ties]).view(1, -1, 1, 1)
    nothing = torch.zeros(1, 1, s.shape[1], 1, dtype=dtype)
    q = torch.ones_like(nothing)
    y, _ = linear_attention(
        q, nothing, nothing, feature_map="relu", state=(s, torch.ones(1, s.shape[1], 1)), eps=0.0, backend="native"
    )
    assert torch.equal(y.flatten(), s.flatten().to(dtype))


@needs_kernels
def test_the_exponential_over_its_whole_range(variant):
    x = torch.cat([torch.linspace(-110, 0, 200_001), -torch.logspace(-45, 0, 20_001), torch.linspace(0, 50, 1001)])
    y = torch.empty_like(x)
    library().mnemos_map(mnemos.native.instructions, x.data_ptr(), y.data_ptr(), x.numel(), 1)
    exact = reference_elu(x.double())
    unit = torch.exp2((torch.frexp(exact).exponent - 24).clamp(min=-149).double())
    assert ((y.double() - exact).abs() / unit).max() < 1.5
    special = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, -1e-45, -3e38, 3e38])
    out = torch.empty_like(special)
    number = mnemos.native.instructions
    library().mnemos_map(number, special.data_ptr(), out.data_ptr(), len(special), 1)
    expected = torch.tensor([0.0, torch.inf, torch.nan, 1.0, 1.0, 1.0, 0.0, 3e38])
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


@needs_kernels
def test_which_backend_runs():
    q, k, v, *_ = given(1, 9, None, 1, 4, 4).values()
    which = mnemos.ops.which
    assert mnemos.ops.backends("linear_attention")[0] == "native"
    assert which("linear_attention", q, k, v) == "native"
    assert which("linear_attention", q, k, v, backend="chunked") == "chunked"
    assert which("linear_attention", q.double(), k.double(), v.double()) == "chunked"
    assert which("linear_attention", q.to("meta"), k.to("meta"), v.to("meta")) == "chunked"
    refuses(r"does not take torch\.float64", linear_attention, q.double(), k.double(), v.double(), backend="native")
    refuses("several backends, found 'softmax'", which, "softmax", q, k, v)


def test_where_it_was_not_built_the_error_says_what_to_do(monkeypatch):
    reason = "the native kernels were not built: install a C++ compiler"
    monkeypatch.setattr(mnemos.native, "_load", lambda: (None, reason))
    q, k, v, *_ = given(1, 9, None, 1, 4, 4).values()
    assert mnemos.ops.which("linear_attention", q, k, v) == "chunked"
    assert mnemos.ops.backends("linear_attention") == ["chunked"]
    assert linear_attention(q, k, v)[0].shape == v.shape
    refuses("install a C\\+\\+ compiler", linear_attention, q, k, v, backend="native")


def test_the_build_says_why_it_cannot(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(building.BuildError, match="none of no-such-compiler is on the path"):
        building.build()
    done = subprocess.run([sys.executable, building.__file__], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "not built: no C++ compiler: none of no-such-compiler is on the path\n"
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(building.BuildError, match="false failed: status 1"):
        building.build()


@needs_kernels
def test_the_library_is_of_these_sources(monkeypatch):
    assert library().mnemos_sources().decode() == building.fingerprint()
    monkeypatch.setattr("mnemos.native.build.fingerprint", lambda: "another")
    loaded, why = mnemos.native._load.__wrapped__()
    assert loaded is None
    assert "other sources" in why


@needs_kernels
def test_an_instruction_set_can_be_chosen():
    names = mnemos.native.instruction_sets()
    best = mnemos.native.instructions
    assert names[0] == "baseline"
    with mnemos.native.instruction_set("baseline"):
        assert mnemos.native.instructions == 0
        with mnemos.native.instruction_set(names[-1]):
            assert mnemos.native.instructions == len(names) - 1
        assert mnemos.native.instructions == 0
    assert mnemos.native.instructions == best
    with pytest.raises(InputError, match="found 'neon'"), mnemos.native.instruction_set("neon"):
        pass
