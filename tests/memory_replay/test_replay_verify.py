"""When replay compares the replayed steps with the first pass: in the first call, always or never."""

import functools
import gc
import random
import weakref

import pytest
import torch
from replay_standins import begin, cell, gradients, segments
from torch import nn

from mnemos import InputError, replay
from mnemos.memory_replay import rollout
from mnemos.memory_replay.verification import StateComparison

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
    found, original = [], StateComparison.add
    monkeypatch.setattr(StateComparison, "add", lambda self, t, *rest: found.append(t) or original(self, t, *rest))
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
def test_a_nondeterministic_step_is_found_in_the_first_call_and_costs_nothing_later(call, compared):
    model = Noisy()
    for _ in range(2):  # a call that failed was not the first
        with pytest.raises(InputError, match=FOUND):
            call(model)
    model.noise = False
    call(model)
    assert compared
    compared.clear()
    for named in ({}, {"verify": "never"}, {"verify": False}):
        call(model, **named)
        assert not compared
    model.noise = True
    call(model)  # nobody looks
    for always in ("always", True, 1e-3):
        with pytest.raises(InputError, match=FOUND):
            call(model, verify=always)


def test_another_step_mode_or_model_is_another_first_call(compared):
    model, other = Noisy(False), Noisy(False)

    def own(x, state):
        return model(x, state)

    calls = {
        "the module": lambda: replay(model, segments(), begin()),
        "another module": lambda: replay(other, segments(), begin()),
        "another step": lambda: replay(own, segments(), begin(), module=model),
        "another advance": lambda: replay(model, segments(), begin(), advance=lambda x, s: model(x, s)[1]),
        "a function": lambda: replay(own, segments(), begin()),
        "another mode": lambda: replay(model.eval(), segments(), begin()),
    }
    for name, call in calls.items():
        for times in range(2):
            compared.clear()
            call()
            assert bool(compared) == (times == 0), name
        if name == "another mode":
            model.train()


def test_a_call_without_a_first_pass_is_no_first_call(compared):
    model = Noisy()
    replay(model, segments(1), begin())
    replay(model, segments(), begin(), truncate_every=1)
    assert not compared
    with pytest.raises(InputError, match=FOUND):
        replay(model, segments(), begin())


def test_what_was_verified_is_forgotten_with_the_model():
    gc.collect()
    before, model = len(rollout._verified), Noisy(False)
    replay(model, segments(), begin())
    assert len(rollout._verified) == before + 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    for _ in range(3):  # functions that are made anew
        made = cell()
        replay(lambda x, s, made=made: made(x, s), segments(), begin())
    gc.collect()
    assert len(rollout._verified) == before


def test_all_ways_give_the_same_bits():
    model, found = cell(), []
    for verify in ("first", "first", "always", "never"):
        torch.manual_seed(3)
        out = replay(model, segments(), begin(), verify=verify, checkpoints=2)
        found.append([out.loss, *out.losses, *gradients(model).values(), out.state["h"], torch.get_rng_state()])
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))
