"""Reformer attention against its equations: values and gradients at odd sizes, padding, and calls of few queries."""

import pytest
import torch

from mnemos.lab.papers.baselines.reformer import chunked
from mnemos.lab.papers.baselines.reformer.operator import bucket_factors, draw_rotations, reformer_attention
from mnemos.lab.papers.baselines.reformer.reference import reference_reformer
from mnemos.types import InputError


def inputs(t, rounds=2, factors=(4,), b=2, h=2, d=5, m=3):
    g = torch.Generator().manual_seed(t)
    qk, v = (torch.randn(b, t, h, n, generator=g, dtype=torch.float64).requires_grad_() for n in (d, m))
    return qk, v, draw_rotations(rounds, h, d, factors, g)


def holes(t):
    mask = torch.rand(2, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, : t // 2] = False
    return mask


def compare(found, expected, given):
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(y, given, upstream, materialize_grads=True) for y in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


CASES = [  # tokens, chunk, rounds, factors, look back, look ahead
    (1, 3, 2, (4,), 1, 0),
    (4, 4, 2, (4,), 1, 0),  # one chunk: no hash
    (5, 4, 1, (2,), 1, 0),  # two chunks on a circle
    (6, 1, 2, (4,), 1, 0),  # chunks of one token
    (23, 5, 3, (4, 2), 1, 0),
    (19, 4, 2, (6,), 0, 0),  # tokens that are alone in a chunk
    (26, 3, 2, (8,), 2, 1),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-tokens")
def test_equals_the_equations(case, masked, causal, poisoned):
    t, chunk, rounds, factors, back, ahead = case
    qk, v, rotations = inputs(t, rounds, factors)
    mask = holes(t) if masked else None
    given = [qk, v]
    if masked:  # padding may hold anything
        given = [x.detach().masked_fill(~mask[..., None, None], torch.nan).requires_grad_() for x in given]
    y = reformer_attention(*given, rotations, chunk, causal, mask, back, ahead)
    compare(y, reference_reformer(*given, rotations, chunk, causal, mask, back, ahead), given)


@pytest.mark.parametrize("scores", [1, 200])  # one block at a time, and several
def test_segments_change_nothing(scores, monkeypatch):
    qk, v, rotations = inputs(29)
    expected = reformer_attention(qk, v, rotations, 4, mask=holes(29))
    monkeypatch.setattr(chunked, "SCORES_AT_A_TIME", {"cpu": scores})
    compare(reformer_attention(qk, v, rotations, 4, mask=holes(29)), expected, (qk, v))


def test_the_backward_keeps_no_scores_of_several_steps(monkeypatch):
    qk, v, rotations = inputs(64)
    scores = 2 * 2 * 2 * 64 * 32  # rows, heads, rounds, tokens, keys
    kept = []
    for most in (scores, scores // 16):
        monkeypatch.setattr(chunked, "SCORES_AT_A_TIME", {"cpu": most})
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            y = reformer_attention(qk, v, rotations, 16)
        assert y.requires_grad
        floats = {x.data_ptr(): x.numel() for x in saved if x.is_floating_point()}
        kept.append(sum(floats.values()))
    assert kept[0] > scores > kept[1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("last", [0, 1, 7, 20])  # single queries up to 7, chunks of queries beyond
def test_the_last_tokens_alone(last, causal):
    qk, v, rotations = inputs(29)
    whole = reformer_attention(qk, v, rotations, 4, causal, holes(29))[:, 29 - last :]
    compare(reformer_attention(qk, v, rotations, 4, causal, holes(29), last=last), whole, (qk, v))


def test_one_chunk_is_softmax_attention_without_the_token_itself():
    qk, v, rotations = inputs(9)
    y = reformer_attention(qk, v, rotations, 9, causal=False)
    scores = torch.einsum("bihd,bjhd->bhij", qk, torch.nn.functional.normalize(qk, dim=-1))
    weights = scores.masked_fill(torch.eye(9).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(y, torch.einsum("bhij,bjhm->bihm", weights, v), rtol=1e-4, atol=1e-5)


def test_a_later_token_is_never_read():
    qk, v, rotations = inputs(30)
    for i in (0, 11, 28):
        reads = torch.autograd.grad(reformer_attention(qk, v, rotations, 4)[:, i].sum(), (qk, v))
        assert not any(x[:, i + 1 :].any() for x in reads)


def test_low_precision_and_scores_far_apart():
    qk, v, rotations = inputs(33)
    given = (50 * qk).bfloat16(), v.bfloat16()
    y = reformer_attention(*given, rotations, 4, dropout=0.0)
    assert y.dtype == torch.bfloat16
    exact = reformer_attention(*(x.double() for x in given), [r.float() for r in rotations], 4)
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        low = reformer_attention(given[0].float(), given[1].float(), rotations, 4)
    torch.testing.assert_close(low.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scores", [2**20, 100])
def test_dropout_has_the_mean_and_the_gradient_of_what_it_kept(scores, monkeypatch):
    monkeypatch.setattr(chunked, "SCORES_AT_A_TIME", {"cpu": scores})
    qk, v, rotations = inputs(9, b=1, h=1)

    def run(qk, v):
        torch.manual_seed(0)
        return reformer_attention(qk, v, rotations, 4, dropout=0.5)

    assert torch.autograd.gradcheck(run, (qk, v), fast_mode=True)
    exact = reformer_attention(qk, v, rotations, 4)
    monkeypatch.setattr(chunked, "SCORES_AT_A_TIME", {"cpu": 2**20})
    many = [x.detach().repeat(4000, 1, 1, 1) for x in (qk, v)]
    drawn = reformer_attention(*many, rotations, 4, dropout=0.5)
    torch.testing.assert_close(drawn.mean(0, keepdim=True), exact, rtol=0, atol=0.15)
    assert (drawn[0] - drawn[1]).abs().max() > 0.1


@pytest.mark.parametrize("length", [1, 60, 783, 5000, 100_000])
def test_buckets_follow_the_length(length):
    """About two per chunk of 32; hashing costs O(√(T/c)) per token, as one hash of few buckets, or two."""
    factors = bucket_factors(length, 32)
    total = torch.tensor(factors).prod().item()
    wanted = 2 * -(-length // 32)
    assert wanted <= total <= 1.2 * wanted + 1
    assert all(n % 2 == 0 for n in factors)
    assert len(factors) == 1 + (wanted > 128)
    assert bucket_factors(length, 32, 64) == (64,)
    assert [tuple(r.shape) for r in draw_rotations(3, 2, 5, factors)] == [(3, 2, 5, n // 2) for n in factors]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "at least one round, one token per chunk"),
        ({"look_back": -1}, "neighbouring chunks"),
        ({"rotations": []}, "expected rotations"),
        ({"rotations": [torch.zeros(2, 2, 5, 1), torch.zeros(3, 2, 5, 1)]}, "one number of rounds"),
        ({"rotations": torch.zeros(2, 3, 5, 2)}, "expected rotations"),
        ({"v": torch.zeros(2, 8, 3, 4)}, "expected floating qk"),
        ({"mask": torch.ones(2, 9)}, "mask of booleans"),
        ({"dropout": 1.0}, "dropout"),
        ({"last": 10}, "0 to 9 tokens"),
    ],
)
def test_wrong_input_is_refused_in_one_line(change, message):
    qk, v, rotations = inputs(9)
    with pytest.raises(InputError, match=message) as error:
        reformer_attention(**{"qk": qk, "v": v, "rotations": rotations} | change)
    assert "\n" not in str(error.value)
