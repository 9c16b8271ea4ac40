"""What a rollout keeps: bytes of one step's graph whatever the length, stored states, and where they wait."""

import gc
import weakref

import pytest
import torch
from replay_standins import agree, begin, cell, gradients, segments
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mnemos import Transformer, replay
from mnemos.attention import LinearConfig, SoftmaxConfig


def most_saved(run):
    """The most bytes that autograd held at once in saved tensors, each tensor counted while anything holds it."""
    now, most = 0, 0

    class Held:
        def __init__(self, x):
            nonlocal now, most
            self.x, self.bytes = x, x.numel() * x.element_size()
            now += self.bytes
            most = max(most, now)

        def __del__(self):
            nonlocal now
            now -= self.bytes

    with saved_tensors_hooks(Held, lambda held: held.x):
        run()
    gc.collect()
    assert now == 0
    return most


@pytest.mark.slow
def test_saved_activations_do_not_grow_with_the_number_of_segments():
    model = cell(torch.float32)
    saved = [most_saved(lambda n=n: replay(model, segments(n, torch.float32), begin(torch.float32))) for n in (3, 48)]
    assert saved[1] <= 1.01 * saved[0]


@pytest.mark.parametrize(("checkpoints", "passes"), [("all", 1), ("sqrt", 2), (2, 6), (4, 3)])
def test_how_often_a_step_is_run(checkpoints, passes):
    """Each level is one more first pass, less what need not be run."""
    calls, model = [], cell()

    def step(x, state):
        calls.append(x)
        return model(x, state)

    replay(step, segments(64), begin(), checkpoints=checkpoints)
    assert 64 + (passes - 1) * 32 < len(calls) <= 64 * (1 + passes) - 1


def test_a_state_that_is_a_part_of_an_activation_keeps_no_more_than_itself(tmp_path):
    linear = nn.Linear(5, 5)
    kept = []

    def step(x, state):
        y = torch.tanh(linear(x) + (0 if state is None else state))
        kept.append(weakref.ref(y.untyped_storage()))
        return y.square().mean(), y[:, -1:]

    def looking(x, state):
        assert sum(r() is not None for r in kept) <= 2
        return step(x, state)

    replay(looking, [torch.randn(2, 100, 5) for _ in range(20)])


@pytest.mark.parametrize("checkpoints", ["all", "sqrt"])
def test_offload_changes_nothing(checkpoints):
    model, found = cell(), []
    for offload in (False, True):
        torch.manual_seed(3)
        out = replay(model, segments(20), begin(), offload=offload, checkpoints=checkpoints)
        found.append((gradients(model), out.loss, out.state, out.state_grad))
    agree(found[1], found[0], 0.0)


@pytest.mark.parametrize("attention", [LinearConfig(), SoftmaxConfig(), SoftmaxConfig(window=6)], ids=repr)
@pytest.mark.parametrize("checkpoints", ["all", "sqrt"])
def test_models_of_ours(attention, checkpoints):
    """A growing memory, too: its keys lie in one buffer that is appended to, which writes into no state."""
    torch.manual_seed(0)
    model = Transformer(vocab_size=9, dim=8, layers=2, num_heads=2, mlp=16, attention=attention).double()
    ids = torch.randint(9, (2, 65))

    def step(piece, state):
        logits, state = model(piece[0], state)
        return nn.functional.cross_entropy(logits.flatten(0, 1), piece[1].flatten()), state

    logits, _ = model(ids[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = gradients(model)
    pieces = list(zip(ids[:, :-1].split(4, 1), ids[:, 1:].split(4, 1), strict=True))
    replay(step, pieces, module=model, checkpoints=checkpoints)
    agree(gradients(model), expected, 1e-10)
