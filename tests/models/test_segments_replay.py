"""Models of segments under memory replay: gradients are those of back-propagation through time."""

import itertools

import pytest
import torch
from test_segments import model as stirred
from torch.nn import functional as F

from mnemos.memory_replay import replay
from mnemos.types import detach, reset

STEPS, L = 5, 4


def build(kind, **fields):
    return stirred(kind, **fields).train()


def step_of(model):
    def step(segment, state):
        logits, state = model(segment[0], state)
        return F.cross_entropy(logits.flatten(0, 1), segment[1].flatten()), state

    return step


def pieces(cuts):
    x = torch.randint(11, (3, cuts[-1] + 1))
    return [(x[:, a:b], x[:, a + 1 : b + 1]) for a, b in itertools.pairwise(cuts)]


def gradients(model):
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def same(found, model):
    """The gradients that were found are those that the model has now; None: no gradient."""
    for mine, (name, p) in zip(found, model.named_parameters(), strict=True):
        assert (mine is None) == (p.grad is None), name
        if mine is not None:
            torch.testing.assert_close(mine, p.grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["reads", "cls", "rmt", "armt"])
@pytest.mark.parametrize(("horizon", "inside"), [(None, False), (None, True), (2, True)])
def test_gradients_are_those_of_back_propagation_through_time(kind, horizon, inside):
    """With dropout, a reset in mid-rollout, and calls that end inside a segment or not."""
    model = build(kind, dropout=0.2)
    step, segments = step_of(model), pieces([0, 4, 8, 10, 16, 21] if inside else range(0, STEPS * L + 1, L))
    resets = [None] * STEPS
    resets[3] = torch.tensor([True, False, False])
    torch.manual_seed(5)
    out = replay(
        step, segments, None, advance=lambda s, m: model.advance(s[0], m), resets=resets, truncate_every=horizon
    )
    found = gradients(model)
    # The plain loop, each step from the generator state that its `advance` started from; the last ones have none.
    torch.manual_seed(5)
    total, state = torch.zeros((), dtype=torch.float64), None
    for t, segment in enumerate(segments):
        if horizon and t and t % horizon == 0:
            state = detach(state)
        if resets[t] is not None:
            state = reset(state, resets[t])
        before = torch.get_rng_state()
        loss, after = step(segment, state)
        if (t + 1) % (horizon or STEPS):
            torch.set_rng_state(before)
            with torch.no_grad():
                model.advance(segment[0], state)
        total, state = total + loss / STEPS, after
    total.backward()
    torch.testing.assert_close(out.loss, total.detach())
    same(found, model)


def test_sliding_windows_are_those_of_back_propagation_through_time():
    """Three segments in an update, the next one later (Algorithm 1), with the paper's settings and a plain loop."""
    model = build("paper", encoder_layers=1, decoder_layers=1)
    step, segments = step_of(model), pieces(range(0, STEPS * L + 1, L))
    state = slid = None
    for first in range(STEPS - 2):
        window = segments[first : first + 3]
        out = replay(step, window, slid, advance=lambda s, m: model.advance(s[0], m), module=model, slide=1)
        found = gradients(model)  # None: BOS is read in the first window alone
        total, states = torch.zeros((), dtype=torch.float64), [state]
        for segment in window:
            loss, after = step(segment, states[-1])
            total = total + loss / 3
            states.append(after)
        total.backward()
        torch.testing.assert_close(out.loss, total.detach())
        same(found, model)
        state, slid = detach(states[1]), out.next_state
        torch.testing.assert_close(slid.memory.slots, state.memory.slots)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
        model.zero_grad()


def test_calls_of_one_token_with_rows_at_different_places():
    """A call that ends a segment drops keys that it has just appended to the state's buffer: no write to that state."""
    model = build("reads", encoder_layers=1, decoder_layers=1)
    tokens = torch.randint(11, (2, 2 * L + 2)).split(1, 1)
    resets = [torch.tensor([False, True]) if t == 2 else None for t in range(len(tokens))]

    def step(x, state):
        logits, state = model(x, state)
        return logits.logsumexp(2).mean(), state

    replay(step, tokens, None, resets=resets)
    found = gradients(model)
    total, state = 0.0, None
    for x, rows in zip(tokens, resets, strict=True):
        loss, state = step(x, state if rows is None else reset(state, rows))
        total = total + loss / len(tokens)
    total.backward()
    same(found, model)
