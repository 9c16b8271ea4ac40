"""Linear attention is its equations: forms, maps, resets and derivatives; what a call promises beside them."""

import functools
import itertools

import pytest
import torch
from linear_attention_cases import HERE, B, D, H, compare, holes, inputs
from native_kernels import needs_kernels
from torch.autograd import forward_ad
from torch.func import grad, hessian, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos.ops import linear_attention, rewindable
from mnemos.ops.linear import LinearState, chunked
from mnemos.ops.linear.feature_maps import elu, favor, polynomial, random_projection
from mnemos.ops.linear.reference import (
    reference_bidirectional,
    reference_causal,
    reference_elu,
    reference_linear_attention,
    reference_polynomial,
    reference_relu,
    reference_similarity,
)
from mnemos.types import InputError

LENGTHS = [1, 2, 31, 32, 33, 75]

MAPS = {"elu": reference_elu, "relu": reference_relu, "polynomial": reference_polynomial}


@pytest.fixture(params=["one segment", "a segment a chunk", "two chunks a segment"])
def segments(request, monkeypatch):
    numbers = {"one segment": 2**18, "a segment a chunk": 1, "two chunks a segment": 2 * B * H * 32 * D}[request.param]
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": numbers})


@pytest.mark.each_value
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("t", LENGTHS)
def test_causal_equals_the_equations(t, masked, segments, poisoned):
    q, k, v, state = inputs(t)
    mask = holes(t) if masked else None
    y, new = linear_attention(q, k, v, state=state, mask=mask, eps=0.1)
    expected = reference_linear_attention(q, k, v, reference_causal, state=state, mask=mask, eps=0.1)
    compare((y, *new), expected, (q, k, v, *state))


def test_a_compiler_is_given_sums_without_a_loop(monkeypatch, poisoned):
    q, k, v, state = inputs(75)
    expected = reference_linear_attention(q, k, v, reference_causal, state=state)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    y, new = linear_attention(q, k, v, state=state, backend="chunked")
    compare((y, *new), expected, (q, k, v, *state))


@pytest.mark.parametrize(("t", "n"), [(1, 1), (7, 7), (7, 4), (1, 9), (9, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_bidirectional_equals_the_equations(t, n, masked, poisoned):
    q, k, v, state = inputs(t, n)
    mask = holes(n) if masked else None
    y, new = linear_attention(q, k, v, causal=False, state=state, mask=mask)
    expected = reference_linear_attention(q, k, v, reference_bidirectional, state=state, mask=mask)
    compare((y, *new), expected, (q, k, v, *state))


@pytest.mark.each_value
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_every_feature_map(name, t, causal):
    q, k, v, _ = inputs(t)
    mask = holes(t)
    y, _ = linear_attention(q, k, v, causal, name, mask=mask, eps=0.1)
    schedule = reference_causal if causal else reference_bidirectional
    expected, _, _ = reference_linear_attention(q, k, v, schedule, MAPS[name], mask=mask, eps=0.1)
    compare([y], [expected], (q, k, v))


@pytest.mark.slow
def test_the_three_schedules_agree():
    """Eq. 8 (similarities), 9 to 12 (sums) and 16 to 20 (a call a token) are one function."""
    q, k, v, state = inputs(35)
    similar = reference_linear_attention(q, k, v, reference_similarity, state=state)
    y, new = linear_attention(q, k, v, state=state)
    compare((y, *new), similar, (q, k, v, *state))
    steps, moving = [], state
    for i in range(35):
        y, moving = linear_attention(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], state=moving)
        steps.append(y)
    compare((torch.cat(steps, 1), *moving), similar, (q, k, v, *state))


@pytest.mark.slow
def test_any_function_is_a_feature_map():
    projection = random_projection(9, D, torch.Generator().manual_seed(0))
    for phi in (functools.partial(favor, projection=projection), lambda x: torch.cat([x, -x], -1).exp(), torch.sigmoid):
        q, k, v, _ = inputs(40)
        y, state = linear_attention(q, k, v, feature_map=phi)
        compare((y, *state), reference_linear_attention(q, k, v, phi=phi), (q, k, v))


def test_derivatives(segments):
    """First derivatives by finite differences, of every output for every input."""
    for t, causal, masked in itertools.product((1, 35), (True, False), (False, True)):
        q, k, v, state = inputs(t, rows=2)
        mask = holes(t) if masked else None

        def function(q, k, v, s, z, causal=causal, mask=mask):
            y, state = linear_attention(q, k, v, causal, state=LinearState(s, z), mask=mask)
            return y, *state

        assert torch.autograd.gradcheck(function, (q, k, v, *state), fast_mode=True)


def test_bidirectional_calls_add_up():
    q, k, v, _ = inputs(8)
    whole, end = linear_attention(q, k, v, causal=False)
    _, first = linear_attention(q[:, :3], k[:, :3], v[:, :3], causal=False)
    y, both = linear_attention(q, k[:, 3:], v[:, 3:], causal=False, state=first)
    compare((y, *both), (whole, *end), (q, k, v))


def test_eps_is_added_to_the_denominator():
    q, k, v, _ = inputs(6, dtype=torch.float64)
    y, _ = linear_attention(q, k, v, eps=0.0)
    shifted, state = linear_attention(q, k, v, eps=0.5)
    den = torch.einsum("bthd,bthd->bth", elu(q), elu(k).cumsum(1))[..., None]
    torch.testing.assert_close(shifted, y * den / (den + 0.5))
    torch.testing.assert_close(state.z, elu(k).sum(1))
    # Without eps, a scale of φ is without effect; the lengths that fill a chunk up do not meet 0/0.
    twice, _ = linear_attention(q, k, v, feature_map=lambda x: 2 * elu(x), eps=0.0)
    compare([twice], [y], (q, k, v))


def test_the_slope_at_zero_is_one_on_every_path():
    for t, causal in ((1, True), (40, True), (3, False)):
        q, k, v, _ = inputs(t)
        nothing = torch.zeros_like(q).requires_grad_()
        y, _ = linear_attention(nothing, k, v, causal)
        expected, _, _ = reference_linear_attention(
            nothing, k, v, reference_causal if causal else reference_bidirectional
        )
        compare([y], [expected], [nothing])


@pytest.mark.slow
def test_polynomial_and_favor_are_their_kernels():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 12, D, generator=g, dtype=torch.float64)
    torch.testing.assert_close((polynomial(q) * polynomial(k)).sum(-1), (q * k).sum(-1).square())
    assert polynomial(q).shape == (12, D * (D + 1) // 2)
    q, k = q / 2, k / 2  # a random feature's relative variance grows as exp(|q + k|²/√D)
    projection = random_projection(200_000, D, g)
    assert projection.shape == (200_000, D)
    similarity = (favor(q, projection) * favor(k, projection)).sum(-1)
    kernel = torch.exp((q * k).sum(-1) / D**0.5)
    assert ((similarity - kernel) / kernel).abs().max() < 0.03
    assert projection.mean(0).abs().max() < 0.02  # the signs of an uncorrected QR are not even
    block = projection[:D] / projection[:D].norm(dim=1, keepdim=True)
    torch.testing.assert_close(block @ block.T, torch.eye(D), rtol=0, atol=1e-5)


BACKENDS = mnemos.ops.backends("linear_attention")

T = 70


def starts(t=T):
    """Rare and frequent ones, two one after the other, and the first token of a row."""
    found = torch.rand(B, t, generator=torch.Generator().manual_seed(3)) < torch.tensor([[0.03], [0.4]])
    found[:, 0] = torch.tensor([False, True])  # row 0 reads its first state
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_resets_equal_the_equations(backend, name, masked):
    dtype = torch.float32 if backend == "native" else torch.float64
    q, k, v, state = inputs(T, dtype=dtype)
    if name == "polynomial":  # its D(D+1)/2 features are not the reference's D²: from a state of nothing
        state = None
    mask = holes(T) if masked else None
    dirty = [x if mask is None else torch.where(mask[..., None, None], x, torch.nan) for x in (k, v)]
    y, end = linear_attention(q, *dirty, True, name, state, mask, 0.1, backend, resets=starts())
    wanted, *sums = reference_linear_attention(
        q, k, v, phi=MAPS[name], state=state, mask=mask, eps=0.1, resets=starts()
    )
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    if state is None:
        compare((y,), (wanted,), (q, k, v), tolerance)
    else:
        compare((y, *end), (wanted, *sums), (q, k, v, *state), tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_equal_each_alone_and_a_cut_call(backend):
    q, k, v, _ = inputs(T, dtype=torch.float32)
    phi = functools.partial(favor, projection=random_projection(7, D, torch.Generator().manual_seed(0)))
    resets, cuts = torch.zeros(B, T, dtype=torch.bool), (0, 5, 6, 40, T)
    resets[0, list(cuts[:-1])] = True
    resets[1, 33] = True
    whole, end = linear_attention(q, k, v, feature_map=phi, backend=backend, resets=resets)
    for a, b in itertools.pairwise(cuts):
        alone, last = linear_attention(*(x[:1, a:b] for x in (q, k, v)), feature_map=phi, backend=backend)
        torch.testing.assert_close(whole[:1, a:b], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(end.s[:1], last.s, rtol=1e-4, atol=1e-4)
    state, parts = None, []
    for a, b in itertools.pairwise((0, 5, 34, 34, 35, T)):
        here = (x[:, a:b] for x in (q, k, v))
        y, state = linear_attention(*here, feature_map=phi, state=state, backend=backend, resets=resets[:, a:b])
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    for a, b in zip(state, end, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_half_precision_is_summed_in_float32():
    q, k, v, _ = inputs(T, dtype=torch.bfloat16)
    y, end = linear_attention(q, k, v, resets=starts())
    wanted, s, _ = reference_linear_attention(q, k, v, resets=starts())
    assert (y.dtype, end.s.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(end.s.double(), s, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kept", [(20, 70), (0, 33)])
def test_the_state_goes_back_over_resets(kept):
    q, k, v, state = inputs(T)
    mask, resets = holes(T), starts()
    with rewindable() as calls:
        _, end = linear_attention(q, k, v, state=state, mask=mask, resets=resets)
    found = calls.rewind(end, kept)
    for row, n in enumerate(kept):
        at = slice(row, row + 1)
        _, wanted = linear_attention(
            *(x[at, :n] for x in (q, k, v)), state=tuple(x[at] for x in state), mask=mask[at, :n], resets=resets[at, :n]
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a[at], b, rtol=0, atol=1e-9)


def test_resets_that_do_not_fit_are_refused():
    q, k, v, _ = inputs(7)
    for resets, causal in ((starts(8), True), (starts(7).float(), True), (starts(7), False)):
        with pytest.raises(InputError):
            linear_attention(q, k, v, causal, resets=resets)


def drawn(seed, t=40):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, t, 2, 5, generator=g) for _ in range(3)]


def loss_of(backend, t=40, **options):
    mask = holes(t)

    def loss(q, k, v):
        y, state = linear_attention(q, k, v, backend=backend, mask=mask, eps=0.1, **options)
        return y.square().sum() + state.s.sin().sum()

    return loss


def expected(given, **options):
    exact = [x.double().requires_grad_() for x in given]
    return torch.autograd.grad(loss_of("chunked", given[0].shape[1], **options)(*exact), exact)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("t", [1, 40])
def test_transforms_have_the_derivatives_of_the_equations(backend, t):
    given = drawn(0, t)
    for phi in ("elu", torch.sigmoid):
        loss = loss_of(backend, t, feature_map=phi)
        rows = vmap(grad(loss, (0, 1, 2)))(*(torch.stack([x, -x]) for x in given))
        ways = (grad(loss, (0, 1, 2))(*given), vjp(loss, *given)[1](torch.tensor(1.0)), [x[0] for x in rows])
        for found in ways:
            for a, b in zip(found, expected(given, feature_map=phi), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_forward_mode_has_the_derivatives_of_the_equations():
    """One test for all backends, because PyTorch imports for seconds when it first differentiates forwards."""
    for backend, t in itertools.product(HERE, (1, 40)):
        given, tangents, loss = drawn(0, t), drawn(1, t), loss_of(backend, t)
        slope = sum((a * b).sum() for a, b in zip(expected(given), tangents, strict=True))
        torch.testing.assert_close(jvp(loss, tuple(given), tuple(tangents))[1].double(), slope, rtol=1e-4, atol=1e-4)
        with forward_ad.dual_level():
            dual = loss(*map(forward_ad.make_dual, given, tangents))
            torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent.double(), slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", HERE)
def test_transforms_have_second_derivatives(backend):
    q, k, v = (x[:, :3, :1, :2].double() for x in drawn(0))

    def loss(q, backend=backend):
        return linear_attention(q, k, v, backend=backend)[0].square().sum()

    x = q.clone().requires_grad_()
    wanted = torch.autograd.functional.hessian(lambda q: reference_linear_attention(q, k, v)[0].square().sum(), x)
    torch.testing.assert_close(hessian(lambda q: loss(q, "auto"))(q), wanted)


@pytest.mark.parametrize("backend", HERE)
def test_a_gradient_that_is_batched(backend):
    q, k, v = drawn(0)
    several = torch.randn(3, 2, 40, 2, 5)
    found = vmap(vjp(lambda q: linear_attention(q, k, v, backend=backend)[0], q)[1])(several)[0]
    x = q.clone().requires_grad_()
    y, _ = linear_attention(x, k, v, backend=backend)
    for i in range(3):
        wanted = torch.autograd.grad(y, x, several[i], retain_graph=True)[0]
        torch.testing.assert_close(found[i], wanted, rtol=1e-4, atol=1e-4)


class Named(torch.Tensor):
    """A subclass that changes nothing."""


@pytest.mark.parametrize("backend", HERE)
def test_tensors_whose_memory_does_not_hold_their_values(backend):
    def run(q, k, v, g):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        y, state = linear_attention(*leaves, backend=backend)
        return [y, *state, *torch.autograd.grad(y, leaves, g)]

    given = [*drawn(0), torch.randn(2, 40, 2, 5)]
    kinds = {
        "negative": (lambda x: torch._neg_view(x), lambda x: -x),
        "zero": (lambda x: torch._efficientzerotensor(x.shape), torch.zeros_like),
        "subclass": (lambda x: x.as_subclass(Named), lambda x: x),
    }
    for name, (strange, plain) in kinds.items():
        for i in range(4):
            inputs = [[x.detach().clone() for x in given] for _ in range(2)]
            inputs[0][i], inputs[1][i] = strange(inputs[0][i]), plain(inputs[1][i])
            for a, b in zip(run(*inputs[0]), run(*inputs[1]), strict=True):
                torch.testing.assert_close(torch.as_tensor(a), b, msg=lambda m, at=(name, i): f"{at}: {m}")


@pytest.mark.parametrize("backend", HERE)
def test_nothing_that_grows_with_the_state_is_kept_for_the_backward(backend):
    sizes = {}
    for t in (1024, 4096):
        q, k, v = (torch.randn(1, t, 2, 32, requires_grad=True) for _ in range(3))
        kept = {}

        def pack(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y, _ = linear_attention(q, k, v, backend=backend)
        sizes[t] = sum(kept.values())
        assert y.grad_fn is not None
    tokens = 4096 * 2 * 4  # bytes of a number a token and head
    assert sizes[4096] < tokens * (4 * 32 + 1 + 8)
    assert sizes[4096] - sizes[1024] < tokens * (4 * 32 + 1 + 8) * 3 // 4


COMPILED = [("auto", torch.float64, 1e-9)]

COMPILED += [pytest.param(name, torch.float32, 1e-5, marks=pytest.mark.exhaustive) for name in HERE]

COMPILED += [
    pytest.param(name, torch.bfloat16, 2**-7, marks=[pytest.mark.exhaustive] * (name != HERE[0])) for name in HERE
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype", "tolerance"), COMPILED)
def test_compiled_whole_equals_eager(backend, dtype, tolerance):
    torch._dynamo.reset()
    compiled = torch.compile(linear_attention, backend="aot_eager", fullgraph=True)
    for t in (70, 1):
        q, k, v, state = inputs(t, dtype=dtype)
        mask = holes(t)
        y, new = linear_attention(q, k, v, state=state, mask=mask, backend=backend)
        again, after = compiled(q, k, v, state=state, mask=mask, backend=backend)
        compare((again, *after), (y, *new), (q, k, v, *state), tolerance)


def test_which_backend_runs_hangs_on_what_a_feature_map_makes_of_queries_and_keys():
    q, k, v, _ = inputs(3, dtype=torch.float32)
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


def test_wrong_input_is_refused_in_one_line():
    q, k, v, state = inputs(6)
    wrong = {
        "another length than q's": lambda: linear_attention(q, k[:, :3], v[:, :3]),
        "did you mean 'elu'": lambda: linear_attention(q, k, v, feature_map="elu1"),
        "with its projection": lambda: linear_attention(q, k, v, feature_map="favor"),
        "state_s [B=2, H=3, D=5, M=4] or None": lambda: linear_attention(q, k, v, state=(state.s[:1], state.z[:1])),
        "or None, found Tensor": lambda: linear_attention(q, k, v, state=state.s),
        "keeps all axes": lambda: linear_attention(q, k, v, feature_map=lambda x: x.sum(-1)),
        "there is one for": lambda: mnemos.ops.backends("softmax"),
    }
    for words, call in wrong.items():
        with pytest.raises(InputError) as error:
            call()
        assert words in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("create_graph", [False, True])
def test_checkpointing_changes_no_gradient(backend, create_graph):
    """The backward reads its saved tensors once, also where its result has a graph."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 4, requires_grad=True) for _ in range(3))

    def run(*given: torch.Tensor) -> torch.Tensor:
        return mnemos.ops.linear_attention(*given, backend=backend)[0]

    found = [
        torch.autograd.grad(y.square().sum(), [q, k, v], create_graph=create_graph)
        for y in (run(q, k, v), checkpoint(run, q, k, v, use_reentrant=False))
    ]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@needs_kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("used", ["y", "s", "z", "y, s", "y, z", "s, z"])
def test_a_missing_state_and_missing_gradients_are_zeros(used, causal):
    """The kernels are given null for them; explicit zeros have the same results, to the last bit."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 70, 2, 5, generator=g).requires_grad_() for _ in range(3))
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


@needs_kernels
@pytest.mark.parametrize("causal", [True, False])
def test_a_small_call_allocates_only_its_results(causal):
    """Allocations are most of a small call's time: y and the state, and denominators with gradient."""
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))

    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            made = getattr(function, "__name__", "")
            Counting.count += made in {"new_empty", "new_zeros", "empty_like", "zeros_like", "empty", "zeros", "expand"}
            return function(*args, **(kwargs or {}))

    with Counting():
        linear_attention(q, k, v, causal=causal, backend="native")
        assert Counting.count == 3
        given = [x.requires_grad_() for x in (q, k, v)]
        Counting.count = 0
        linear_attention(*given, causal=causal, backend="native")
        assert Counting.count == 4
