"""The states of attentions by themselves: what an empty one holds, and what a detached one is."""

import pytest
import torch

from mnemos.memory import Segments
from mnemos.memory.key_values import KeyValues


def test_detached_segments_have_the_values_and_no_graph():
    state = Segments(torch.ones(2, 3, 4, requires_grad=True), torch.ones(2, 3).bool())
    found = state.detach()
    assert not found.x.requires_grad
    assert torch.equal(found.x, state.x)
    assert found.valid is state.valid


def test_an_append_leaves_what_a_graph_has_kept():
    """Keys without gradient under queries with one, as with an adapter on the queries alone."""
    q, state, total = torch.ones(1, 1, 1, 2, requires_grad=True), KeyValues.empty(1, 1, 2), 0.0
    for t in range(1, 6):
        new = torch.full((1, 1, 1, 2), float(t))
        state = state.append(new, new, torch.ones(1, 1, dtype=torch.bool))
        total = total + (q * state.k).sum()
    total.backward()
    assert torch.equal(q.grad, torch.full_like(q, 5 * 1 + 4 * 2 + 3 * 3 + 2 * 4 + 5))


def test_appends_carry_tangents():
    valid = torch.ones(1, 1, dtype=torch.bool)

    def total(x):
        state, sum_of = KeyValues.empty(1, 1, 2), 0.0
        for _ in range(4):
            state = state.append(x, x, valid)
            sum_of = sum_of + state.k.sum()
        return sum_of

    x = torch.ones(1, 1, 1, 2)
    assert torch.func.jvp(total, (x,), (x,))[1] == 20


@pytest.mark.parametrize("n", [2, 3, 4, 6])
def test_a_padded_state_has_at_least_as_many_tokens(n):
    k = torch.randn(2, 3, 1, 4)
    padded = KeyValues(k, k, torch.ones(2, 3, dtype=torch.bool), torch.full((2,), 3)).pad_to(n)
    assert padded.valid.tolist() == [[False] * (n - 3) + [True] * 3] * 2
    assert torch.equal(padded.k, torch.cat([torch.zeros(2, max(0, n - 3), 1, 4), k], 1))
