"""What a rollout keeps: bytes of one step's graph whatever the length, stored states, and where they wait."""

import weakref

import pytest
import torch
from replay_standins import agree, begin, cell, gradients, plain, segments
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
    assert now == 0
    return most


def test_saved_activations_do_not_grow_with_the_number_of_segments():
    model = cell(torch.float32)
    saved = [most_saved(lambda n=n: replay(model, segments(n, torch.float32), begin(torch.float32))) for n in (3, 48)]
    assert saved[1] <= 1.01 * saved[0]


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, 64 + 63),  # the last step needs no first pass
        ({"checkpoints": "sqrt"}, 64 + 56 + 56),  # nor do the last of eight steps, in either pass
        ({"truncate_every": 1}, 64),
        ({"truncate_every": 4}, 64 + 48),
        ({"advance": True}, 64),
    ],
)
def test_how_often_a_step_is_run(options, runs):
    calls, model = [], cell()

    def noting(name, function):
        def noted(x, state):
            calls.append(name)
            return function(x, state)

        return noted

    if "advance" in options:
        options = {"advance": noting("advance", model.advance)}
    replay(noting("step", model), segments(64), begin(), **options)
    assert calls.count("step") == runs
    assert calls.count("advance") == (63 if "advance" in options else 0)


@pytest.mark.parametrize(("checkpoints", "passes"), [(2, 6), (4, 3)])
def test_each_level_of_checkpoints_is_one_more_first_pass_less_what_need_not_be_run(checkpoints, passes):
    calls, model = [], cell()
    replay(lambda x, s: (calls.append(None), model(x, s))[1], segments(64), begin(), checkpoints=checkpoints)
    assert 64 + (passes - 1) * 32 < len(calls) <= 64 * (1 + passes) - 1


def test_a_state_that_is_a_part_of_an_activation_keeps_no_more_than_itself():
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


@pytest.mark.parametrize("checkpoints", ["all", 2, "sqrt"])
def test_neither_offload_nor_verification_changes_a_bit(checkpoints):
    model, found = cell(), []
    for options in ({}, {"offload": True}, {"verify": False}):
        torch.manual_seed(3)
        out = replay(model, segments(20), begin(), checkpoints=checkpoints, **options)
        found.append((gradients(model), out.loss, out.losses, out.state, out.state_grad, torch.get_rng_state()))
    agree(found[1:], [found[0]] * 2, 0.0)


@pytest.mark.parametrize("attention", [LinearConfig(), SoftmaxConfig(), SoftmaxConfig(window=6)], ids=repr)
@pytest.mark.parametrize("checkpoints", ["all", "sqrt"])
def test_models_of_ours(attention, checkpoints):
    """A growing memory, too: its keys lie in one buffer that is appended to, which writes into no state.

    There are as many heads as rows: the rows that are reset are found all the same.
    """
    torch.manual_seed(0)
    model = Transformer(vocab_size=9, dim=8, layers=2, num_heads=2, mlp=16, attention=attention).double()
    ids, resets = torch.randint(9, (2, 33)), [None] * 8
    resets[5] = torch.tensor([True, False])

    def step(piece, state):
        logits, state = model(piece[0], state)
        return nn.functional.cross_entropy(logits.flatten(0, 1), piece[1].flatten()), state

    pieces = list(zip(ids[:, :-1].split(4, 1), ids[:, 1:].split(4, 1), strict=True))
    plain(step, pieces, resets=resets)
    expected = gradients(model)
    replay(step, pieces, module=model, checkpoints=checkpoints, resets=resets)
    agree(gradients(model), expected, 1e-10)
