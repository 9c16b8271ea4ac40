"""Bucket-union attention against its equations: both fast paths, values and gradients."""

import pytest
import torch

from mnemos.lab.measure.flops import flops_by_operation
from mnemos.ops import bucket_union, bucket_union_attention
from mnemos.ops.bucket_union import chunked
from mnemos.ops.bucket_union.reference import reference_bucket_union, reference_rounds, reference_union
from mnemos.types import InputError

PATHS = ["chunked", "dense"]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    take(request.param, monkeypatch)
    return request.param


@pytest.fixture
def sorted_path(monkeypatch):
    take("chunked", monkeypatch)


def take(name, monkeypatch):
    monkeypatch.setattr(bucket_union, "dense_up_to", lambda chunk, rounds: 0 if name == "chunked" else 10**9)


@pytest.fixture(params=["one segment", "a block a segment", "three blocks a segment"])
def segments(request, monkeypatch):
    numbers = {"one segment": 2**20, "a block a segment": 1, "three blocks a segment": 3 * 4 * 5 * 5}[request.param]
    monkeypatch.setattr(chunked, "SCORES_AT_A_TIME", {"cpu": numbers})


def inputs(t, b=2, h=3, d=5, m=4, rounds=3, buckets=6, heads=None, seed=0):
    """qk, v, rotations; neither of the first two contiguous."""
    g = torch.Generator().manual_seed(seed)
    qk, v = (
        torch.randn(h, b, width, t, generator=g, dtype=torch.float64).permute(1, 3, 0, 2).detach().requires_grad_()
        for width in (d, m)
    )
    rotations = torch.randn(rounds, h if heads is None else heads, d, buckets // 2, generator=g, dtype=torch.float64)
    return qk, v, rotations


def holes(t, b=2):
    mask = torch.rand(b, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, : t // 2] = False
    return mask


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def compare(found, expected, given):
    """Values, and gradients under an upstream gradient that is not contiguous."""
    upstream = torch.randn(expected.shape[::-1], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    upstream = upstream.permute(*reversed(range(upstream.dim())))
    close(found, expected)
    gradients = [
        torch.autograd.grad(y, given, upstream, retain_graph=True, materialize_grads=True) for y in (found, expected)
    ]
    for a, b in zip(*gradients, strict=True):
        close(a, b)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("t", "chunk", "rounds", "buckets"), [(1, 3, 2, 4), (2, 1, 1, 2), (23, 5, 3, 2), (31, 3, 4, 6)]
)
def test_equals_the_equations(t, chunk, rounds, buckets, causal, path, poisoned):
    qk, v, rotations = inputs(t, rounds=rounds, buckets=buckets)
    y = bucket_union_attention(qk, v, rotations, chunk, causal)
    compare(y, reference_bucket_union(qk, v, rotations, chunk, causal), (qk, v))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_reaches_nothing(causal, path, poisoned):
    qk, v, rotations = inputs(29, buckets=4)
    mask = holes(29)
    dirty = [x.detach().masked_fill(~mask[..., None, None], torch.nan).requires_grad_() for x in (qk, v)]
    y = bucket_union_attention(*dirty, rotations, 4, causal, mask)
    compare(y, reference_bucket_union(*dirty, rotations, 4, causal, mask), dirty)
    assert not y[~mask].any()
    alone = bucket_union_attention(qk[:1, mask[0]], v[:1, mask[0]], rotations, 4, causal)
    close(y[:1, mask[0]], alone)


@pytest.mark.parametrize("causal", [True, False])
def test_segments_change_nothing(causal, segments, sorted_path, poisoned):
    qk, v, rotations = inputs(27, buckets=2)
    mask = holes(27)
    y = bucket_union_attention(qk, v, rotations, 5, causal, mask)
    compare(y, reference_bucket_union(qk, v, rotations, 5, causal, mask), (qk, v))


@pytest.mark.slow
def test_a_key_met_in_several_rounds_counts_once():
    """The appendix's form, with N_ij and the rounds' normalisers, is softmax over the union."""
    qk, v, rotations = inputs(19, rounds=4, buckets=2)
    union = reference_bucket_union(qk, v, rotations, 3, True, combine=reference_union)
    compare(reference_bucket_union(qk, v, rotations, 3, True, combine=reference_rounds), union, (qk, v))
    twice = torch.cat([rotations, rotations])
    compare(bucket_union_attention(qk, v, twice, 3), union, (qk, v))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_rotations_of_each_head_or_all(heads, scale, path):
    qk, v, rotations = inputs(17, heads=heads)
    y = bucket_union_attention(qk, v, rotations, 4, True, scale=scale)
    compare(y, reference_bucket_union(qk, v, rotations, 4, True, scale=scale), (qk, v))


def shared(qk, v, causal, scale=None):
    """All of attention with keys of length one, a token left out of its own."""
    t = qk.shape[1]
    scores = torch.einsum("bihd,bjhd->bhij", qk, qk / (qk.square().sum(-1, keepdim=True) + 1e-6).sqrt())
    seen = torch.ones(t, t).tril(-1).bool() if causal else ~torch.eye(t).bool()
    seen[0, 0] |= causal
    weights = (scores * (qk.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhm->bihm", weights, v)


@pytest.mark.parametrize("causal", [True, False])
def test_one_chunk_of_one_bucket_is_softmax_attention(causal, path):
    qk, v, rotations = inputs(21, rounds=2)
    y = bucket_union_attention(qk, v, torch.zeros_like(rotations), 21, causal)
    compare(y, shared(qk, v, causal), (qk, v))


def test_with_rounds_it_becomes_softmax_attention(path):
    """Two buckets, and chunks that hold all: a pair that is not opposite meets sooner or later."""
    qk, v, rotations = inputs(21, rounds=60, buckets=2)
    exact = shared(qk, v, True)
    found = [bucket_union_attention(qk, v, rotations[:rounds], 21) for rounds in (1, 4, 16, 60)]
    errors = [(y - exact).abs().mean().item() for y in found]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.05 * errors[0]


def test_the_future_moves_no_chunk(path):
    """What a sort of the whole sequence would get wrong: exactly nothing before the change moves."""
    qk, v, rotations = inputs(40, buckets=4)
    before = bucket_union_attention(qk, v, rotations, 3)
    for j in range(0, 40, 7):
        other = qk.detach().clone()
        other[:, j:] = torch.randn(other[:, j:].shape, dtype=torch.float64)
        after = bucket_union_attention(other, v, rotations, 3)
        close(after[:, :j], before[:, :j])
        assert not torch.equal(after[:, j:], before[:, j:])


def test_ties_and_zeros_are_hashed_alike(path):
    qk, v, rotations = inputs(12, rounds=2, buckets=4)
    rotations[..., 1] = rotations[..., 0]  # every bucket has a twin
    flat = qk.detach().clone()
    flat[:, 5:] = flat[:, :1]
    flat[:, 3:5] = 0
    flat.requires_grad_()
    y = bucket_union_attention(flat, v, rotations, 3)
    compare(y, reference_bucket_union(flat, v, rotations, 3, True), (flat, v))


def test_scores_far_apart_stay_finite(path):
    qk, v, rotations = inputs(30, buckets=2)
    big = (qk.detach() * 300).requires_grad_()
    y = bucket_union_attention(big, v, rotations, 4, False, scale=1.0)
    compare(y, reference_bucket_union(big, v, rotations, 4, False, scale=1.0), (big, v))
    low = bucket_union_attention(big.float(), v.float(), rotations, 4, False, scale=1.0)
    torch.testing.assert_close(low.double(), y, rtol=1e-2, atol=1e-2)


def test_low_precision_and_determinism(path):
    qk, v, rotations = inputs(33)
    given = qk.bfloat16(), v.bfloat16()
    y = bucket_union_attention(*given, rotations, 4)
    assert y.dtype == torch.bfloat16
    exact = bucket_union_attention(*(x.double() for x in given), rotations.float(), 4)
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    assert torch.equal(y, bucket_union_attention(*given, rotations, 4))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            bucket_union_attention(qk.float(), v.float(), rotations, 4).double(), exact, rtol=0.05, atol=0.05
        )


@pytest.mark.slow
def test_gradcheck(path):
    qk, v, rotations = inputs(9, b=1, h=2)
    assert torch.autograd.gradcheck(lambda qk, v: bucket_union_attention(qk, v, rotations, 2), (qk, v))


def test_the_hash_has_no_gradient():
    qk, v, rotations = inputs(9)
    rotations.requires_grad_()
    bucket_union_attention(qk, v, rotations, 2).sum().backward()
    assert rotations.grad is None


@pytest.mark.parametrize("t", [0, 1])
def test_nothing_and_one_token(t, path):
    qk, v, rotations = inputs(t)
    y = bucket_union_attention(qk, v, rotations)
    assert torch.equal(y, v)


@pytest.mark.slow
def test_dropout_keeps_the_mean(path):
    torch.manual_seed(0)
    qk, v, rotations = inputs(12, buckets=2)
    exact = bucket_union_attention(qk, v, rotations, 12)
    many = [x.detach().repeat(2000, 1, 1, 1) for x in (qk, v)]  # 2000 draws in one call: every row has its own
    drawn = bucket_union_attention(*many, rotations, 12, dropout=0.5).unflatten(0, (2000, len(qk)))
    assert not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(drawn.mean(0), exact, rtol=0, atol=0.15)


@pytest.mark.slow
def test_dropouts_gradient_is_of_what_was_dropped(sorted_path):
    qk, v, rotations = inputs(12, b=1, h=1, buckets=2)

    def run(qk, v):
        torch.manual_seed(0)
        return bucket_union_attention(qk, v, rotations, 3, dropout=0.5)

    assert torch.autograd.gradcheck(run, (qk, v))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_equals_eager(path):
    qk, v, rotations = inputs(40)
    torch._dynamo.reset()
    compiled = torch.compile(bucket_union_attention, backend="aot_eager", fullgraph=True)
    compare(compiled(qk, v, rotations, 4), bucket_union_attention(qk, v, rotations, 4), (qk, v))


def test_operations_are_those_of_the_windows(sorted_path):
    b, t, h, d, chunk, rounds, buckets = 2, 48, 3, 4, 4, 2, 6
    qk, v, rotations = inputs(t, b, h, d, d, rounds, buckets)
    hashed = 2 * b * t * h * rounds * d * buckets // 2
    scores = rounds * b * t * h * 3 * chunk
    found = flops_by_operation(lambda: bucket_union_attention(qk, v, rotations, chunk))
    assert sum(found.values()) == hashed + 2 * 2 * scores * d
    upstream = torch.ones_like(v)
    found = flops_by_operation(
        lambda: torch.autograd.grad(bucket_union_attention(qk, v, rotations, chunk), (qk, v), upstream)
    )
    assert sum(found.values()) == hashed + 2 * (2 + 5) * scores * d, "the scores again, and four products"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "at least one round, one token per chunk and an even number"),
        ({"rotations": torch.zeros(0, 3, 5, 2)}, "at least one round"),
        ({"rotations": torch.zeros(2, 3, 5, 0)}, "even number of buckets"),
        ({"rotations": torch.zeros(2, 2, 5, 3)}, "expected rotations"),
        ({"rotations": torch.zeros(2, 3, 4, 3)}, "expected rotations"),
        ({"v": torch.zeros(2, 8, 3, 4)}, "expected floating qk"),
        ({"mask": torch.ones(2, 9)}, "mask of booleans"),
        ({"mask": torch.ones(2, 8).bool()}, "mask of booleans"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_input_is_refused_in_one_line(change, message):
    qk, v, rotations = inputs(9)
    with pytest.raises(InputError, match=message) as error:
        bucket_union_attention(**{"qk": qk, "v": v, "rotations": rotations} | change)
    assert "\n" not in str(error.value)


def test_a_gradient_penalty_is_refused_and_no_gradient_silently_lost():
    torch.manual_seed(0)
    qk, v = (torch.randn(1, 200, 1, 4, requires_grad=True) for _ in range(2))
    y = bucket_union_attention(qk, v, torch.randn(1, 1, 4, 2), chunk=8)
    grads = torch.autograd.grad(y.sum(), [qk, v], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        sum(g.square().sum() for g in grads).backward()
