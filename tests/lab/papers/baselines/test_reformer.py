"""Reformer attention as a layer: beside another library's implementation, its random numbers, and its state."""

import pytest
import torch

from mnemos.lab.papers.baselines.reformer.layer import ReformerAttention, ReformerConfig
from mnemos.types import InputError


def layer(causal=True, dropout=0.0, **settings):
    torch.manual_seed(0)
    settings = ReformerConfig(**{"rounds": 2, "chunk": 4, "buckets": 4} | settings)
    return ReformerAttention(12, 3, causal, dropout, settings).double()


def tokens(t=41, seed=1, rows=2):
    return torch.randn(rows, t, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def theirs():
    from mnemos import libraries

    libraries.torchvision()
    reformer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    from transformers import ReformerConfig as Settings

    def build(causal, s, buckets):
        settings = {"num_hashes": s.rounds, "num_buckets": buckets, "lsh_attn_chunk_length": s.chunk, "hash_seed": 3}
        settings |= {"lsh_num_chunks_before": s.look_back, "lsh_num_chunks_after": s.look_ahead, "is_decoder": causal}
        settings |= {"hidden_size": 12, "num_attention_heads": 3, "attention_head_size": 4}
        settings |= {"lsh_attention_probs_dropout_prob": 0.0}
        return reformer.LSHSelfAttention(Settings(**settings), layer_idx=0).double()

    return build


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("t", "rounds", "chunk", "buckets", "look", "padded"),
    [
        (24, 1, 6, 8, (1, 0), 0),
        (24, 4, 4, 6, (1, 0), 0),
        (40, 3, 4, [4, 6], (1, 1), 0),  # the hash of two factors
        (32, 2, 8, 2, (1, 0), 5),  # ours has 27 and 32 tokens, theirs 32 and a mask
        (30, 2, 3, 10, (2, 0), 13),
        (8, 2, 8, 4, (1, 0), 3),  # one chunk
    ],
)
def test_equals_hugging_face_with_equal_weights_and_rotations(t, rounds, chunk, buckets, look, padded, causal, theirs):
    """Values and gradients, of the input and of every weight."""
    ours = layer(causal, rounds=rounds, chunk=chunk, look_back=look[0], look_ahead=look[1])
    other = theirs(causal, ours.settings, buckets)
    factors = buckets if isinstance(buckets, list) else [buckets]
    torch.manual_seed(3)  # as `hash_seed`
    drawn = torch.randn(3, 4, rounds, sum(factors) // 2, dtype=torch.float64).permute(2, 0, 1, 3)
    ours.rotations = lambda length, device: drawn.split([n // 2 for n in factors], -1)
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


def test_evaluation_repeats_unless_told_otherwise():
    attention, x = layer().eval(), tokens()
    state = torch.get_rng_state()
    first = attention(x)[0]
    assert torch.equal(attention(x)[0], first)
    assert torch.equal(torch.get_rng_state(), state)
    for seed in (1, None):
        assert not torch.allclose(layer(seed=seed).eval()(x)[0], first)
    free = layer(seed=None).eval()
    assert not torch.allclose(free(x)[0], free(x)[0])


def test_a_step_equals_the_last_token_of_the_whole():
    attention, x = layer(buckets=None).eval(), tokens(30)
    mask = torch.rand(2, 30, generator=torch.Generator().manual_seed(3)) > 0.2
    y, state = attention(x[:, :9], None, mask[:, :9])
    torch.testing.assert_close(y, attention(x[:, :9], None, mask[:, :9])[0])
    for a, b in ((9, 10), (10, 11), (11, 25), (25, 30)):
        y, state = attention(x[:, a:b], state, mask[:, a:b])
        torch.testing.assert_close(y, attention(x[:, :b], None, mask[:, :b])[0][:, a:])
    assert torch.equal(state.seen, mask.sum(1))


def test_autocast_moves_no_token_to_another_bucket():
    attention, x = layer(buckets=16).float().eval(), tokens().float()
    exact = attention(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        low = attention(x)[0]
    torch.testing.assert_close(low.float(), exact, rtol=0, atol=0.02)


def test_dropout_in_training_alone():
    attention, x = layer(dropout=0.5, chunk=64), tokens()
    assert not torch.allclose(attention(x)[0], attention(x)[0])
    torch.testing.assert_close(attention.eval()(x)[0], layer(chunk=64)(x)[0])


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"chunk": 0}, {"buckets": 7}, {"look_back": -1}])
def test_wrong_settings_are_refused_in_one_line(wrong):
    with pytest.raises(InputError, match="expected at least") as error:
        layer(**wrong)
    assert "\n" not in str(error.value)
