"""A loss or state that is about zero by cancellation passes the comparison; real randomness does not."""

import random

import pytest
import torch
from replay_standins import agree, begin, cell, gradients, plain, segments
from torch import nn

from mnemos import InputError, replay
from mnemos.memory_replay.verification import sensitivity


def rounded(x):
    """x as another order of its sums would round it: in the run without gradient the last bits differ."""
    return x if torch.is_grad_enabled() else x * (1 + 3e-7)


def advantages(model, x, state):
    """A loss of normalised advantages, whose summands cancel, and a state with a difference of means in it."""
    _, new = model(x, state)
    h = rounded(new["h"])
    gain = (h - h.mean()) / h.std()
    return gain.mean(), {**new, "h": h}, (h.mean(1) - h.mean()).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_and_a_state_that_cancel(dtype):
    model, pieces = cell(torch.float32), segments(5, torch.float32)

    def step(x, state):
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            loss, new, difference = advantages(model, x, state["cell"])
        return loss, {"cell": new, "difference": difference.float().detach()}

    state = {"cell": begin(torch.float32), "difference": torch.zeros(())}
    out = replay(step, pieces, state, module=model)
    assert out.losses.abs().max() < 1e-2, "nothing cancels"


@pytest.mark.parametrize("buffer", [False, True])
def test_randomness_that_nothing_registers_is_found_where_summands_cancel(buffer):
    """The same losses, with noise of a generator of the step's own, or of a number that changes with every call."""
    model, pieces, own, calls = cell(torch.float32, dropout=0.0), segments(5, torch.float32), random.Random(0), []

    def step(x, state):
        calls.append(None)
        mask = torch.ones(5)
        mask[own.randrange(5) if not buffer else len(calls) % 5] = 0
        loss, new, _ = advantages(model, x * mask, state)
        return loss, new

    with pytest.raises(InputError, match=r"(state|loss) of the first pass.*so other numbers were drawn or read"):
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
    with pytest.raises(InputError, match=r"so other numbers were drawn or read\); draw from"):
        replay(model, segments(), begin(), advance=off(1.1))


def test_the_measurement_leaves_generators_and_buffers_as_they_are():
    """Steps that are measured give the gradients and the buffers of a plain loop."""

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell(torch.float32)
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x, state):
            loss, state = self.cell(x + self.mean.clone(), state)
            self.mean.mul_(0.9).add_(rounded(state["h"]).detach().mean(0), alpha=0.1)
            h = state["h"]
            return loss * 1e-3 + (h - rounded(h.mean())).mean(), state

    found = []
    for way in (lambda m: plain(m, segments(6, torch.float32), begin(torch.float32)), None):
        torch.manual_seed(0)
        model = Counted()
        torch.manual_seed(3)
        if way is None:
            replay(model, segments(6, torch.float32), begin(torch.float32))
        else:
            way(model)
        found.append((gradients(model), model.mean, torch.rand(2)))
    agree(found[1], found[0], 1e-4)


def test_the_estimate_follows_the_numbers_that_are_added_up():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    empty = lambda: torch.empty_like(x).fill_(2.0)  # noqa: E731
    moved = sensitivity(
        lambda: {
            "sum": x.sum() - x.sum(),
            "large": (1e4 * x).sum() - 1e4 * x.sum(),
            "vector": 2 * x - x - x,
            "view": x[:10].clone().add_(1)[2:4],
            "drawn": torch.zeros(100).normal_() * 0,
            "set": empty(),
        },
        lambda dtype: 1e-3,
    )
    one = 3 * 0.25e-3
    assert 0.05 * x.norm() * one < moved["sum"] < 20 * x.norm() * one
    assert 1e3 * moved["sum"] < moved["large"] < 1e5 * moved["sum"]
    assert 1.5 * one * x.norm() < moved["vector"] < 3.5 * one * x.norm()
    assert moved["view"] > 0
    assert moved["drawn"] == 0
    assert moved["set"] < 3 * one * 2 * 1000**0.5
