"""`select` and `reset` on any state, and what they refuse."""

import pytest
import torch

from mnemos import GRC
from mnemos.attention import GatedCacheAttention, LinearAttention, SoftmaxAttention
from mnemos.types import InputError, check_token_ids, join, reset, select

STATE = {"a": torch.arange(6.0).reshape(3, 2), "b": (torch.tensor([1, 2, 3]), None)}


def test_rows_are_selected_and_reset_through_any_structure():
    chosen = select(STATE, torch.tensor([2, 0, 2]))
    assert chosen["b"][0].tolist() == [3, 1, 3]
    assert select(STATE, torch.tensor([True, False, True]))["a"].tolist() == [[0, 1], [4, 5]]
    fresh = reset(STATE, torch.tensor([False, True, False]))
    assert fresh["b"][0].tolist() == [1, 0, 3]
    assert fresh["b"][1] is None
    assert STATE["b"][0].tolist() == [1, 2, 3]


@torch.no_grad()
def test_tokens_that_no_row_reads_after_a_reset_are_gone():
    """So a state that goes on over many documents is as long as the longest of them, and reads as before."""
    layer = SoftmaxAttention(8, 2, causal=True).eval()
    x = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(1))
    begins = torch.zeros(12, 2, dtype=torch.bool)  # of parts of five tokens: documents of 20 and of 15
    begins[4::4, 0], begins[3::3, 1] = True, True
    state, parts, sizes = None, [], []
    for part, rows in zip(x.split(5, 1), begins, strict=True):
        state = state if state is None else reset(state, rows)
        y, state = layer(part, state)
        parts.append(y)
        sizes.append(state.k.shape[1])
    assert max(sizes) == 20
    documents = torch.cat([layer(piece)[0] for piece in x[:1].split(20, 1)], 1)
    torch.testing.assert_close(torch.cat(parts, 1)[:1], documents)
    documents = torch.cat([layer(piece)[0] for piece in x[1:].split(15, 1)], 1)
    torch.testing.assert_close(torch.cat(parts, 1)[1:], documents)
    empty = reset(state, torch.tensor([True, True]))
    assert (empty.k.shape[1], empty.k.untyped_storage().nbytes()) == (0, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: reset(STATE, torch.tensor([True])), "a mask of 3 rows"),
        (lambda: reset(STATE, torch.tensor([True, False])), "found one of 2"),
        (lambda: reset(STATE, [True, False, True]), "as a tensor"),
        (lambda: reset(STATE, torch.tensor([0, 1, 2])), "booleans"),
        (lambda: select(STATE, [0, 1]), "as a tensor"),
        (lambda: select(STATE, torch.tensor([0, 5])), "rows 0 to 2, found 0 to 5"),
    ],
)
def test_rows_that_do_not_fit_are_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()


X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("states", "joined"),
    [
        ([(X, None), (X[:1], None)], [[0, 1, 2], [3, 4, 5], [0, 1, 2]]),
        ([(X, 4), (X[:1, :1], 4)], [[0, 1, 2], [3, 4, 5], [0, 0, 0]]),  # padding in front
        ([(X[:, 0], "a"), (X[:1, 0], "a")], [0, 3, 0]),
    ],
)
def test_joined_states_have_the_rows_of_all_and_the_values_that_they_share(states, joined):
    found, other = join(states)
    assert found.tolist() == joined
    assert other == states[0][1]


@pytest.mark.parametrize(
    ("states", "words"),
    [
        ([], "at least one state"),
        ([{"a": X}, (X,)], "states of one structure"),
        ([(X,), (None,)], "a tensor in every state"),
        ([(X, 4), (X, 5)], "in all the same value"),
        ([(X,), (X[..., None],)], r"differ only in rows and tokens, found \(2, 3\), \(2, 3, 1\)"),
        ([(X[..., None],), (X[:, :2, None].expand(2, 2, 2),)], "rows and tokens"),
        ([(X,), (X[:, 0],)], r"rows and tokens, found \(2, 3\), \(2,\)"),
    ],
)
def test_states_of_different_models_are_not_joined(states, words):
    with pytest.raises(InputError, match=f"^join: expected .*{words}"):
        join(states)


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 32), (2, 3, 5, 32)])
def test_a_layer_refuses_what_it_was_not_built_for(shape):
    for layer in (SoftmaxAttention(32, 4), LinearAttention(32, 4), GatedCacheAttention(32, 4, grc=GRC(length=3))):
        with pytest.raises(InputError, match=r"expected x \[B, T, 32\]"):
            layer(torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.bool])
def test_tokens_of_a_type_that_no_embedding_takes_are_refused(dtype):
    """The bytes of a file, for one: 256 wraps around in their type, so their range is not what is wrong."""
    with pytest.raises(InputError, match=rf"int64 \(\.long\(\)\) or int32, .*found {dtype} "):
        check_token_ids(torch.ones(2, 3, dtype=dtype), 256, None)
    check_token_ids(torch.ones(2, 3, dtype=torch.int32), 256, None)
