"""RMT and ARMT under memory replay: full and k-step gradients are those of back-propagation through time."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from mnemos.memory import AssociationsConfig, TokensConfig, TokenState
from mnemos.memory_replay import replay
from mnemos.models import ARMT, RMT
from mnemos.types import detach, reset

STEPS, L = 6, 4
MODELS = {"rmt": (RMT, TokensConfig(tokens=3)), "armt": (ARMT, AssociationsConfig(tokens=3, key_dim=5))}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("horizon", [None, 2])
def test_gradients_are_those_of_back_propagation_through_time(kind, horizon):
    """With dropout, a reset in mid-rollout and calls that end inside a segment."""
    cls, memory = MODELS[kind]
    torch.manual_seed(0)
    model = cls(vocab_size=13, dim=12, layers=2, num_heads=2, mlp=16, segment=L, dropout=0.2, memory=memory).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=torch.float64)
    cuts = [0, 4, 8, 10, 16, 20, 25]
    x = torch.randint(13, (3, cuts[-1] + 1))
    segments = [(x[:, a:b], x[:, a + 1 : b + 1]) for a, b in itertools.pairwise(cuts)]
    resets = [None] * STEPS
    resets[3] = torch.tensor([True, False, False])

    def step(segment, state):
        logits, state = model(segment[0], state)
        return F.cross_entropy(logits.flatten(0, 1), segment[1].flatten()), state

    torch.manual_seed(5)
    out = replay(
        step, segments, None, advance=lambda s, m: model.advance(s[0], m), resets=resets, truncate_every=horizon
    )
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(5)
    total, state = torch.zeros((), dtype=torch.float64), None
    for t, segment in enumerate(segments):
        if horizon and t and t % horizon == 0:
            state = detach(state)
        if resets[t] is not None:
            state = reset(state, resets[t])
        loss, state = step(segment, state)
        total = total + loss / STEPS
    total.backward()
    torch.testing.assert_close(out.loss, total.detach())
    for (name, p), mine in zip(model.named_parameters(), found, strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_the_memory_carries_gradient_to_the_first_segment_and_not_past_the_horizon():
    torch.manual_seed(0)
    model = RMT(vocab_size=13, dim=16, segment=L, memory=TokensConfig(tokens=3)).double()
    x = torch.randint(13, (2, 3 * L))
    first = model.initial_state(2)
    tokens = torch.randn_like(first.memory.tokens, requires_grad=True)
    first = first._replace(memory=TokenState(tokens, torch.ones_like(first.memory.writes)))
    found = []
    for cut in (False, True):
        _, state = model(x[:, : 2 * L], first)
        logits, _ = model(x[:, 2 * L :], detach(state) if cut else state)
        (gradient,) = torch.autograd.grad(logits.square().sum(), tokens, allow_unused=True, materialize_grads=True)
        found.append(float(gradient.abs().max()))
    assert found[0] > 1e-6
    assert found[1] == 0
