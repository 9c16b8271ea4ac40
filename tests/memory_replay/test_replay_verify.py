"""Replay compares the replayed steps with the first pass, unless it is told not to."""

import functools
import random

import pytest
import torch
from replay_standins import begin, cell, gradients, segments
from torch import nn

from mnemos import InputError, replay
from mnemos.memory_replay import rollout

FOUND = r"step \d: .* the state of the first pass"


class Noisy(nn.Module):
    """Draws from a generator of its own, while it is told to."""

    def __init__(self, noise=True):
        super().__init__()
        self.cell, self.noise, self.own = cell(), noise, random.Random(0)

    def forward(self, x, state):
        loss, state = self.cell(x, state)
        return loss, {**state, "h": state["h"] + self.own.random() * self.noise}


@pytest.fixture
def compared(monkeypatch):
    """The steps that were compared, since the list was cleared."""
    found, original = [], rollout.compare
    monkeypatch.setattr(rollout, "compare", lambda *given: found.append(None) or original(*given))
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda model, **named: replay(model, segments(), begin(), **named),
        lambda model, **named: replay(functools.partial(model.forward), segments(), begin(), **named),
        lambda model, **named: replay(lambda x, s: model(x, s), segments(), begin(), module=model, **named),
    ],
    ids=["module", "method", "named module"],
)
def test_a_nondeterministic_step_is_found_in_every_call(call, compared):
    model = Noisy()
    for _ in range(2):
        with pytest.raises(InputError, match=FOUND):
            call(model)
    compared.clear()
    call(model, verify=False)  # nobody looks
    assert not compared
    model.noise = False
    for _ in range(2):
        compared.clear()
        call(model)
        assert compared


def test_without_a_first_pass_there_is_nothing_to_compare(compared):
    model = Noisy()
    replay(model, segments(1), begin())
    replay(model, segments(), begin(), truncate_every=1)
    assert not compared


def test_all_ways_give_the_same_bits():
    model, found = cell(), []
    for verify in (True, False):
        torch.manual_seed(3)
        out = replay(model, segments(), begin(), verify=verify, checkpoints=2)
        found.append([out.loss, *out.losses, *gradients(model).values(), out.state["h"], torch.get_rng_state()])
    assert all(map(torch.equal, *found))
