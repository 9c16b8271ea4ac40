import functools
import itertools

import pytest
import torch

import mnemos
from mnemos.ops import linear_attention
from mnemos.ops.linear_attention import BACKENDS, LinearState, chunked
from mnemos.ops.linear_attention.feature_maps import FEATURE_MAPS, elu, favor, polynomial, random_projection
from mnemos.ops.linear_attention.reference import (
    reference_bidirectional,
    reference_causal,
    reference_elu,
    reference_linear_attention,
    reference_polynomial,
    reference_relu,
    reference_similarity,
)
from mnemos.types import InputError

B, H, D, M = 2, 3, 5, 4
LENGTHS = [1, 2, 31, 32, 33, 75]
MAPS = {"elu": reference_elu, "relu": reference_relu, "polynomial": reference_polynomial}
HERE = [name for name in mnemos.ops.backends("linear_attention") if BACKENDS[name].takes(*torch.zeros(3, 1, 1, 1, 1))]


@pytest.fixture(params=HERE)
def backend(request):
    """Each that runs float32 and shorter on this processor: "auto" is the first of them alone."""
    return request.param


@pytest.fixture
def poisoned():
    """Memory that nothing has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["one segment", "a segment a chunk", "two chunks a segment"])
def segments(request, monkeypatch):
    numbers = {"one segment": 2**18, "a segment a chunk": 1, "two chunks a segment": 2 * B * H * 32 * D}[request.param]
    monkeypatch.setattr(chunked, "SEGMENT_NUMBERS", {"cpu": numbers})


def inputs(t, n=None, dtype=torch.float64, seed=0, width=M, rows=B):
    """q, k, v, s, z: leaves, and none of q, k, v contiguous."""
    g = torch.Generator().manual_seed(seed)

    def strange(length, last):
        # [H, B, last, T] in memory
        x = torch.randn(H, rows, last, length, generator=g, dtype=torch.float64).to(dtype)
        return x.permute(1, 3, 0, 2).detach().requires_grad_()

    q, k, v = strange(t, D), strange(n or t, D), strange(n or t, width)
    s = torch.rand(rows, H, D, width, generator=g, dtype=torch.float64)
    z = torch.rand(rows, H, D, generator=g, dtype=torch.float64)
    state = LinearState(s.requires_grad_(), z.requires_grad_())
    return q, k, v, state


def weighted(outputs, seed=9):
    """A loss of all outputs; the gradient of y is not contiguous."""
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o.shape[::-1], generator=g, dtype=torch.float64) for o in outputs]
    return sum((o.double() * w.permute(*reversed(range(w.dim())))).sum() for o, w in zip(outputs, weights, strict=True))


def holes(t, rows=B):
    mask = torch.rand(rows, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, : t // 2] = False
    return mask


def compare(found, expected, given, tolerance=1e-9):
    found_grads = torch.autograd.grad(weighted(found), given, retain_graph=True)
    expected_grads = torch.autograd.grad(weighted(expected), given, retain_graph=True)
    for a, b in zip((*found, *found_grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("t", LENGTHS)
def test_causal_equals_the_equations(t, masked, segments, poisoned):
    q, k, v, state = inputs(t)
    mask = holes(t) if masked else None
    y, new = linear_attention(q, k, v, state=state, mask=mask, eps=0.1)
    expected = reference_linear_attention(q, k, v, reference_causal, state=state, mask=mask, eps=0.1)
    compare((y, *new), expected, (q, k, v, *state))


@pytest.mark.parametrize(("t", "n"), [(1, 1), (7, 7), (7, 4), (1, 9), (9, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_bidirectional_equals_the_equations(t, n, masked, poisoned):
    q, k, v, state = inputs(t, n)
    mask = holes(n) if masked else None
    y, new = linear_attention(q, k, v, causal=False, state=state, mask=mask)
    expected = reference_linear_attention(q, k, v, reference_bidirectional, state=state, mask=mask)
    compare((y, *new), expected, (q, k, v, *state))


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


def test_the_three_schedules_agree():
    """Eq. 8 (similarities), 9 to 12 (sums) and 16 to 20 (a call a token) are one function."""
    q, k, v, state = inputs(45)
    similar = reference_linear_attention(q, k, v, reference_similarity, state=state)
    y, new = linear_attention(q, k, v, state=state)
    compare((y, *new), similar, (q, k, v, *state))
    steps, moving = [], state
    for i in range(45):
        y, moving = linear_attention(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], state=moving)
        steps.append(y)
    compare((torch.cat(steps, 1), *moving), similar, (q, k, v, *state))


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


def test_cut_anywhere_and_resumed():
    q, k, v, state = inputs(70)
    whole, end = linear_attention(q, k, v, state=state)
    for cuts in ([1], [69], [32, 33], [0, 5, 5, 70], [7, 8, 9, 50]):
        parts, moving = [], state
        for a, b in itertools.pairwise([0, *cuts, 70]):
            y, moving = linear_attention(q[:, a:b], k[:, a:b], v[:, a:b], state=moving)
            assert y.shape == (B, b - a, H, M)
            parts.append(y)
        compare((torch.cat(parts, 1), *moving), (whole, *end), (q, k, v, *state))


def test_bidirectional_calls_add_up():
    q, k, v, _ = inputs(8)
    whole, end = linear_attention(q, k, v, causal=False)
    _, first = linear_attention(q[:, :3], k[:, :3], v[:, :3], causal=False)
    y, both = linear_attention(q, k[:, 3:], v[:, 3:], causal=False, state=first)
    compare((y, *both), (whole, *end), (q, k, v))


def test_nothing_given_is_changed_and_a_stream_forks():
    with torch.no_grad():
        q, k, v, state = inputs(40)
        before = [x.clone() for x in (q, k, v, *state)]
        _, middle = linear_attention(q, k, v, state=state)
        kept = [x.clone() for x in middle]
        a, _ = linear_attention(q[:, :1], k[:, :1], v[:, :1], state=middle)
        b, after = linear_attention(q[:, 1:], k[:, 1:], v[:, 1:], state=middle)
        c, _ = linear_attention(q[:, :1], k[:, :1], v[:, :1], state=middle)
        linear_attention(q[:, :0], k[:, :0], v[:, :0], state=after)[1].s.add_(1)
        assert torch.equal(a, c)
        assert not torch.equal(a, b[:, :1])
        for x, y in zip((q, k, v, *state, *middle), (*before, *kept), strict=True):
            assert torch.equal(x, y)
        again, _ = linear_attention(q[:, 1:], k[:, 1:], v[:, 1:], state=middle)
        assert torch.equal(b, again)


def test_an_output_changed_in_place_is_refused_by_backward():
    q, k, v, _ = inputs(40)
    y, _ = linear_attention(q, k, v)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_future_cannot_change_the_past(segments):
    q, k, v, _ = inputs(70)
    whole, _ = linear_attention(q, k, v)
    for j in (0, 31, 32, 69):
        for x in (k, v):
            other = x.detach().clone()
            other[:, j] += 1
            y, _ = linear_attention(q, *((other, v) if x is k else (k, other)))
            assert torch.equal(y[:, :j], whole[:, :j])
            assert not torch.equal(y[:, j], whole[:, j])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t", [1, 40])
def test_padding_may_hold_anything(causal, t):
    q, k, v, _ = inputs(t)
    mask = holes(t)
    mask[0, -1] = False
    clean, end = linear_attention(q, k, v, causal, mask=mask)
    dirty = [torch.where(mask[..., None, None], x, torch.nan).detach().requires_grad_() for x in (k, v)]
    y, state = linear_attention(q, *dirty, causal, mask=mask)
    for a, b in zip((y, *state), (clean, *end), strict=True):
        assert torch.equal(a, b)
    before, after = torch.autograd.grad(weighted([clean]), (q, v)), torch.autograd.grad(weighted([y]), (q, dirty[1]))
    for a, b in zip(after, before, strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def test_a_row_without_a_valid_key_reads_zero():
    q, k, v, _ = inputs(40)
    mask = torch.zeros(B, 40, dtype=torch.bool)
    for causal, t in ((True, 40), (True, 1), (False, 40)):
        y, state = linear_attention(q[:, :t], k[:, :t], v[:, :t], causal, mask=mask[:, :t])
        assert not y.any()
        assert not state.s.any()
        assert not state.z.any()


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


def test_elu_plus_one_does_not_cancel():
    x = torch.tensor([-80.0, -18.0, -6.25, -1e-9, 0.0, 1e-9, 3.0], requires_grad=True)
    exact = reference_elu(x.detach().double())
    assert (elu(x) > 0).all()
    torch.testing.assert_close(elu(x).double(), exact, rtol=1e-6, atol=0)
    slope = torch.where(x < 0, x.detach().double().exp(), 1.0)
    torch.testing.assert_close(torch.autograd.grad(elu(x).sum(), x)[0].double(), slope, rtol=1e-6, atol=0)
    torch.testing.assert_close(FEATURE_MAPS["elu"].slope(elu(x)).double(), slope, rtol=1e-6, atol=0)
    low = elu(x.to(torch.bfloat16)).double()
    torch.testing.assert_close(low, exact, rtol=2**-7, atol=0)


def test_the_slope_at_zero_is_one_on_every_path():
    for t, causal in ((1, True), (40, True), (3, False)):
        q, k, v, _ = inputs(t)
        nothing = torch.zeros_like(q).requires_grad_()
        y, _ = linear_attention(nothing, k, v, causal)
        expected, _, _ = reference_linear_attention(
            nothing, k, v, reference_causal if causal else reference_bidirectional
        )
        compare([y], [expected], [nothing])


def test_polynomial_and_favor_are_their_kernels():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 50, D, generator=g, dtype=torch.float64)
    torch.testing.assert_close((polynomial(q) * polynomial(k)).sum(-1), (q * k).sum(-1).square())
    assert polynomial(q).shape == (50, D * (D + 1) // 2)
    q, k = q / 2, k / 2  # a random feature's relative variance grows as exp(|q + k|²/√D)
    projection = random_projection(200_000, D, g)
    assert projection.shape == (200_000, D)
    similarity = (favor(q, projection) * favor(k, projection)).sum(-1)
    kernel = torch.exp((q * k).sum(-1) / D**0.5)
    assert ((similarity - kernel) / kernel).abs().max() < 0.03
    assert projection.mean(0).abs().max() < 0.02  # the signs of an uncorrected QR are not even
    block = projection[:D] / projection[:D].norm(dim=1, keepdim=True)
    torch.testing.assert_close(block @ block.T, torch.eye(D), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_a_float32_state(dtype, backend):
    for t, causal in ((1, True), (70, True), (9, False)):
        q, k, v, state = inputs(t, dtype=dtype)
        y, new = linear_attention(q, k, v, causal, state=state, backend=backend)
        assert y.dtype == dtype
        assert (new.s.dtype, new.z.dtype) == (torch.float32, torch.float32)
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = reference_linear_attention(
            *exact, reference_causal if causal else reference_bidirectional, state=state
        )
        torch.testing.assert_close(y.double(), expected[0], rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(new.s.double(), expected[1], rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad(weighted([y]), (q, k, v))
        for a, b in zip(found, torch.autograd.grad(weighted(expected[:1]), exact), strict=True):
            assert a.dtype == dtype
            assert (a.double() - b).abs().max() < 2e-2 * b.abs().max()


@pytest.mark.parametrize("step", [512, 1])
def test_a_long_stream_of_bfloat16_does_not_stagnate(step, backend):
    total = 4096 if step == 1 else 32768
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, total, 1, 4, generator=g).to(torch.bfloat16) for _ in range(3))
    v = v + 1
    state = None
    with torch.no_grad():
        for a in range(0, total, step):
            y, state = linear_attention(*(x[:, a : a + step] for x in (q, k, v)), state=state, backend=backend)
    phi = reference_elu(k.double())
    torch.testing.assert_close(state.z.double(), phi.sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(state.s.double(), torch.einsum("bthd,bthm->bhdm", phi, v.double()), rtol=1e-4, atol=0)
    assert y.dtype == torch.bfloat16


def test_autocast_changes_nothing(backend):
    for t, causal in ((1, True), (70, True), (9, False)):
        q, k, v, _ = inputs(t, dtype=torch.float32)
        y, state = linear_attention(q, k, v, causal, backend=backend)
        plain = torch.autograd.grad(weighted([y]), (q, k, v))
        with torch.autocast("cpu", torch.bfloat16):
            low, same = linear_attention(q, k, v, causal, backend=backend)
            # A backward within autocast is the one of torch's own operations wherever they are used.
            inside = causal and t > 1
            found = torch.autograd.grad(weighted([low]), (q, k, v)) if inside else None
        found = found or torch.autograd.grad(weighted([low]), (q, k, v))
        assert torch.equal(low, y)
        assert torch.equal(same.s, state.s)
        for a, b in zip(found, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


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
COMPILED += [(name, *pair) for name in HERE for pair in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7))]


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


def test_empty_calls():
    q, k, v, state = inputs(3)
    y, same = linear_attention(q[:, :0], k[:, :0], v[:, :0], state=state)
    assert y.shape == (B, 0, H, M)
    assert torch.equal(same.s, state.s)
    y, new = linear_attention(q[:0], k[:0], v[:0])
    assert y.shape == (0, 3, H, M)
    assert new.s.shape == (0, H, D, M)
    assert linear_attention(q, k[:, :0], v[:, :0], causal=False)[0].abs().max() == 0


def test_backends_are_listed_best_first_and_agree():
    names = mnemos.ops.backends("linear_attention")
    assert names[-1] == "chunked"
    q, k, v, state = inputs(70, dtype=torch.float32)
    expected = reference_linear_attention(q, k, v, state=state)
    for name in names:
        try:
            y, new = linear_attention(q, k, v, state=state, backend=name)
        except InputError:  # for another device
            continue
        compare((y, *new), expected, (q, k, v, *state), 2e-4)


def test_wrong_input_is_refused_in_one_line():
    q, k, v, state = inputs(6)
    wrong = {
        "another length than q's": lambda: linear_attention(q, k[:, :3], v[:, :3]),
        "expected k": lambda: linear_attention(q, k[..., :3], v),
        "expected floating": lambda: linear_attention(q, k, v[0]),
        "found q torch.int64": lambda: linear_attention(q.long(), k, v),
        "did you mean 'elu'": lambda: linear_attention(q, k, v, feature_map="elu1"),
        "known: elu, relu, polynomial": lambda: linear_attention(q, k, v, feature_map="zzz"),
        "needs its projection": lambda: linear_attention(q, k, v, feature_map="favor"),
        "did you mean 'chunked'": lambda: linear_attention(q, k, v, backend="chunk"),
        "mask of booleans": lambda: linear_attention(q, k, v, mask=torch.ones(B, 6)),
        "mask of booleans (": lambda: linear_attention(q, k, v, mask=torch.ones(B, 5).bool()),
        "expected a state": lambda: linear_attention(q, k, v, state=(state.s[..., :2], state.z)),
        "expected a state of s (2, 3, 5, 4)": lambda: linear_attention(q, k, v, state=(state.s[:1], state.z[:1])),
        "z (2, 3, 5), floating": lambda: linear_attention(q, k, v, state=(state.s, state.z[..., :3])),
        "found torch.int64": lambda: linear_attention(q, k, v, state=(state.s.long(), state.z)),
        "or None; found Tensor": lambda: linear_attention(q, k, v, state=state.s),
        "or None; found tuple": lambda: linear_attention(q, k, v, state=(*state, state.z)),
        "found torch.float64 (2, 3, 5, 4) on meta": lambda: linear_attention(
            q, k, v, state=(state.s.to("meta"), state.z)
        ),
        "on one device, found cpu, meta, cpu": lambda: linear_attention(q, k.to("meta"), v),
        "expected k (2, 6, 3, 5) and v": lambda: linear_attention(q, k, v[:, :, :2]),
        "found torch.float32 (2, 6)": lambda: linear_attention(q, k, v, mask=torch.zeros(B, 6)),
        "keep all axes": lambda: linear_attention(q, k, v, feature_map=lambda x: x.sum(-1)),
        "at least 0": lambda: linear_attention(q, k, v, eps=-1.0),
        "there is one for": lambda: mnemos.ops.backends("softmax"),
    }
    for words, call in wrong.items():
        with pytest.raises(InputError) as error:
            call()
        assert words in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("t", [1, 6])
def test_types_that_differ_are_taken_at_the_widest(t, backend):
    """y has v's type and the state the sums': nothing is refused that has a meaning."""
    q, k, v, state = inputs(t, dtype=torch.float32)
    y, new = linear_attention(q.half(), k.bfloat16(), v, state=state, backend=backend)
    expected, _ = linear_attention(q.half().float(), k.bfloat16().float(), v, state=state, backend=backend)
    assert (y.dtype, new.s.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("feature_map", ["elu", "relu", "polynomial", torch.exp])
def test_the_equations_are_a_backend_too(feature_map):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.rand(2, 5) < 0.7
    found = []
    for backend in ("reference", "chunked"):
        y, state = mnemos.ops.linear_attention(q, k, v, True, feature_map, mask=mask, backend=backend)
        found.append([y, *state, *torch.autograd.grad(y.sin().sum() + state.s.sin().sum(), [q, k, v])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert mnemos.ops.which("linear_attention", q, k, v) != "reference"


@pytest.mark.parametrize("backend", HERE)
def test_a_gradient_penalty_is_refused_and_no_gradient_silently_lost(backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 4, requires_grad=True) for _ in range(3))
    y, _ = mnemos.ops.linear_attention(q, k, v, backend=backend)
    grads = torch.autograd.grad(y.sum(), [q, k, v], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        sum(g.square().sum() for g in grads).backward()


# chunked writes in place, which that kind of vmap has no rule for.
@pytest.mark.parametrize("backend", [name for name in HERE if name != "chunked"])
def test_gradients_of_several_outputs_at_once(backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 4, requires_grad=True) for _ in range(3))
    y, _ = mnemos.ops.linear_attention(q, k, v, backend=backend)
    several = torch.randn(3, *y.shape)
    found = torch.autograd.grad(y, [q, k, v], several, is_grads_batched=True, retain_graph=True)
    for i, upstream in enumerate(several):
        for a, b in zip(found, torch.autograd.grad(y, [q, k, v], upstream, retain_graph=True), strict=True):
            torch.testing.assert_close(a[i], b)
