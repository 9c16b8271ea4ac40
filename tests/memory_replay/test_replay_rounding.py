"""Randomness is found by the comparison also where summands cancel; what the errors say."""

import random

import pytest
import torch
from replay_standins import begin, cell, segments

from mnemos import InputError, replay


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


def test_a_difference_of_halves_is_said_to_be_one():
    model = cell(dropout=0.0)

    def off(factor):
        return lambda x, s: {**model.advance(x, s), "h": model.advance(x, s)["h"] * factor}

    with pytest.raises(InputError, match=r"explains\); give tolerance=0\.02 if .* half precision, or draw"):
        replay(model, segments(), begin(), advance=off(1.001))
    with pytest.raises(InputError, match=r"explains\); draw from"):
        replay(model, segments(), begin(), advance=off(1.1))
