"""Reformer against its equations and another library's: values and gradients at odd sizes, padding, random numbers."""

import pytest
import torch
from refusals import refuses
from sparse_layers import compare, spoilt, tokens

from mnemos.lab.papers.baselines import reformer
from mnemos.lab.papers.baselines.reformer import (
    ReformerAttention,
    ReformerConfig,
    draw_rotations,
    reformer_attention,
)

# ---- the operator ----


def inputs(t, rounds=2, buckets=4, b=2, h=2, d=5, m=3):
    g = torch.Generator().manual_seed(t)
    qk, v = (torch.randn(b, t, h, n, generator=g, dtype=torch.float64).requires_grad_() for n in (d, m))
    return qk, v, draw_rotations(rounds, h, d, buckets, g)


def holes(t):
    mask = torch.rand(2, t, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[1, : t // 2] = False
    return mask


def bucket(x, rotation):
    """h(x) = argmax([xR; −xR])."""
    return int(torch.argmax(torch.cat([x @ rotation, -x @ rotation])))


def reference_head(x, v, tokens, rounds, chunk, causal):
    """The outputs {token: y} of a row's valid tokens in one head. rounds: the rotation of each."""
    circle, back = [tokens], 0  # at most one chunk of tokens, which are not hashed
    if len(x) > chunk:
        circle, back = [], 1
        for rotation in rounds:
            order = sorted(tokens, key=lambda i, rotation=rotation: (bucket(x[i].detach(), rotation), i))
            circle += [order[start : start + chunk] for start in range(0, -(-len(x) // chunk) * chunk, chunk)]
    keys = x / torch.sqrt((x * x).sum(1, keepdim=True) + 1e-6 * x.shape[1])
    # Σ_r exp(z^r − z)·o^r is one softmax over what is read in all rounds. Of no other token, a token reads itself.
    read = {i: [] for i in tokens}
    for at, here in enumerate(circle):
        around = [j for offset in range(-back, 1) for j in circle[(at + offset) % len(circle)]]
        for i in here:
            read[i] += [j for j in around if j != i and (j < i or not causal)]
    return {i: torch.softmax(keys[js] @ x[i], 0) @ v[js] if js else v[i] for i, js in read.items()}


def reference(qk, v, rotations, chunk, causal, mask=None):
    """The equations, a row and a head at a time, in float64; 0 for invalid tokens."""
    b, t, h, _ = qk.shape
    mask = torch.ones(b, t, dtype=torch.bool) if mask is None else mask
    qk, v = (x.double().masked_fill(~mask[..., None, None], 0) for x in (qk, v))
    rows = []
    for row in range(b):
        tokens = mask[row].nonzero()[:, 0].tolist()
        for head in range(h):
            rounds = rotations[:, head].double()
            y = reference_head(qk[row, :, head], v[row, :, head], tokens, rounds, chunk, causal)
            rows.append(torch.stack([y.get(i, v[row, i, head]) for i in range(t)]))
    return torch.stack(rows).view(b, h, t, -1).transpose(1, 2)


CASES = [  # tokens, chunk, rounds, buckets
    (1, 3, 2, 4),
    (4, 4, 2, 4),  # one chunk: no hash
    (5, 4, 1, 2),  # two chunks on a circle
    (6, 1, 2, 4),  # chunks of one token
    (23, 5, 3, 8),
    (26, 3, 2, 8),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-tokens")
def test_equals_the_equations(case, masked, causal, poisoned):
    t, chunk, rounds, buckets = case
    qk, v, rotations = inputs(t, rounds, buckets)
    mask = holes(t) if masked else None
    given = spoilt([qk, v], mask) if masked else [qk, v]
    y = reformer_attention(*given, rotations, chunk, causal, mask)
    compare(y, reference(*given, rotations, chunk, causal, mask), given)


@pytest.mark.parametrize("scores", [1, 200])  # one block at a time, and several
def test_segments_change_nothing(scores, monkeypatch):
    qk, v, rotations = inputs(29)
    expected = reformer_attention(qk, v, rotations, 4, mask=holes(29))
    monkeypatch.setattr(reformer, "SCORES_AT_A_TIME", {"cpu": scores})
    compare(reformer_attention(qk, v, rotations, 4, mask=holes(29)), expected, (qk, v))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("last", [0, 1, 7, 20])  # single queries up to 7, chunks of queries beyond
def test_the_last_tokens_alone(last, causal):
    qk, v, rotations = inputs(29)
    whole = reformer_attention(qk, v, rotations, 4, causal, holes(29))[:, 29 - last :]
    compare(reformer_attention(qk, v, rotations, 4, causal, holes(29), last=last), whole, (qk, v))


@pytest.mark.parametrize("scores", [2**20, 100])
def test_gradients_with_dropout(scores, monkeypatch):
    monkeypatch.setattr(reformer, "SCORES_AT_A_TIME", {"cpu": scores})
    qk, v, rotations = inputs(9, b=1, h=1)

    def run(qk, v):
        torch.manual_seed(0)
        return reformer_attention(qk, v, rotations, 4, dropout=0.5)

    assert torch.autograd.gradcheck(run, (qk, v), fast_mode=True)


def test_wrong_input_is_refused():
    qk, _, rotations = inputs(9)
    refuses("expected floating v", reformer_attention, qk, torch.zeros(2, 8, 3, 4), rotations)
    refuses(r"at least one round, one token per chunk .* found rounds=2, chunk=0", layer, chunk=0)


# ---- the layer ----


def layer(causal=True, dropout=0.0, **settings):
    torch.manual_seed(0)
    settings = ReformerConfig(**{"rounds": 2, "chunk": 4, "buckets": 4} | settings)
    return ReformerAttention(12, 3, causal, dropout, settings).double()


@pytest.fixture(scope="module")
def theirs():
    from mnemos import libraries

    libraries.torchvision()
    reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    from transformers import ReformerConfig as Settings

    def build(causal, s, buckets):
        settings = {"num_hashes": s.rounds, "num_buckets": buckets, "lsh_attn_chunk_length": s.chunk, "hash_seed": 3}
        settings |= {"lsh_num_chunks_before": 1, "lsh_num_chunks_after": 0, "is_decoder": causal}
        settings |= {"hidden_size": 12, "num_attention_heads": 3, "attention_head_size": 4}
        settings |= {"lsh_attention_probs_dropout_prob": 0.0}
        return reformer.LSHSelfAttention(Settings(**settings), layer_idx=0).double()

    return build


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("t", "rounds", "chunk", "buckets", "padded"),
    [
        (24, 1, 6, 8, 0),
        (40, 3, 4, 10, 0),
        (32, 2, 8, 2, 5),  # ours has 27 and 32 tokens, theirs 32 and a mask
        (30, 2, 3, 10, 13),
        (8, 2, 8, 4, 3),  # one chunk
    ],
)
def test_equals_hugging_face_with_equal_weights_and_rotations(t, rounds, chunk, buckets, padded, causal, theirs):
    """Values and gradients, of the input and of every weight."""
    ours = layer(causal, rounds=rounds, chunk=chunk)
    other = theirs(causal, ours.settings, buckets)
    torch.manual_seed(3)  # as `hash_seed`
    drawn = torch.randn(3, 4, rounds, buckets // 2, dtype=torch.float64).permute(2, 0, 1, 3)
    ours.rotations = lambda length, device: drawn
    with torch.no_grad():
        ours.query_key.weight.mul_(4)  # scores that tell tokens apart
        other.query_key.weight.copy_(ours.query_key.weight)
        other.value.weight.copy_(ours.value.weight)
    mask = torch.ones(2, t, dtype=torch.bool)
    mask[0, t - padded :] = False
    x, upstream = tokens(t).requires_grad_(), tokens(t, 5) * mask[..., None]
    wanted = other(x, attention_mask=mask.long() if padded else None).hidden_states
    found = ours.heads(x, None, mask if padded else None)[0].flatten(2)
    torch.testing.assert_close(found[mask], wanted[mask], rtol=1e-9, atol=1e-9)
    gradients = [
        torch.autograd.grad(y, (x, net.query_key.weight, net.value.weight), upstream)
        for y, net in ((wanted, other), (found, ours))
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    if padded and t > chunk:  # slots that fill the last chunk are as padding
        short = ours.heads(x[:1, : t - padded + 1], None, mask[:1, : t - padded + 1])[0].flatten(2)
        whole = -(-(t - padded + 1) // chunk) * chunk
        filled = other(x[:1, :whole], attention_mask=mask[:1, :whole].long()).hidden_states
        torch.testing.assert_close(short[:, :-1], filled[:, : t - padded], rtol=1e-9, atol=1e-9)


def test_training_draws_new_rotations_and_repeats_from_the_generators_state():
    attention, x = layer(), tokens()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = attention(x)[0], attention(x)[0]
    assert not torch.allclose(first, second)
    torch.set_rng_state(state)
    assert torch.equal(attention(x)[0], first)
    assert torch.equal(attention(x)[0], second)
    torch.set_rng_state(state)
    attention(x[:, :4])  # one chunk
    assert torch.equal(torch.get_rng_state(), state)


def test_a_step_equals_the_last_token_of_the_whole():
    """Evaluation repeats, and draws nothing."""
    attention, x, drawn = layer(buckets=None).eval(), tokens(30), torch.get_rng_state()
    mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(3)) > 0.2
    y, state = attention(x[:, :9], None, mask[:, :9])
    torch.testing.assert_close(y, attention(x[:, :9], None, mask[:, :9])[0])
    for a, b in ((9, 10), (10, 11), (11, 25), (25, 30)):
        y, state = attention(x[:, a:b], state, mask[:, a:b])
        torch.testing.assert_close(y, attention(x[:, :b], None, mask[:, :b])[0][:, a:])
    assert torch.equal(state.seen, mask.sum(1))
    assert torch.equal(torch.get_rng_state(), drawn)
