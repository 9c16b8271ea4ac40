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


def advantages(model, x, state):
    """A loss of normalised advantages, whose summands cancel."""
    _, new = model(x, state)
    h = new["h"]
    return ((h - h.mean()) / h.std()).mean(), new


@pytest.mark.parametrize("buffer", [False, True])
def test_randomness_that_nothing_registers_is_found_where_summands_cancel(buffer):
    """The same losses, with noise of a generator of the step's own, or of a number that changes with every call."""
    model, pieces, own, calls = cell(torch.float32, dropout=0.0), segments(5, torch.float32), random.Random(0), []

    def step(x, state):
        calls.append(None)
        mask = torch.ones(5)
        mask[own.randrange(5) if not buffer else len(calls) % 5] = 0
        return advantages(model, x * mask, state)

    with pytest.raises(InputError, match=r"(state|loss) of the first pass.*times what rounding explains"):
        replay(step, pieces, begin(torch.float32), module=model)


def test_noise_in_a_loss_that_cancels():
    """The state agrees and the loss does not: by a hundredth of the numbers that are added up."""
    model, pieces, own = cell(torch.float32, dropout=0.0), segments(5, torch.float32), torch.Generator().manual_seed(0)

    def step(x, state, noise=1e-2):
        _, new = model(x, state)
        h = new["h"]
        h = h + noise * torch.randn(h.shape, generator=own)
        return (h.flatten()[: h.numel() // 2] - h.flatten()[: h.numel() // 2].mean()).sum() + noise * h.mean(), new

    with pytest.raises(InputError, match=r"the loss of the first pass.*times what rounding explains"):
        replay(step, pieces, begin(torch.float32), module=model)
    replay(lambda x, s: step(x, s, 0.0), pieces, begin(torch.float32), module=model)
