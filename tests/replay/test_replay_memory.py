"""What a rollout keeps: bytes of one step's graph whatever the length, stored states, and where they wait."""

import gc
import os
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


def test_saved_activations_do_not_grow_with_the_number_of_segments():
    model = cell(torch.float32)
    saved = [most_saved(lambda n=n: replay(model, segments(n, torch.float32), begin(torch.float32))) for n in (3, 48)]
    assert saved[1] <= 1.01 * saved[0]


class Counting:
    """A step that counts the states of earlier steps that are still alive."""

    def __init__(self, model):
        self.model, self.alive, self.most = model, weakref.WeakSet(), 0

    def __call__(self, x, state):
        loss, state = self.model(x, state)
        self.alive.add(state["h"].untyped_storage())
        self.most = max(self.most, len(self.alive))
        return loss, state


@pytest.mark.parametrize(("checkpoints", "limit"), [("all", 66), ("sqrt", 20), (4, 16), (2, 16)])
def test_how_many_states_are_kept(checkpoints, limit):
    gc.disable()  # nothing here may wait for the collector
    try:
        step = Counting(cell())
        replay(step, segments(64), begin(), checkpoints=checkpoints)
        assert 1 < step.most <= limit
        if checkpoints == "all":
            assert step.most >= 62
    finally:
        gc.enable()


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
def test_offload_changes_nothing_and_leaves_nothing(tmp_path, checkpoints):
    model, most = cell(), 0

    def step(x, state):
        nonlocal most
        most = max(most, sum(len(files) for _, _, files in os.walk(tmp_path)))
        return model(x, state)

    found = []
    for offload in (False, True, str(tmp_path), tmp_path):
        torch.manual_seed(3)
        out = replay(step, segments(20), begin(), offload=offload, checkpoints=checkpoints)
        found.append((gradients(model), out))
    for grads, out in found[1:]:
        agree(grads, found[0][0], 0.0)
        agree((out.loss, out.state, out.state_grad), (found[0][1].loss, found[0][1].state, found[0][1].state_grad), 0.0)
    assert most == {"all": 19, "sqrt": 7}[checkpoints]
    assert not any(tmp_path.iterdir())
    with pytest.raises(KeyError):
        replay(
            lambda x, s: (model(x, s)[0], model(x, s)[1]) if x.shape[1] == 2 else {}[0], segments(), offload=tmp_path
        )
    assert not any(tmp_path.iterdir())


def test_generators_that_stand_still_are_stored_once():
    from mnemos.replay.moments import generators

    first = generators()
    again = generators(first)
    assert all(again[name] is first[name] for name in first)
    torch.rand(1)
    moved = generators(first)
    assert moved["cpu"] is not first["cpu"]
    assert moved["python"] is first["python"]


@pytest.mark.parametrize("attention", [LinearConfig(), SoftmaxConfig(), SoftmaxConfig(window=6)], ids=repr)
@pytest.mark.parametrize("checkpoints", ["all", "sqrt"])
def test_models_of_ours(attention, checkpoints):
    """A growing memory, too: its keys lie in one buffer that is appended to, which writes into no state."""
    torch.manual_seed(0)
    model = Transformer(vocab_size=9, width=8, layers=2, heads=2, mlp=16, attention=attention).double()
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
