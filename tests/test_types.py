"""`select` and `reset` on any state, and what they refuse."""

import pytest
import torch

from mnemos import GRC
from mnemos.attention import GatedCacheAttention, LinearAttention, SoftmaxAttention
from mnemos.types import InputError, reset, select

STATE = {"a": torch.arange(6.0).reshape(3, 2), "b": (torch.tensor([1, 2, 3]), None)}


def test_rows_are_selected_and_reset_through_any_structure():
    chosen = select(STATE, torch.tensor([2, 0, 2]))
    assert chosen["b"][0].tolist() == [3, 1, 3]
    assert select(STATE, torch.tensor([True, False, True]))["a"].tolist() == [[0, 1], [4, 5]]
    fresh = reset(STATE, torch.tensor([False, True, False]))
    assert fresh["b"][0].tolist() == [1, 0, 3]
    assert fresh["b"][1] is None
    assert STATE["b"][0].tolist() == [1, 2, 3]


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


@pytest.mark.parametrize("shape", [(2, 5, 16), (5, 32), (2, 3, 5, 32)])
def test_a_layer_refuses_what_it_was_not_built_for(shape):
    for layer in (SoftmaxAttention(32, 4), LinearAttention(32, 4), GatedCacheAttention(32, 4, grc=GRC(length=3))):
        with pytest.raises(InputError, match=r"expected x \[B, T, 32\]"):
            layer(torch.zeros(shape))
