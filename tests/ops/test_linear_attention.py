"""Linear attention is its equations: forms, maps, resets and derivatives; what a call promises beside them."""

import functools
import itertools

import pytest
import torch
from kernel_cases import FOLDED, agree, folds, holes, kept_bytes, starts
from linear_attention_cases import HERE, MAPS, B, D, H, equations, inputs, run
from native_kernels import needs_kernels
from torch.autograd import forward_ad
from torch.func import hessian, jvp
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos.ops import linear_attention
from mnemos.ops.linear import LinearState, chunked
from mnemos.ops.linear.feature_maps import elu, favor, polynomial, random_projection
from mnemos.ops.linear.reference import reference_linear_attention, reference_similarity
from mnemos.types import InputError

LENGTHS = [1, 2, 31, 32, 33, 75]
each_backend = pytest.mark.parametrize("backend", HERE)


@pytest.fixture(params=["one segment", "a segment a chunk", "two chunks a segment"])
def segments(request, monkeypatch):
    numbers = {"one segment": 2**18, "a segment a chunk": 1, "two chunks a segment": 2 * B * H * 32 * D}[request.param]
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": numbers})


@each_backend
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("folded", FOLDED)
@pytest.mark.parametrize("t", LENGTHS)
def test_causal_equals_the_equations(t, folded, name, backend, segments, poisoned):
    d = 2 if name == "polynomial" else D  # whose d² features take the equations long
    given = inputs(t, dtype=torch.float32 if backend == "native" else torch.float64, d=d)
    marks, first = folds(folded, B, t), slice(None)
    if "mask" in marks and "resets" in marks:  # what is invalid may hold anything
        dirty = {name: torch.where(marks["mask"][..., None, None], given[name], torch.nan) for name in ("k", "v")}
        given |= {name: x.detach().requires_grad_() for name, x in dirty.items()}
    if name == "polynomial":  # its D(D+1)/2 features are not the reference's D²: from a state of nothing, y alone
        del given["s"], given["z"]
        first = slice(1)
    options = {"backend": backend, "feature_map": name, "eps": 0.1, **marks}
    agree(
        lambda **x: run(**x)[first], lambda **x: equations(**x)[first], given,
        1e-5 if backend == "native" else 1e-12, **options,
    )  # fmt: skip


def test_a_compiler_is_given_sums_without_a_loop(monkeypatch, poisoned):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    agree(run, equations, inputs(75), 1e-12, backend="chunked")


@pytest.mark.parametrize(("t", "n"), [(1, 1), (7, 7), (7, 4), (1, 9), (9, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["elu", "relu"])
def test_bidirectional_equals_the_equations(t, n, masked, name, poisoned):
    options = {"causal": False, "mask": holes(B, n) if masked else None, "feature_map": name}
    agree(run, equations, inputs(t, n), 1e-12, **options)


def test_similarities_are_the_same_function():
    """Eq. 8, without sums."""
    agree(run, functools.partial(equations, schedule=reference_similarity), inputs(11), 1e-12)


@pytest.mark.slow
def test_any_function_is_a_feature_map():
    projection = random_projection(9, D, torch.Generator().manual_seed(0))
    for phi in (functools.partial(favor, projection=projection), lambda x: torch.cat([x, -x], -1).exp(), torch.sigmoid):
        given = {name: x for name, x in inputs(40).items() if name in ("q", "k", "v")}
        agree(run, equations, given, 1e-12, feature_map=phi)


def test_without_eps_a_scale_of_the_feature_map_is_without_effect():
    """The lengths that fill a chunk up do not meet 0/0."""
    given = {name: x for name, x in inputs(6).items() if name in ("q", "k", "v")}
    twice = functools.partial(run, feature_map=lambda x: 2 * elu(x))
    agree(lambda **x: twice(**x, eps=0.0)[0], lambda **x: equations(**x, eps=0.0)[0], given, 1e-12)


@pytest.mark.parametrize(("t", "causal"), [(1, True), (40, True), (3, False)])
def test_the_slope_at_zero_is_one_on_every_path(t, causal):
    given = inputs(t)
    given["q"].data.zero_()
    agree(run, equations, given, 1e-12, causal=causal)


def test_polynomial_and_favor_are_their_equations():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 12, D, generator=g, dtype=torch.float64)
    torch.testing.assert_close((polynomial(q) * polynomial(k)).sum(-1), (q * k).sum(-1).square())
    assert polynomial(q).shape == (12, D * (D + 1) // 2)
    projection = random_projection(2 * D + 1, D, g)
    exponent = q @ projection.double().T / D**0.25 - q.square().sum(-1, keepdim=True) / (2 * D**0.5)
    torch.testing.assert_close(favor(q, projection), exponent.exp() / (2 * D + 1) ** 0.5)
    for block in projection.split(D):
        block = block / block.norm(dim=1, keepdim=True)
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_favor_is_its_kernel():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 12, D, generator=g, dtype=torch.float64) / 2  # more varies as exp(|q + k|²/√D)
    projection = random_projection(200_000, D, g)
    assert projection.shape == (200_000, D)
    similarity = (favor(q, projection) * favor(k, projection)).sum(-1)
    kernel = torch.exp((q * k).sum(-1) / D**0.5)
    assert ((similarity - kernel) / kernel).abs().max() < 0.03
    assert projection.mean(0).abs().max() < 0.02  # the signs of an uncorrected QR are not even


# ---- transforms ----


def drawn(seed, t=40):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, t, 2, 5, generator=g) for _ in range(3)]


@pytest.mark.slow
def test_forward_mode_has_the_derivatives_of_a_backward():
    """One test for all backends, because PyTorch imports for seconds when it first differentiates forwards."""
    for backend, t, phi in itertools.product(HERE, (1, 40), ("elu", torch.sigmoid)):
        given, tangents = drawn(0, t), drawn(1, t)

        def loss(q, k, v, backend=backend, t=t, phi=phi):
            y, state = linear_attention(q, k, v, feature_map=phi, backend=backend, mask=holes(2, t), eps=0.1)
            return y.square().sum() + state.s.sin().sum()

        exact = [x.double().requires_grad_() for x in given]
        slopes = torch.autograd.grad(loss(*exact, backend="chunked"), exact)
        slope = sum((a * b).sum() for a, b in zip(slopes, tangents, strict=True))
        torch.testing.assert_close(jvp(loss, tuple(given), tuple(tangents))[1].double(), slope, rtol=1e-4, atol=1e-4)
        with forward_ad.dual_level():
            dual = loss(*map(forward_ad.make_dual, given, tangents))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent.double(), slope, rtol=1e-4, atol=1e-4)


def test_transforms_have_second_derivatives():
    q, k, v = (x[:, :3, :1, :2].double() for x in drawn(0))
    wanted = torch.autograd.functional.hessian(lambda q: reference_linear_attention(q, k, v)[0].square().sum(), q)
    torch.testing.assert_close(hessian(lambda q: linear_attention(q, k, v)[0].square().sum())(q), wanted)


class Named(torch.Tensor):
    """A subclass that changes nothing."""


@each_backend
@pytest.mark.parametrize(
    ("odd", "plain"),
    [
        (torch._neg_view, torch.neg),
        (lambda x: torch._efficientzerotensor(x.shape), torch.zeros_like),
        (lambda x: x.as_subclass(Named), lambda x: x),
    ],
    ids=["negative", "zero", "subclass"],
)
def test_tensors_whose_memory_does_not_hold_their_values(odd, plain, backend):
    def results(q, k, v, g):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y, state = linear_attention(*leaves, backend=backend)
        return [y, *state, *torch.autograd.grad(y, leaves, g)]

    given = [*drawn(0), torch.randn(2, 40, 2, 5)]
    for i in range(4):
        both = []
        for change in (odd, plain):
            changed = [x.clone() for x in given]
            changed[i] = change(changed[i])
            both.append(results(*changed))
        for a, b in zip(*both, strict=True):
            torch.testing.assert_close(torch.as_tensor(a), b)


@each_backend
@pytest.mark.parametrize("create_graph", [False, True])
def test_checkpointing_changes_no_gradient(backend, create_graph):
    """The backward reads its saved tensors once, also where its result has a graph."""
    given = [x.requires_grad_() for x in drawn(0)]

    def call(*given):
        return linear_attention(*given, backend=backend)[0]

    both = call(*given), checkpoint(call, *given, use_reentrant=False)
    found = [torch.autograd.grad(y.square().sum(), given, create_graph=create_graph) for y in both]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


# ---- what a call promises beside its numbers ----


@each_backend
def test_nothing_that_grows_with_the_state_is_kept_for_the_backward(backend):
    sizes = {}
    for t in (1024, 4096):
        given = [torch.randn(1, t, 2, 32, requires_grad=True) for _ in range(3)]
        sizes[t] = kept_bytes(functools.partial(linear_attention, *given, backend=backend))
    tokens = 4096 * 2 * 4  # bytes of a number a token and head
    assert 0 < sizes[4096] < tokens * (4 * 32 + 1 + 8)
    assert sizes[4096] - sizes[1024] < tokens * (4 * 32 + 1 + 8) * 3 // 4


def test_which_backend_runs_hangs_on_what_a_feature_map_makes_of_queries_and_keys():
    q, k, v, *_ = inputs(3, dtype=torch.float32).values()
    seen = []

    def doubling(x):
        seen.append(x.shape)
        return x.double().exp()

    for tokens in (3, 0):
        given = [x[:, :tokens] for x in (q, k, v)]
        assert mnemos.ops.which("linear_attention", *given) == HERE[0]
        assert mnemos.ops.which("linear_attention", *given, feature_map="polynomial") == HERE[0]
        assert mnemos.ops.which("linear_attention", *given, feature_map=doubling) == "chunked"
    assert seen == [(1, 1, 1, D)] * 2 + [(1, 0, 1, D)] * 2  # a token of each, not all
    with pytest.raises(InputError, match="did you mean 'elu'"):
        mnemos.ops.which("linear_attention", q, k, v, feature_map="el")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"k": torch.zeros(B, 3, H, D), "v": torch.zeros(B, 3, H, 4)}, "another length than q's"),
        ({"feature_map": "elu1"}, "did you mean 'elu'"),
        ({"feature_map": "favor"}, "with its projection"),
        ({"state": (torch.zeros(1, H, D, 4), torch.zeros(1, H, D))}, r"state_s \[B=2, H=3, D=5, M=4\] or None"),
        ({"state": torch.zeros(B, H, D, 4)}, "or None, found Tensor"),
        ({"feature_map": lambda x: x.sum(-1)}, "keeps all axes"),
        ({"eps": -1e-9}, "eps of 0 or at least 1.2e-38, found -1e-09"),
        ({"eps": 1e-39}, "eps of 0 or at least 1.2e-38, found 1e-39"),
        ({"eps": float("nan")}, "eps of 0 or at least 1.2e-38, found nan"),
        ({"resets": starts(B, 7)}, "resets"),
        ({"resets": starts(B, 6).float()}, "resets"),
        ({"resets": starts(B, 6), "causal": False}, "no resets"),
    ],
)
def test_wrong_input_is_refused_in_one_line(changed, words):
    q, k, v, *_ = inputs(6).values()
    with pytest.raises(InputError, match=f"^.*{words}.*$"):
        linear_attention(**{"q": q, "k": k, "v": v, **changed})


@needs_kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("used", ["y", "s", "z", "y, s", "y, z", "s, z"])
def test_a_missing_state_and_missing_gradients_are_zeros(used, causal):
    """The kernels are given null for them; explicit zeros have the same results, to the last bit."""
    q, k, v = (x.requires_grad_() for x in drawn(0, 70))
    zeros = LinearState(torch.zeros(2, 2, 5, 5), torch.zeros(2, 2, 5))

    def results(state, names):
        y, end = linear_attention(q, k, v, causal=causal, state=state, backend="native")
        found = {"y": y, "s": end.s, "z": end.z}
        weights = {n: x.detach().cos() * (n in used.split(", ")) for n, x in found.items()}
        loss = sum((found[n] * weights[n]).sum() for n in names)
        return *found.values(), *torch.autograd.grad(loss, (q, k, v), allow_unused=True)

    one, two = results(None, used.split(", ")), results(zeros, ["y", "s", "z"])
    for a, b in zip(one, two, strict=True):
        assert torch.equal(torch.zeros_like(b) if a is None else a, b)
    with torch.no_grad():
        plain = linear_attention(q, k, v, causal=causal, backend="native")
    assert torch.equal(plain[0], one[0])
    assert torch.equal(plain[1].s, one[1])
