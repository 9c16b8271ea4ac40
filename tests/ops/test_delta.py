"""The delta rule and decayed attention: equations, hostile numbers, and what a call promises beside its numbers."""

import itertools

import pytest
import torch
from delta_cases import EXACT, HERE, KINDS, B, D, H, compare, equations, holes, inputs, run, starts
from torch.func import grad, vmap

import mnemos
from mnemos.ops import decayed_attention, delta_rule
from mnemos.ops.delta import chunked
from mnemos.types import InputError

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129]


@pytest.fixture(params=["one slab", "a slab a chunk"])
def slabs(request, monkeypatch):
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": {"one slab": 2**18, "a slab a chunk": 1}[request.param]})


@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", LENGTHS)
def test_every_length_equals_the_equations(t, kind, backend, poisoned):
    dtype, tolerance = EXACT[backend]
    given = inputs(kind, t, dtype)
    compare(run(given, backend=backend), equations(given), given, tolerance)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["state", "nothing"])
@pytest.mark.parametrize("folded", ["mask", "resets", "mask and resets"])
def test_padding_and_resets_equal_the_equations(folded, start, kind, backend, slabs):
    dtype, tolerance = EXACT[backend]
    given = inputs(kind, 70, dtype)
    if start == "nothing":
        del given["state"]
    options = {"mask": holes(70)} if "mask" in folded else {}
    if "resets" in folded:
        options["resets"] = starts(70)
    compare(run(given, backend=backend, scale=0.7, **options), equations(given, scale=0.7, **options), given, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind, monkeypatch):
    """First derivatives by finite differences, of every output for every input."""
    monkeypatch.setattr(chunked, "CHUNK", 4)
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": 1})
    for t in (1, 11):
        given = inputs(kind, t)
        if "decay" in given:
            given["decay"].data.sub_(0.1)  # finite differences would step above 0
        assert torch.autograd.gradcheck(
            lambda *leaves, given=given: run(dict(zip(given, leaves, strict=True))), (*given.values(),), fast_mode=True
        )


@pytest.mark.parametrize("backend", HERE)
def test_packed_sequences_are_those_sequences(backend):
    """Of two rows with resets at other tokens, and of the same sequences in calls of their own."""
    given = inputs("gated delta per channel", 70, torch.float32)
    del given["state"]
    resets = torch.zeros(B, 70, dtype=torch.bool)
    ends = [[0, 20, 64, 70], [0, 1, 2, 70]]
    for row, cuts in enumerate(ends):
        resets[row, cuts[:-1]] = True
    packed, _ = run(given, resets=resets, backend=backend)
    for row, cuts in enumerate(ends):
        for a, b in itertools.pairwise(cuts):
            alone, _ = run({name: x[row : row + 1, a:b] for name, x in given.items()}, backend=backend)
            torch.testing.assert_close(packed[row : row + 1, a:b], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", HERE)
def test_keys_are_normalised_inside(backend):
    dtype, tolerance = EXACT[backend]
    given = inputs("gated delta", 20, dtype)
    given["k"].data[0, 3] = 0
    compare(run(given, normalise_keys=True, backend=backend), equations(given, normalise_keys=True), given, tolerance)


@pytest.mark.parametrize("backend", HERE)
def test_a_key_that_is_written_again_has_its_new_value(backend):
    """beta 1 replaces what a key of length 1 held, beta 0 writes nothing."""
    g = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(1, 3, 1, 8, generator=g), dim=-1)[:, [0, 1, 2, 0, 1, 2]]
    v = torch.randn(1, 6, 1, 4, generator=g)
    y, _ = mnemos.ops.delta_rule(k, k, v, torch.ones(1, 6, 1), scale=1.0, backend=backend)
    torch.testing.assert_close(y, v, rtol=0, atol=2e-6)
    beta = torch.tensor([1.0, 1, 1, 0, 0, 0]).view(1, 6, 1)
    _, held = mnemos.ops.delta_rule(k[:, :3], k[:, :3], v[:, :3], beta[:, :3], backend=backend)
    _, after = mnemos.ops.delta_rule(k, k, v, beta, backend=backend)
    torch.testing.assert_close(after, held, rtol=0, atol=1e-7)


DECAYED = [kind for kind in KINDS if kind != "delta"]


@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", DECAYED)
@pytest.mark.parametrize(
    "levels",
    [[-2.5], [-120.0], [-torch.inf], [0.0], [0.0, -1e-3, -2.5, -14.0, -120.0], [-1e-3, -120.0, -torch.inf, -1e4]],
    ids=["-2.5", "-120", "-inf", "0", "mixed", "mixed with -inf"],
)
def test_strong_weak_and_mixed_decays(levels, kind, backend):
    """e^{+G} is infinite from −2.5 a token on, and the difference of two sums of decays of −120 has lost a −0.001."""
    given = inputs(kind, 70, torch.float32)
    drawn = torch.randint(len(levels), given["decay"].shape, generator=torch.Generator().manual_seed(1))
    given["decay"].data.copy_(torch.tensor(levels)[drawn])
    compare(run(given, backend=backend), equations(given), given, 2e-6)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", DECAYED)
def test_tiny_gradients_of_strong_decays_keep_their_digits(kind, backend):
    """Each is a sum of positive numbers here; as a difference of sums over rows and columns it is rounding noise.

    With small betas, whose corrections, which are differences, are a small part of each sum.
    """
    given = inputs(kind, 70, torch.float32)
    for name, x in given.items():
        x.data.abs_().mul_(0.05 if name == "beta" else 1)
    drawn = torch.rand(given["decay"].shape, generator=torch.Generator().manual_seed(1))
    given["decay"].data.copy_(torch.where(drawn < 0.5, -0.01 * drawn, -30 * drawn))
    found, expected = (torch.autograd.grad(f.sum() + s.sum(), given["decay"]) for f, s in _both(given, backend))
    assert expected[0].abs().min() < 1e-9 * expected[0].abs().max()
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4 if "beta" in given else 3e-5, atol=0)


def _both(given, backend):
    return run(given, backend=backend), equations(given)


@pytest.mark.parametrize("backend", HERE)
def test_no_decay_is_a_decay_of_zeros(backend):
    """Gradients of all inputs too: as a chunk's transition, W has the gradients of keys and betas that U lacks."""
    given = inputs("delta", 129, torch.float32)
    zeros = torch.zeros(given["beta"].shape)
    one, two = run(given, backend=backend), mnemos.ops.delta_rule(**given, decay=zeros, backend=backend)
    compare(one, two, given, 2e-6)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("length", [2.0, 4.0])
def test_keys_beyond_the_bound_grow_as_the_equations_say(length, backend):
    """β‖k‖² of 2 is the bound; of 4 each token multiplies by −3. Each token is as accurate as its own size allows.

    The gradients, which grow from the last token to the first, are compared with their largest.
    """
    given = {name: x for name, x in inputs("delta", 64, torch.float32).items() if name != "state"}
    keys = torch.nn.functional.normalize(given["k"].detach() + 1, dim=-1) * length**0.5
    given["k"], given["beta"] = keys.requires_grad_(), torch.ones_like(given["beta"]).requires_grad_()
    compare(*_both(given, backend), given, 3e-5)
    found, expected = (y.detach().double() for y, _ in _both(given, backend))
    size = expected.abs().amax((-1), keepdim=True)
    assert size.max() > (1e9 if length > 2 else 1)
    assert ((found - expected).abs() / size.cummax(1).values).max() < 3e-5


def test_the_gradient_of_a_single_normalised_channel():
    """It is 1e-6 of the two parts whose difference it is: their rounding errors would be larger than it."""
    g = torch.Generator().manual_seed(0)
    sizes = {"q": (1, 1.0), "k": (1, 0.3), "v": (100, 30.0)}
    given = {x: (size * torch.randn(2, 40, 2, m, generator=g)).requires_grad_() for x, (m, size) in sizes.items()}
    given["beta"] = torch.ones(2, 40, 2, requires_grad=True)
    compare(run(given, normalise_keys=True), equations(given, normalise_keys=True), given, 2e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_computed_in_float32(kind, backend):
    given = inputs(kind, 70, torch.bfloat16)
    y, state = run(given, backend=backend)
    exact, end = equations(given)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(state.double(), end, rtol=1e-5, atol=1e-5)
    # The gradients are those of the equations, rounded once; also where the caller computes in half precision.
    expected = torch.autograd.grad(exact.sum() + end.sum(), list(given.values()))
    found = torch.autograd.grad(y.float().sum() + state.sum(), list(given.values()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2**-7, atol=2e-4)
    given = {name: x.detach().float().requires_grad_() for name, x in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        again = run(given, backend=backend)
        torch.testing.assert_close(again[0].double(), exact, rtol=1e-5, atol=1e-5)
        compare(again, equations(given), given, 1e-5)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nothing_travels_back_in_time(name, kind, backend):
    with torch.no_grad():
        given = inputs(kind, 70, torch.float32)
        clean, _ = run(given, backend=backend)
        given[name][0, 21, 0, 1] = torch.nan
        y, state = run(given, backend=backend)
    torch.testing.assert_close(y[:, :21], clean[:, :21])
    torch.testing.assert_close(y[1], clean[1])
    torch.testing.assert_close(y[:, :, 2:], clean[:, :, 2:])
    assert not y[0, 21, 0].isfinite().all()
    if name == "q":
        torch.testing.assert_close(y[:, 22:], clean[:, 22:])
    else:
        assert not state[0, 0].isfinite().all()


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(("beta", "bound"), [(2.0, 600 * 2**-23), (1.99, 2e-5)])
def test_a_key_that_is_repeated_without_forgetting_has_the_error_that_the_page_names(beta, bound, backend):
    """β‖k‖² = 2 reflects the state again and again: what the chunks round of ‖k‖² adds up, linearly."""
    generator = torch.Generator().manual_seed(1)
    q, v = (torch.randn(1, 600, 1, n, generator=generator) for n in (64, 32))
    k = torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
    state, beta = torch.randn(1, 1, 64, 32, generator=generator), torch.full((1, 600, 1), beta)
    s, key = state[0, 0].double(), k.double()
    for t in range(600):
        s = s + torch.outer(key, beta[0, t].double() * (v[0, t, 0].double() - key @ s))
    end = mnemos.ops.delta_rule(q, k.expand_as(q), v, beta, None, state, backend=backend)[1][0, 0]
    assert (end - s).abs().max() <= bound * s.abs().max()


@pytest.mark.parametrize("backend", HERE)
def test_small_weights_leave_the_gradient_of_values_exact(backend):
    """Keys of 1e-4 give weights of 1e-8: what is added and taken off again on the way would be all that is left."""
    torch.manual_seed(0)
    q, k, v = (1e-4 * torch.randn(1, 40, 2, 8) for _ in range(3))
    found, wanted = [], []
    for dtype, name, kept in ((torch.float32, backend, found), (torch.float64, "chunked", wanted)):
        values = v.to(dtype).requires_grad_()
        still = torch.zeros(1, 40, 2, dtype=dtype)
        y, _ = mnemos.ops.decayed_attention(q.to(dtype), k.to(dtype), values, still, backend=name)
        kept.append(torch.autograd.grad(y.sum(), values)[0].double())
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-6 * float(wanted[0].abs().max()))


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("channels", [False, True])
def test_kept_for_the_backward_are_the_inputs_and_few_states(channels, backend):
    """At most two numbers per token and channel beside the inputs."""
    t, width = 2048, 32
    given = [torch.randn(1, t, 2, width, requires_grad=True) for _ in range(3)]
    decay = -torch.rand(1, t, 2, *[width] * channels)
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        delta_rule(*given, torch.rand(1, t, 2), decay, backend=backend)
    inside = sum(kept.values()) - sum(x.untyped_storage().nbytes() for x in (*given, decay))
    assert 0 < inside < 2 * 4 * t * 2 * width


@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [1, 20])
def test_transforms_have_the_derivatives_of_the_equations(t, kind, backend):
    given = inputs(kind, t, torch.float32)
    mask = holes(t)

    def loss(given, of):
        y, state = of(given, mask=mask)
        return y.square().sum() + state.sin().sum()

    plain = {name: x.detach() for name, x in given.items()}
    expected = torch.autograd.grad(loss(given, equations), list(given.values()))
    rows = vmap(grad(lambda x: loss(x, lambda *a, **o: run(*a, backend=backend, **o))))(
        {name: torch.stack([x, x / 2]) for name, x in plain.items()}
    )
    for (name, x), y in zip(rows.items(), expected, strict=True):
        torch.testing.assert_close(x[0], y, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.exhaustive] * (k not in KINDS[2:4])) for k in KINDS]
)
def test_compiled_whole_equals_eager(kind, backend, exhaustive, monkeypatch):
    torch._dynamo.reset()
    dtype, tolerance = EXACT[backend]
    lengths = (70, 1)
    if not exhaustive and backend != "native":  # the halves of a chunk take PyTorch's compiler seconds
        monkeypatch.setattr(chunked, "CHUNK", 8)
        lengths = (11,)
    for t in lengths:
        given = inputs(kind, t, dtype)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        compare(compiled(given, mask=holes(t), backend=backend), run(given, mask=holes(t)), given, tolerance)


def test_a_wrong_call_says_what_was_expected():
    given = {name: x.detach() for name, x in inputs("gated delta", 4, torch.float32).items()}
    wrong = {
        "H a multiple of K, found": {
            "v": given["v"][:, :, :3],
            "beta": given["beta"][..., :3],
            "decay": None,
            "state": None,
        },
        r"floating k \[B=2, T=4, K=2, D=5\], found torch.float32 \[2, 3, 2, 5\]; .* use transpose": {
            "k": given["k"][:, :3]
        },
        "D at least 1": {"q": given["q"][..., :0], "k": given["k"][..., :0], "state": None},
        "or None, found -0.1": {"decay": -0.1},
        "as scale, found 'x'": {"scale": "x"},
        "use decayed_attention": {"beta": None},
        "found nan": {"decay": given["decay"].log()},
        "use factor.log": {"decay": given["decay"].exp()},
        "did you mean 'chunked'": {"backend": "chunk"},
    }
    for message, change in wrong.items():
        with pytest.raises(InputError, match=message):
            delta_rule(**{**given, **change})
    mask = torch.zeros(B, 4, dtype=torch.bool)
    delta_rule(**{**given, "decay": given["decay"].exp()}, mask=mask)  # what is invalid has no decay
    del given["beta"]
    with pytest.raises(InputError, match=r"use factor\.log"):
        decayed_attention(**{**given, "decay": torch.full((B, 4, H, D), 0.5)})
