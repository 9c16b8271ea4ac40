"""Bucket-union attention as a layer: the op between two projections, its state, and and softmax attention beside it."""

import dataclasses
import itertools

import pytest
import torch

from mnemos import config, registry
from mnemos.attention import BucketUnionAttention, BucketUnionConfig
from mnemos.lab.measure.flops import forward_flops
from mnemos.ops import bucket_union
from mnemos.ops.bucket_union import dense
from mnemos.ops.bucket_union.reference import reference_bucket_union
from mnemos.types import InputError, leaves, map_state, reset, select


def layer(causal=True, **kwargs):
    torch.manual_seed(0)
    return BucketUnionAttention(12, 3, causal, **{"rounds": 3, "chunk": 3, "buckets": 4} | kwargs).double()


def tokens(t=41, seed=1):
    return torch.randn(2, t, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=["windows", "dense"])
def path(request, monkeypatch):
    monkeypatch.setattr(bucket_union, "dense_up_to", lambda chunk, rounds: 0 if request.param == "windows" else 10**9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scale", [None, 1.0])
def test_the_layer_is_the_equations_between_two_projections(causal, masked, scale, path):
    attention, x = layer(causal, scale=scale), tokens().requires_grad_()
    mask = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > 0.3 if masked else None
    q, v = (projection(x).unflatten(-1, (3, 4)) for projection in (attention.query, attention.value))
    expected = reference_bucket_union(q, v, attention.rotations, 3, causal, mask, scale)
    y, state = attention(x, None, mask)
    torch.testing.assert_close(attention.heads(x, None, mask)[0], expected)
    torch.testing.assert_close(y, attention.output(expected.flatten(2)))
    given = [x, *attention.parameters()]
    found = torch.autograd.grad(y.square().sum(), given)
    wanted = torch.autograd.grad(attention.output(expected.flatten(2)).square().sum(), given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert (state is None) == (not causal)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("cuts", [[17], [1, 2, 30], range(1, 41)])
def test_split_and_resume_equals_whole(cuts, masked, path):
    """As the contract, with chunks that fill and padding in the middle, on either path."""
    attention, x = layer(), tokens()
    mask = torch.rand(2, 41, generator=torch.Generator().manual_seed(3)) > (0.3 if masked else -1)
    with torch.no_grad():
        whole, end = attention(x, None, mask)
        state, parts = None, []
        for a, b in itertools.pairwise([0, *cuts, 41]):
            y, state = attention(x[:, a:b], state, mask[:, a:b])
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    for a, b in zip(leaves(state), leaves(end), strict=True):
        torch.testing.assert_close(a, b)


def test_the_paths_mix(monkeypatch):
    """A prefill in windows, then tokens one by one; then a long piece in windows on top of them."""
    attention, x = layer(), tokens(120)
    assert bucket_union.dense_up_to(3, 3) == 27
    with torch.no_grad():
        whole = attention(x)[0]
        state, parts = None, []
        for piece in x.split([40, *[1] * 20, 60], 1):
            y, state = attention(piece, state)
            parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_a_token_gathers_what_it_meets_among_many(gathered, rounds, monkeypatch):
    monkeypatch.setattr(dense, "PICKED_FROM", 1 if gathered else 10**9)
    attention, x = layer(rounds=rounds, chunk=2), tokens(60)
    if rounds == 1:  # one bucket: there is not one key too many to gather
        attention.rotations.zero_()
    mask = torch.rand(2, 60, generator=torch.Generator().manual_seed(3)) > 0.2
    whole, end = attention(x, None, mask)
    _, state = attention(x[:, :40], None, mask[:, :40])
    parts = []
    for i in range(40, 60):
        y, state = attention(x[:, i : i + 1], state, mask[:, i : i + 1])
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, 40:])
    torch.testing.assert_close(state.place, end.place)
    weights = list(attention.parameters())
    found = torch.autograd.grad(torch.cat(parts, 1).square().sum(), weights)
    for a, b in zip(found, torch.autograd.grad(whole[:, 40:].square().sum(), weights), strict=True):
        torch.testing.assert_close(a, b)


def test_rows_are_selected_and_made_fresh():
    attention, x = layer().eval(), tokens(9, 5)
    with torch.no_grad():
        _, state = attention(tokens())
        expected = attention(x, state)[0]
        swapped = select(state, torch.tensor([1, 0]))
        torch.testing.assert_close(attention(x.flip(0), swapped)[0].flip(0), expected)
        half = attention(x, reset(state, torch.tensor([True, False])))[0]
        torch.testing.assert_close(half[0], attention(x)[0][0])
        torch.testing.assert_close(half[1], expected[1])


def test_a_state_grows_in_one_buffer_and_forks_copy():
    attention = layer().eval()
    with torch.no_grad():
        _, a = attention(tokens(5))
        _, a = attention(tokens(1), a)
        kept, moved, state = map_state(torch.clone, a), 0, a
        for seed in range(40):
            _, new = attention(tokens(1, seed), state)
            moved += new.k.untyped_storage().data_ptr() != state.k.untyped_storage().data_ptr()
            state = new
        assert moved <= 3, "room doubles: 40 tokens copy a few times, not 40"
        _, fork = attention(tokens(1, 50), a)
        assert fork.k.untyped_storage().data_ptr() != a.k.untyped_storage().data_ptr()
        for x, y in zip(leaves(a), leaves(kept), strict=True):
            assert torch.equal(x, y)


def test_autocast_moves_no_token_to_another_bucket():
    attention, x = layer(buckets=16).float(), tokens().float()
    _, state = attention(x)
    with torch.autocast("cpu", torch.bfloat16):
        _, low = attention(x)
    assert torch.equal(low.place, state.place)
    assert low.v.dtype == torch.bfloat16


def test_rotations_are_saved():
    attention, other = layer(), BucketUnionAttention(12, 3, True, rounds=3, chunk=3, buckets=4).double()
    assert not torch.equal(attention.rotations, other.rotations)
    other.load_state_dict(attention.state_dict(), strict=True)
    torch.testing.assert_close(other(tokens())[0], attention(tokens())[0])


def test_dropout_in_training_alone():
    attention = layer(dropout=0.5, buckets=2)
    assert not torch.equal(attention(tokens())[0], attention(tokens())[0])
    attention.eval()
    torch.testing.assert_close(attention(tokens())[0], layer(buckets=2)(tokens())[0])


def test_operations_by_hand():
    attention, x = layer().float(), tokens(40).float()
    projections, hashed = 2 * 2 * 40 * 3 * 12 * 12, 2 * 2 * 40 * 3 * 3 * 4 * 2
    blocks = 2 * 40  # of 3 tokens, over 3 heads: each against 9 keys, in 3 rounds, for q·k and weights·v
    assert forward_flops(attention, x) == projections + hashed + 3 * blocks * 2 * 2 * 3 * 9 * 4


def test_configuration():
    settings = registry.load("attention", "bucket-union")(rounds=2, chunk=16, buckets=8)
    assert config.from_dict(BucketUnionConfig, config.to_dict(settings)) == settings
    attention = settings.build(12, 3, causal=True, dropout=0.1)
    assert (attention.rotations.shape, attention.chunk, attention.dropout) == ((2, 3, 4, 4), 16, 0.1)
    with pytest.raises(InputError, match="expected an integer"):
        config.from_dict(BucketUnionConfig, {**dataclasses.asdict(settings), "rounds": "4"})


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"chunk": 0}, {"buckets": 7}, {"buckets": 0}])
def test_wrong_settings_are_refused_in_one_line(wrong):
    with pytest.raises(InputError, match="expected at least one round") as error:
        layer(**wrong)
    assert "\n" not in str(error.value)


def test_wrong_states_are_refused():
    with pytest.raises(InputError, match="divisible by num_heads"):
        BucketUnionAttention(12, 5)
    for state in (layer().initial_state(3), layer(rounds=2).initial_state(2)):
        with pytest.raises(InputError, match="expected a state"):
            layer()(tokens(), state)
    with pytest.raises(InputError, match="causal=True"):
        layer(False)(tokens(), layer().initial_state(2))
