"""The random generators of a rollout: those of the caller, and the global ones."""

import random

import numpy as np
import pytest
import torch
from replay_standins import agree, begin, cell, gradients, plain, segments

from mnemos import InputError, replay

OWN = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand((), generator=g))),
    "python": (lambda: random.Random(1), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda g: float(g.random())),
    "philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda g: float(g.normal())),
    "legacy": (lambda: np.random.RandomState(1), lambda g: float(g.randn())),  # keeps a second normal number
}


@pytest.mark.parametrize("name", list(OWN))
def test_generators_of_the_caller(name):
    make, draw = OWN[name]
    model, ways = cell(dropout=0.0), []
    for registered in (False, True):
        own = make()

        def step(x, state, own=own):
            return model(x * (1 + draw(own)), state)

        if registered:
            out = replay(step, segments(), begin(), module=model, generators=[own], checkpoints=3)
            total = out.loss
        else:
            total = plain(step, segments(), begin())[0]
        ways.append((total, gradients(model), draw(own)))
    agree(ways[1], ways[0], 1e-12)

    own = make()
    with pytest.raises(InputError, match="or give yours as generators="):
        replay(lambda x, s: model(x * (1 + draw(own)), s), segments(), begin(), module=model)
    first, _ = draw(own := make()), own  # after an error a registered one is where it was
    own = make()
    with pytest.raises(InputError, match=r"expected \(loss, state\)"):
        replay(lambda x, s: draw(own), segments(), begin(), generators=[own])
    assert draw(own) == first


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([3], "expected generators of torch .*, found int"),
        ([random.SystemRandom()], "expected generators of torch .*, found SystemRandom"),
        (torch.Generator(), r"expected generators=\[...\], found one Generator; give it in a list"),
    ],
)
def test_what_is_no_generator(given, words):
    with pytest.raises(InputError, match=words):
        replay(cell(), segments(), begin(), generators=given)
