"""Memformer under memory replay: the critical path alone, dropout on, a document that ends in mid-rollout."""

import pytest
import torch
from torch.nn import functional as F

from mnemos import Memformer, SlotsConfig
from mnemos.memory_replay import replay
from mnemos.types import detach, reset

STEPS, L = 6, 4


@pytest.mark.parametrize("fields", [{}, {"decoder_reads": True, "cls": 2}])
def test_gradients_are_those_of_back_propagation_through_time(fields):
    torch.manual_seed(0)
    model = Memformer(
        vocab_size=13,
        dim=12,
        encoder_layers=2,
        decoder_layers=2,
        num_heads=2,
        mlp=16,
        segment=L,
        dropout=0.2,
        memory=SlotsConfig(slots=5),
        **fields,
    ).double()
    x = torch.randint(13, (3, STEPS * L + 1))
    segments = [(x[:, i : i + L], x[:, i + 1 : i + L + 1]) for i in range(0, STEPS * L, L)]
    resets = [None] * STEPS
    resets[3] = torch.tensor([True, False, False])

    def step(segment, state):
        logits, state = model(segment[0], state)
        return F.cross_entropy(logits.flatten(0, 1), segment[1].flatten()), state

    def advance(segment, state):
        return model.advance(segment[0], state)

    torch.manual_seed(5)
    out = replay(step, segments, None, advance=advance, resets=resets)
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    # The plain loop, each step from the generator state that its `advance` started from.
    torch.manual_seed(5)
    total, state = torch.zeros((), dtype=torch.float64), None
    for t, segment in enumerate(segments):
        if resets[t] is not None:
            state = reset(state, resets[t])
        before = torch.get_rng_state()
        loss, after = step(segment, state)
        if t + 1 < STEPS:
            torch.set_rng_state(before)
            with torch.no_grad():
                advance(segment, state)
        total, state = total + loss / STEPS, after
    total.backward()
    torch.testing.assert_close(out.loss, total.detach())
    for mine, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-11, atol=1e-13)


def test_sliding_windows_are_those_of_back_propagation_through_time():
    """Three segments in an update, the next one later (Algorithm 1), with the paper's settings and a plain loop."""
    torch.manual_seed(0)
    sizes = {"dim": 12, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 16}
    model = Memformer(vocab_size=13, segment=L, preset="paper", memory=SlotsConfig(slots=5), **sizes).double()
    x = torch.randint(13, (3, STEPS * L + 1))
    segments = [(x[:, i : i + L], x[:, i + 1 : i + L + 1]) for i in range(0, STEPS * L, L)]

    def step(segment, state):
        logits, state = model(segment[0], state)
        return F.cross_entropy(logits.flatten(0, 1), segment[1].flatten()), state

    state = slid = None
    for first in range(STEPS - 2):
        out = replay(
            step, segments[first : first + 3], slid, advance=lambda s, m: model.advance(s[0], m), module=model, slide=1
        )
        found = [p.grad for p in model.parameters()]  # None: BOS is read in the first window alone
        model.zero_grad()
        total, states = torch.zeros((), dtype=torch.float64), [state]
        for segment in segments[first : first + 3]:
            loss, after = step(segment, states[-1])
            total = total + loss / 3
            states.append(after)
        total.backward()
        torch.testing.assert_close(out.loss, total.detach())
        for mine, p in zip(found, model.parameters(), strict=True):
            assert (mine is None) == (p.grad is None)
            if mine is not None:
                torch.testing.assert_close(mine, p.grad, rtol=1e-11, atol=1e-13)
        state, slid = detach(states[1]), out.next_state
        torch.testing.assert_close(slid.memory.slots, state.memory.slots)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * (0 if p.grad is None else p.grad)
        model.zero_grad()


def test_calls_of_one_token_with_rows_at_different_places():
    """A call that ends a segment drops keys that it has just appended to the state's buffer: no write to that state."""
    torch.manual_seed(0)
    sizes = {"dim": 12, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "mlp": 16}
    model = Memformer(vocab_size=13, segment=L, **sizes).double()
    tokens = torch.randint(13, (2, 2 * L + 2)).split(1, 1)
    resets = [torch.tensor([False, True]) if t == 2 else None for t in range(len(tokens))]

    def step(x, state):
        logits, state = model(x, state)
        return logits.logsumexp(2).mean(), state

    replay(step, tokens, None, resets=resets)
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    total, state = 0.0, None
    for x, rows in zip(tokens, resets, strict=True):
        loss, state = step(x, state if rows is None else reset(state, rows))
        total = total + loss / len(tokens)
    total.backward()
    for mine, p in zip(found, (p for p in model.parameters() if p.grad is not None), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-11, atol=1e-13)
