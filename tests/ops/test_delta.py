"""The delta rule and decayed attention: equations, hostile numbers, and what a call promises beside its numbers."""

import pytest
import torch
from delta_cases import EXACT, HERE, KINDS, B, D, H, equations, inputs, run
from kernel_cases import FOLDED, agree, folds, kept_bytes

from mnemos.ops import decayed_attention, delta_rule
from mnemos.ops.delta import chunked
from mnemos.types import InputError

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129]
DECAYED = [kind for kind in KINDS if kind != "delta"]
each_backend = pytest.mark.parametrize("backend", HERE)
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["one slab", "a slab a chunk"])
def slabs(request, monkeypatch):
    monkeypatch.setattr(chunked, "SLAB_NUMBERS", {"cpu": {"one slab": 2**18, "a slab a chunk": 1}[request.param]})


@pytest.mark.each_value
@each_backend
@each_kind
@pytest.mark.parametrize("t", LENGTHS)
def test_every_length_equals_the_equations(t, kind, backend, poisoned):
    dtype, tolerance = EXACT[backend]
    agree(run, equations, inputs(kind, t, dtype), tolerance, backend=backend)


@each_backend
@each_kind
@pytest.mark.parametrize("start", ["state", "nothing"])
@pytest.mark.parametrize("folded", FOLDED[1:])
def test_padding_and_resets_equal_the_equations(folded, start, kind, backend, slabs):
    dtype, tolerance = EXACT[backend]
    given = inputs(kind, 70, dtype)
    if start == "nothing":
        del given["state"]
    agree(run, equations, given, tolerance, backend=backend, scale=0.7, **folds(folded, B, 70))


@each_backend
def test_keys_are_normalised_inside(backend):
    dtype, tolerance = EXACT[backend]
    given = inputs("gated delta", 20, dtype)
    given["k"].data[0, 3] = 0
    agree(run, equations, given, tolerance, normalise_keys=True, backend=backend)


def test_the_gradient_of_a_single_normalised_channel():
    """It is 1e-6 of the two parts whose difference it is: their rounding errors would be larger than it."""
    g = torch.Generator().manual_seed(0)
    sizes = {"q": (1, 1.0), "k": (1, 0.3), "v": (100, 30.0)}
    given = {x: (size * torch.randn(2, 40, 2, m, generator=g)).requires_grad_() for x, (m, size) in sizes.items()}
    given["beta"] = torch.ones(2, 40, 2, requires_grad=True)
    agree(run, equations, given, 2e-6, normalise_keys=True)


@pytest.mark.each_value
@each_backend
@pytest.mark.parametrize("kind", DECAYED)
@pytest.mark.parametrize(
    "levels",
    [[-2.5], [-120.0], [-torch.inf], [0.0], [0.0, -1e-3, -2.5, -14.0, -120.0], [-1e-3, -120.0, -torch.inf, -1e4]],
    ids=str,
)
def test_strong_weak_and_mixed_decays(levels, kind, backend):
    """e^{+G} is infinite from −2.5 a token on, and the difference of two sums of decays of −120 has lost a −0.001."""
    given = inputs(kind, 70, torch.float32)
    drawn = torch.randint(len(levels), given["decay"].shape, generator=torch.Generator().manual_seed(1))
    given["decay"].data.copy_(torch.tensor(levels)[drawn])
    agree(run, equations, given, 2e-6, backend=backend)


@each_backend
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
    both = run(backend, **given), equations(**given)
    found, expected = (torch.autograd.grad(y.sum() + s.sum(), given["decay"])[0] for y, s in both)
    assert expected.abs().min() < 1e-9 * expected.abs().max()
    torch.testing.assert_close(found, expected, rtol=1e-4 if "beta" in given else 3e-5, atol=0)


@each_backend
def test_no_decay_is_a_decay_of_zeros(backend):
    """Gradients of all inputs too: as a chunk's transition, W has the gradients of keys and betas that U lacks."""
    given = inputs("delta", 129, torch.float32)
    zeros = torch.zeros(given["beta"].shape)
    agree(lambda **given: run(backend, **given, decay=zeros), equations, given, 2e-6)


@each_backend
@pytest.mark.parametrize("length", [2.0, 4.0])
def test_keys_beyond_the_bound_grow_as_the_equations_say(length, backend):
    """β‖k‖² of 2 is the bound; of 4 each token multiplies by −3. Each token is as accurate as its own size allows.

    The gradients, which grow from the last token to the first, are compared with their largest.
    """
    given = {name: x for name, x in inputs("delta", 64, torch.float32).items() if name != "state"}
    keys = torch.nn.functional.normalize(given["k"].detach() + 1, dim=-1) * length**0.5
    given["k"], given["beta"] = keys.requires_grad_(), torch.ones_like(given["beta"]).requires_grad_()
    agree(run, equations, given, 3e-5, backend=backend)
    found, expected = (y.detach().double() for y, _ in (run(backend, **given), equations(**given)))
    size = expected.abs().amax((-1), keepdim=True)
    assert size.max() > (1e9 if length > 2 else 1)
    assert ((found - expected).abs() / size.cummax(1).values).max() < 3e-5


@each_backend
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
    end = delta_rule(q, k.expand_as(q), v, beta, None, state, backend=backend)[1][0, 0]
    assert (end - s).abs().max() <= bound * s.abs().max()


@each_backend
def test_small_weights_leave_the_gradient_of_values_exact(backend):
    """Keys of 1e-4 give weights of 1e-8: what is added and taken off again on the way would be all that is left."""
    torch.manual_seed(0)
    q, k, v = (1e-4 * torch.randn(1, 40, 2, 8) for _ in range(3))
    found, wanted = [], []
    for dtype, name, kept in ((torch.float32, backend, found), (torch.float64, "chunked", wanted)):
        values = v.to(dtype).requires_grad_()
        still = torch.zeros(1, 40, 2, dtype=dtype)
        y, _ = decayed_attention(q.to(dtype), k.to(dtype), values, still, backend=name)
        kept.append(torch.autograd.grad(y.sum(), values)[0].double())
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-6 * float(wanted[0].abs().max()))


@pytest.mark.each_value
@each_backend
@each_kind
def test_half_precision_is_computed_in_float32(kind, backend):
    """Outputs and gradients are rounded once; where the caller computes in half precision nothing is."""
    given = inputs(kind, 70, torch.bfloat16)
    y, state = run(backend, **given)
    exact, end = equations(**given)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(state.double(), end, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(exact.sum() + end.sum(), list(given.values()))
    found = torch.autograd.grad(y.float().sum() + state.sum(), list(given.values()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=2**-7, atol=2e-4)
    given = {name: x.detach().float().requires_grad_() for name, x in given.items()}
    with torch.autocast("cpu", torch.bfloat16):
        agree(run, equations, given, 1e-5, backend=backend)


@each_backend
@pytest.mark.parametrize("channels", [False, True])
def test_kept_for_the_backward_are_the_inputs_and_few_states(channels, backend):
    """At most two numbers per token and channel beside the inputs."""
    t, width = 2048, 32
    given = [torch.randn(1, t, 2, width, requires_grad=True) for _ in range(3)]
    decay = -torch.rand(1, t, 2, *[width] * channels)
    inside = kept_bytes(lambda: delta_rule(*given, torch.rand(1, t, 2), decay, backend=backend), *given, decay)
    assert 0 < inside < 2 * 4 * t * 2 * width


def test_a_wrong_call_says_what_was_expected():
    given = {name: x.detach() for name, x in inputs("gated delta", 4, torch.float32).items()}
    v, k, beta, decay = (given[name] for name in ("v", "k", "beta", "decay"))
    for change, words in (
        ({"v": v[:, :, :3], "beta": beta[..., :3], "decay": None, "state": None}, "H a multiple of K, found"),
        ({"k": k[:, :3]}, r"floating k \[B=2, T=4, K=2, D=5\], found torch.float32 \[2, 3, 2, 5\]; .* use transpose"),
        ({"q": given["q"][..., :0], "k": k[..., :0], "state": None}, "D at least 1"),
        ({"decay": -0.1}, "or None, found -0.1"),
        ({"scale": "x"}, "as scale, found 'x'"),
        ({"beta": None}, "use decayed_attention"),
        ({"decay": decay.log()}, "found nan"),
        ({"decay": decay.exp()}, "use factor.log"),
        ({"backend": "chunk"}, "did you mean 'chunked'"),
    ):
        with pytest.raises(InputError, match=words):
            delta_rule(**{**given, **change})
    mask = torch.zeros(B, 4, dtype=torch.bool)
    delta_rule(**{**given, "decay": decay.exp()}, mask=mask)  # what is invalid has no decay
    del given["beta"]
    with pytest.raises(InputError, match=r"use factor\.log"):
        decayed_attention(**{**given, "decay": torch.full((B, 4, H, D), 0.5)})
