"""What a call of linear attention promises beside its numbers: backends, errors, memory, autograd, torch.compile."""

import pytest
import torch
from linear_attention_cases import HERE, D, compare, holes, inputs
from native_kernels import needs_kernels
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos.ops import linear_attention
from mnemos.ops.linear import LinearState
from mnemos.types import InputError


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
        "floating q [B, T, H, D], found torch.int64": lambda: linear_attention(q.long(), k, v),
        "did you mean 'elu'": lambda: linear_attention(q, k, v, feature_map="elu1"),
        "known: elu, relu, polynomial": lambda: linear_attention(q, k, v, feature_map="zzz"),
        "with its projection": lambda: linear_attention(q, k, v, feature_map="favor"),
        "did you mean 'chunked'": lambda: linear_attention(q, k, v, backend="chunk"),
        "state_s [B=2, H=3, D=5, M=4] or None": lambda: linear_attention(q, k, v, state=(state.s[:1], state.z[:1])),
        "state_z [B=2, H=3, D=5] or None": lambda: linear_attention(q, k, v, state=(state.s, state.z[..., :3])),
        "or None, found Tensor": lambda: linear_attention(q, k, v, state=state.s),
        "on one device, found cpu and for k meta": lambda: linear_attention(q, k.to("meta"), v),
        "keeps all axes": lambda: linear_attention(q, k, v, feature_map=lambda x: x.sum(-1)),
        "of at least 0": lambda: linear_attention(q, k, v, eps=-1.0),
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
