"""States whose batch is not on the first axis: checks, resets, and resets to a learned start."""

import pytest
import torch
from replay_standins import agree, gradients
from torch import nn
from torch.nn import functional as F

from mnemos import InputError, replay


def layered(kind, layers=3, dtype=torch.float64):
    torch.manual_seed(0)
    model = kind(5, 4, layers, batch_first=True).to(dtype)

    def step(x, state):
        y, state = model(x, state)
        return y.square().mean(), state

    return model, step


def pieces(count=6, rows=3):
    return list(torch.randn(count, rows, 2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


ROWS = [None, torch.tensor([True, False, False]), None, torch.tensor([False, True, True]), None, torch.ones(3) > 0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("axis", ["number", "pytree"])
def test_resets_of_rows_of_an_lstm_with_as_many_layers_as_rows(kind, axis):
    model, step = layered(kind)
    total, state = torch.zeros(()), None
    for x, rows in zip(pieces(), ROWS, strict=True):
        if rows is not None and state is not None:
            keep = (~rows).double().view(1, 3, 1)
            state = tuple(s * keep for s in state) if kind is nn.LSTM else state * keep
        loss, state = step(x, state)
        total = total + loss / 6
    total.backward()
    expected = gradients(model)
    named = 1 if axis == "number" else (-2, 1) if kind is nn.LSTM else -2
    out = replay(step, pieces(), module=model, resets=ROWS, batch_axis=named)
    agree((out.loss, out.state, gradients(model)), (total, state, expected), 1e-12)


def test_an_axis_that_may_be_the_layers_is_not_reset():
    model, step = layered(nn.LSTM)
    with pytest.raises(InputError, match=r"step 1: reset: .*shape \(3, 3, 4\).*give batch_axis=0, or 1 for \[layers"):
        replay(step, pieces(), module=model, resets=ROWS)
    model, step = layered(nn.LSTM, layers=2)
    with pytest.raises(InputError, match=r"step 1: reset: expected a mask of 2 rows.*give batch_axis"):
        replay(step, pieces(), module=model, resets=ROWS)
    cut = [nn.Parameter(torch.randn(3, 3, 4, dtype=torch.float64))]
    out = replay(lambda x, s: (s.square().mean(), s * 2), pieces(2), cut[0], resets=ROWS[:2], batch_axis=0)
    assert out.state[0].abs().max() == 0
    assert out.state[1].abs().max() > 0


def test_states_that_lead_with_time_and_segments_of_unequal_length():
    """The state is the last segment, [T, B, D]: its first axis changes and its batch does not."""
    linear = nn.Linear(5, 5)
    lengths = [torch.randn(t, 4, 5) for t in (3, 2, 4, 2)]

    def step(x, state):
        y = linear(x) + state.mean(0)
        return y.square().mean(), y

    for axis in (1, (1,)):
        wrapped = step if axis == 1 else lambda x, s: (lambda loss, y: (loss, (y,)))(*step(x, s[0]))
        start = torch.zeros(3, 4, 5)
        out = replay(wrapped, lengths, start if axis == 1 else (start,), module=linear, batch_axis=axis)
        assert (out.state if axis == 1 else out.state[0]).shape == (2, 4, 5)


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("checkpoints", ["all", 2])
def test_resets_to_a_learned_start(computed, checkpoints):
    model, step = layered(nn.GRU, layers=2)
    start = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def begin():
        return start.tanh().expand(2, 1, 4) if computed else start

    total, state = torch.zeros(()), None
    for x, rows in zip(pieces(), ROWS, strict=True):
        if rows is not None:
            state = torch.where(rows.view(1, 3, 1), begin(), state)
        loss, state = step(x, state)
        total = total + loss / 6
    total.backward()
    expected, start.grad = (gradients(model), start.grad), None
    out = replay(
        step,
        pieces(),
        module=model,
        resets=ROWS,
        batch_axis=1,
        reset_to=begin if computed else start,
        checkpoints=checkpoints,
    )
    agree((out.loss, gradients(model), start.grad), (total, *expected), 1e-12)


def test_states_of_this_library_lead_with_the_batch():
    """As many heads as rows: no axis is asked for."""
    from mnemos import Transformer
    from mnemos.attention import LinearConfig

    model = Transformer(vocab_size=7, dim=8, layers=2, num_heads=2, mlp=8, attention=LinearConfig())

    def step(x, state):
        logits, state = model(x, state)
        return F.cross_entropy(logits.transpose(1, 2), x), state

    replay(step, list(torch.randint(7, (3, 2, 5))), resets=[None, torch.tensor([True, False]), None], module=model)
