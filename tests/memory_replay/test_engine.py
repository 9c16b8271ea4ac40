"""The loop that all trainers run: replayed or not, it gives the gradients of back-propagation over the rollout."""

import contextlib

import pytest
import torch
import torch.distributed
from replay_standins import agree, begin, cell, gradients, plain, segments
from torch import nn

from mnemos import InputError, add_auxiliary_loss
from mnemos.memory_replay.distributed import average_gradients, find_no_sync
from mnemos.memory_replay.engine import CarriedStates, RolloutEngine, read_in_turn

RESETS = [None, torch.tensor([True, False, True]), None, None, torch.tensor([False, True, False]), None, None]


def reading(step):
    """A reader of (segment, rows that begin anew)."""

    def read(given, state):
        losses, states = read_in_turn(step, given, state)
        return torch.stack(losses).sum(), states

    return read


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(("horizon", "slide"), [(0, 0), (0, 2), (3, 0), (3, 4), (1, 3)])
@pytest.mark.parametrize("last", [True, False])
def test_gradients_and_states_are_those_of_a_plain_loop(replay, horizon, slide, last):
    """Gradients are reduced over processes by the last backward pass alone, if at all."""
    model, given, reduced, inside = cell(dropout=0.0), list(zip(segments(), RESETS, strict=True)), [], []

    @contextlib.contextmanager
    def no_sync():
        inside.append(None)
        yield
        inside.pop()

    def backward(loss):
        reduced.append(not inside)
        loss.backward()

    def strided(x, state):
        loss, state = model(x, state)
        return loss, {**state, "h": state["h"].T.contiguous().T}

    plain(model, segments(), begin(), weights=[1.0] * 7, resets=RESETS, every=horizon or 7)
    expected = gradients(model)
    _, _, state = plain(model, segments()[: slide or 7], begin(), resets=RESETS)
    gradients(model)
    engine = RolloutEngine(backward, None, replay, horizon, slide, no_sync=no_sync)
    losses, found = engine.run(reading(strided), given, begin(), last=last)
    agree(gradients(model), expected, 1e-12)
    agree(found["h"], state["h"], 1e-12)
    assert found["h"].is_contiguous()
    assert not found["h"].requires_grad
    assert len(losses) == (7 if engine.replays(7) else -(-7 // (horizon or 7)))
    assert not losses.requires_grad
    assert reduced == [False] * (len(losses) - 1) + [last]


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("replay", [True, False])
def test_auxiliary_losses_of_layers_count_once(count, replay):
    model = cell(dropout=0.0)
    given = [(x, None) for x in segments(count)]

    def step(x, state):
        add_auxiliary_loss(model.head.bias.square().sum())
        return model(x, state)

    RolloutEngine(replay=False).run(reading(model), given, begin())
    expected = gradients(model)
    expected["head.bias"] += count * 2 * model.head.bias.detach()
    RolloutEngine(replay=replay).run(reading(step), given, begin())
    agree(gradients(model), expected, 1e-12)


def test_an_engine_verifies_every_rollout_and_carried_states_the_first():
    model, drawn = cell(dropout=0.0), torch.Generator().manual_seed(0)
    given = [(x, None) for x in segments()]

    def noisy(x, state):
        loss, state = model(x, state)
        return loss, {**state, "h": state["h"] + torch.rand((), generator=drawn)}

    said = r"step \d: .* the state of the first pass"
    engine = RolloutEngine()
    for _ in range(2):
        with pytest.raises(InputError, match=said):
            engine.run(reading(noisy), given, begin())
        engine.run(reading(model), given, begin())
    carried = CarriedStates(engine)
    carried.states = [begin()]
    carried.backward(0, reading(noisy), given[:1])  # one segment is not read twice
    with pytest.raises(InputError, match=said):
        carried.backward(0, reading(noisy), given)
    carried.backward(0, reading(model), given)
    carried.backward(0, reading(noisy), given)


def state(rows=2, tokens=3, width=4, dtype=torch.float32, of=torch.int64, number=1.5):
    h = torch.arange(rows * tokens * width, dtype=dtype).view(rows, tokens, width)
    return {"h": h, "seen": torch.arange(rows).to(of), "number": number}


def test_carried_states_go_on_from_what_was_saved():
    """By a model of other rows, tokens and precision; a state that is none stays so."""
    first, second = CarriedStates(RolloutEngine(), 3), CarriedStates(RolloutEngine(), 3)
    first.states = [state(), None, state(rows=5)]
    second.states[1] = state()
    saved = first.state_dict()
    second.load_state_dict(saved, lambda: state(1, 0, dtype=torch.bfloat16, number=0.0), "cpu")
    agree(second.states, first.states, 0.0)
    second.states[0]["h"] += 1
    assert torch.equal(saved[0][0], first.states[0]["h"])
    for fresh in (
        lambda: state(width=5),
        lambda: state(of=torch.int32),
        lambda: state(of=torch.float32),
        lambda: state(number=2),
        lambda: state(number=torch.ones(2)),
        lambda: {**state(), "h": torch.ones(2, 3, 4, 1)},
        lambda: {**state(), "more": torch.ones(2)},
    ):
        with pytest.raises(InputError, match=r"expected a state of this model \([34] tensors\).* \(3\); resume with"):
            second.load_state_dict(saved, fresh, "cpu")
    with pytest.raises(InputError, match="expected 2 carried states, found 3; use another checkpoint"):
        CarriedStates(RolloutEngine(), 2).load_state_dict(saved, state, "cpu")


# --- several processes, of which the others are played ---


def test_gradients_are_averaged_and_one_that_nobody_has_stays_none(monkeypatch):
    sizes = [(2, 2), (3,), (1,), (4,), (2,)]
    first, second, unused, fixed, wide = (nn.Parameter(torch.zeros(size), size != (4,)) for size in sizes)
    wide.data = wide.data.double()
    first.grad, wide.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0], dtype=torch.float64)
    others = {torch.float32: torch.tensor([0.0, 1, 0, 1, 0, -1, -2, 4, 6, 2, 0]), torch.float64: torch.ones(3)}
    average_gradients([first])
    assert first.grad.tolist() == [[1, 2], [3, 4]], "alone"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.add_(others[x.dtype]))
    average_gradients(iter([first, second, unused, fixed, wide]))
    assert [first.grad.tolist(), second.grad.tolist()] == [[[1, 1], [1, 1]], [2, 3, 1]]
    assert (unused.grad, fixed.grad, wide.grad.tolist()) == (None, None, [3, 3.5])


def test_the_outermost_parts_that_reduce_gradients_do_not_inside_no_sync():
    class Sharded(nn.Sequential):
        def set_requires_gradient_sync(self, value):
            self.reduces = value

    class Wrapped(nn.Sequential):
        @contextlib.contextmanager
        def no_sync(self):
            self.reduces = False
            yield
            self.reduces = True

    plain = nn.Linear(1, 1)
    plain.no_sync = None
    assert find_no_sync(plain) is find_no_sync(None) is None
    inner = Wrapped()
    parts = Sharded(inner), Wrapped(Sharded())
    with find_no_sync(nn.Sequential(plain, nn.Sequential(*parts)))():
        assert [part.reduces for part in parts] == [False, False]
    assert [part.reduces for part in parts] == [True, True]
    assert not hasattr(inner, "reduces")
