"""A replay has the gradients of one graph: checkpoints, windows, resets, generators, auxiliary losses and outputs."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses
from replay_standins import Cell, agree, begin, cell, gradients, plain, segments
from torch import nn
from torch.utils import _pytree as pytree

from mnemos import InputError, add_auxiliary_loss, collect_auxiliary_losses, replay

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def compared(model, pieces, state=None, tolerance=1e-12, step=None, oracle=None, **options):
    """Both from one seed: losses, end state, gradients of parameters, and where the generators end."""
    step = step or model
    torch.manual_seed(3)
    total, losses, end = plain(step, pieces, state, **(oracle or {}))
    expected, drawn = gradients(model), torch.rand(2)
    torch.manual_seed(3)
    out = replay(step, pieces, state, **options)
    found = gradients(model)
    assert torch.equal(torch.rand(2), drawn)
    agree(found, expected, tolerance)
    agree((out.loss, list(out.losses), out.state), (total, losses, end), tolerance)
    assert not out.loss.requires_grad
    assert not out.state["h"].requires_grad
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 2, 3])
@pytest.mark.parametrize("count", [1, 2, 11])
def test_gradients_equal_those_of_one_graph(dtype, checkpoints, count):
    out = compared(
        cell(dtype), segments(count, dtype), begin(dtype), tolerance=TOLERANCE[dtype], checkpoints=checkpoints
    )
    assert out.losses.shape == (count,)
    assert out.aux == [None] * count


def test_numbers_in_a_state_are_compared_as_tensors_are():
    weight, drawn = nn.Parameter(torch.ones(2)), iter(range(99))

    def step(number):
        def read(x, state):
            h = state[0] * weight + x
            return h.sum(), (h, number(state[1]))

        return read

    begin, pieces = (torch.zeros(2), 0.0), [torch.ones(2)] * 3
    for number, end in ((lambda t: t + 0.1, 0.1 + 0.1 + 0.1), (lambda t: float("nan"), float("nan"))):
        assert replay(step(number), pieces, begin).state[1] == pytest.approx(end, nan_ok=True)
    with pytest.raises(InputError, match="expected its replay to give the state of the first pass"):
        replay(step(lambda t: float(next(drawn))), pieces, begin)


def test_the_step_makes_a_learned_start_from_none():
    model = cell(learned=True)
    assert compared(model, segments(), checkpoints=2).state_grad is None


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"checkpoints": "sqrt"}, {"truncate_every": 3}])
@pytest.mark.parametrize("slide", [1, 4])
def test_a_window_that_slides_starts_from_the_state_after_its_step(options, slide):
    """Windows of five segments; each starts from what the one before computed, with the weights of that time."""
    model, pieces, state = cell(), segments(12), begin()

    def step(x, state):  # whose state is a view of a larger tensor
        loss, state = model(x, state)
        return loss, {**state, "h": torch.stack([state["h"]] * 8)[3]}

    every = options.get("truncate_every", 10**9)
    for first in range(0, 12 - 4, slide):
        window = pieces[first : first + 5]
        torch.manual_seed(3 + first)
        _, _, wanted = plain(step, window[:slide], state)
        gradients(model)
        torch.manual_seed(3 + first)
        total, _, end = plain(step, window, state, every=every)
        expected = gradients(model)
        torch.manual_seed(3 + first)
        out = replay(step, window, state, slide=slide, **options)
        agree(gradients(model), expected, 1e-12)
        agree((out.loss, out.state, out.next_state), (total, end, wanted), 1e-12)
        assert not out.next_state["h"].requires_grad
        assert out.next_state["h"].untyped_storage().nbytes() == 3 * 5 * 8, "no activation is kept alive"
        assert torch.equal(out.next_state["seen"][0], state["seen"][0] + sum(x.shape[1] for x in window[:slide]))
        state = out.next_state
        with torch.no_grad():  # other weights for the next window
            for p in model.parameters():
                p *= 0.9


@pytest.mark.parametrize("kind", ["leaf", "computed", "plain"])
def test_gradient_to_a_given_state(kind):
    """That of a state without gradient is in the result alone."""
    model, start = cell(), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    make = {"leaf": lambda: start, "computed": lambda: 2 * start, "plain": start.detach}[kind]
    torch.manual_seed(3)
    plain(model, segments(), {**begin(), "h": start if kind == "plain" else make()})
    expected, start.grad = (start.grad, gradients(model)), None
    torch.manual_seed(3)
    out = replay(model, segments(), {**begin(), "h": make()})
    h = out.state_grad["h"] * (2 if kind == "computed" else 1)
    agree((h if kind == "plain" else start.grad, gradients(model), h), (*expected, expected[0]), 1e-12)
    assert out.state_grad["seen"] == (None, None)


@pytest.mark.parametrize("checkpoints", ["all", "sqrt", 2])
def test_advance_starts_each_step_where_the_plain_loop_is_put(checkpoints):
    model, pieces = cell(), segments()
    torch.manual_seed(3)
    places = []
    state = begin()
    with torch.no_grad():
        for piece in pieces:
            places.append(torch.get_rng_state())
            state = model.advance(piece, state)
    total, _, end = plain(model, pieces, begin(), before=lambda t: torch.set_rng_state(places[t]))
    expected, drawn = gradients(model), torch.rand(1)
    torch.manual_seed(3)
    out = replay(model, pieces, begin(), advance=model.advance, checkpoints=checkpoints)
    assert torch.equal(torch.rand(1), drawn)
    agree(gradients(model), expected, 1e-12)
    agree((out.loss, out.state), (total, end), 1e-12)


@pytest.mark.parametrize("checkpoints", ["all", 2])
def test_weights(checkpoints):
    weights = [0.0, 0.5, -2.0, 0.0, 3.0, 1.0, 0.25]
    compared(cell(), segments(), begin(), oracle={"weights": weights}, weights=weights, checkpoints=checkpoints)
    compared(cell(), segments(), oracle={"weights": weights}, weights=torch.tensor(weights), checkpoints=checkpoints)


@pytest.mark.parametrize("checkpoints", ["all", "sqrt"])
def test_resets_of_rows_in_the_middle(checkpoints):
    none, some = torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, True])
    resets = [some, None, none, ~some, some, None, ~none]
    out = compared(cell(), segments(), begin(), oracle={"resets": resets}, resets=resets, checkpoints=checkpoints)
    assert out.state["seen"][0].tolist() == [3, 3, 3]
    assert out.state_grad["h"][some].abs().max() == 0
    assert out.state_grad["h"][~some].abs().min() > 0
    whole = torch.stack([none if x is None else x for x in resets])
    compared(cell(), segments(), begin(), oracle={"resets": resets}, resets=whole)


@pytest.mark.parametrize("every", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("checkpoints", ["all", 2])
def test_truncation(every, checkpoints):
    compared(cell(), segments(), begin(), oracle={"every": every}, truncate_every=every, checkpoints=checkpoints)


def test_all_generators_are_put_back_for_a_step_and_end_as_the_loop_ends():
    model = cell()

    def step(x, state):
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        _, state = model.walk(x * noise, state)
        return (state["h"] * random.random()).mean(), state

    def seeded():
        torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002

    for checkpoints in ("all", "sqrt"):
        seeded()
        plain(step, segments(), begin())
        expected, drawn = gradients(model), (random.random(), np.random.rand(), torch.rand(()))  # noqa: NPY002
        seeded()
        replay(step, segments(), begin(), checkpoints=checkpoints)
        assert (random.random(), np.random.rand(), torch.rand(())) == drawn  # noqa: NPY002
        agree(gradients(model), expected, 1e-12)


def test_a_data_set_that_draws_when_it_is_read():
    model, pieces = cell(dropout=0.0), segments(4)

    class Augmented:
        def __len__(self):
            return len(pieces)

        def __getitem__(self, index):
            return pieces[index] + torch.randn_like(pieces[index])

    torch.manual_seed(5)
    plain(model, Augmented(), begin())
    expected, drawn = gradients(model), torch.rand(())
    torch.manual_seed(5)
    replay(model, Augmented(), begin())
    assert torch.rand(()) == drawn
    agree(gradients(model), expected, 1e-12)


def test_segments_are_anything_and_gradients_add_up():
    model, pieces = cell(dropout=0.0), segments(4)
    before = torch.get_rng_state()
    replay(model, pieces, begin())
    expected = gradients(model)
    replay(lambda x, s: model(x["x"], s), [{"x": x} for x in pieces], begin())
    replay(model, iter(pieces), begin(), weights=(0.25 for _ in pieces), resets=(None for _ in pieces))
    agree(gradients(model), {name: 2 * g for name, g in expected.items()}, 1e-12)
    assert torch.equal(before, torch.get_rng_state())  # nothing was drawn


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"segments": []}, "at least one segment"),
        ({"checkpoints": 1}, "checkpoints"),
        ({"truncate_every": 0}, "truncate_every"),
        ({"slide": 8}, "slide from 1 to 7.*found 8"),
        ({"truncate_every": True}, "truncate_every of at least 1, found True"),
        ({"weights": torch.ones(7, requires_grad=True)}, "weights without gradient; multiply the loss"),
        ({"slide": 0}, "slide from 1 to 7.*found 0"),
        ({"checkpoints": "some"}, 'checkpoints "all", "sqrt" or an integer'),
        ({"segments": 5}, r"segments to go through, as in replay\(step, segments\), found 5"),
        ({"advance": 3}, "advance to be a function of"),
        ({"module": 3}, "module to be a torch.nn.Module, found 3"),
        ({"weights": [1.0] * 6}, "weights for 7 segments, found 6"),
        ({"resets": [None] * 8}, "resets for 7 segments, found 8"),
        ({"reset_to": torch.zeros(3)}, "resets with reset_to, found None"),
        ({"batch_axis": "first"}, "a number, a pytree of numbers or \"none\", found 'first'"),
        ({"batch_axis": "none", "resets": [None] * 6 + [torch.ones(3) > 0]}, "no resets with .* has no rows, found"),
        ({"resets": [None] * 7, "reset_to": torch.ones(2, requires_grad=True) * 2}, "reset_to without a graph"),
        (
            {"scaler": torch.amp.GradScaler("cpu"), "backward": torch.Tensor.backward},
            "a scaler or a backward, .* found 'both'",
        ),
        ({"generators": [3]}, "expected generators of torch .*, found int"),
        ({"generators": [random.SystemRandom()]}, "expected generators of torch .*, found SystemRandom"),
        ({"generators": torch.Generator()}, r"expected generators=\[...\], found one Generator; give it in a list"),
    ],
)
def test_impossible_arguments(options, said):
    with pytest.raises(InputError, match=said):
        replay(cell(), **{"segments": segments(), "state": begin(), **options})


def test_a_replay_without_gradient_is_refused():
    with torch.no_grad(), pytest.raises(InputError, match="gradient to be enabled"):
        replay(cell(), segments(), begin())


class Balanced(Cell):
    """A cell with an auxiliary loss on its critical path, so that `advance` adds one too, and one beside it."""

    def walk(self, x, state):
        outputs, new = super().walk(x, state)
        add_auxiliary_loss(0.3 * self.drop(new["h"]).square().mean())
        return outputs, new

    def forward(self, x, state):
        loss, new = super().forward(x, state)
        add_auxiliary_loss(self.read.weight.abs().sum())
        return loss, new


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"truncate_every": 3, "checkpoints": "sqrt"}])
@pytest.mark.parametrize("advance", [False, True])
def test_auxiliary_losses_count_once(options, advance):
    torch.manual_seed(0)
    model, weights = Balanced(dropout=0.0 if advance else 0.3).double(), [0.0, 0.5, -2.0, 1.0, 3.0, 1.0, 0.25]
    every = options.get("truncate_every", 10**9)

    def added(x, state):
        with collect_auxiliary_losses() as found:
            loss, new = model(x, state)
        return loss + sum(found), new

    torch.manual_seed(3)
    total, losses, end = plain(added, segments(), begin(), weights=weights, every=every)
    expected = gradients(model)
    torch.manual_seed(3)
    with collect_auxiliary_losses() as outer:
        out = replay(model, segments(), begin(), weights=weights, advance=model.advance if advance else None, **options)
    agree(gradients(model), expected, 1e-12)
    agree((out.loss, list(out.losses), out.state), (total, losses, end), 1e-12)
    assert len(outer) == 0


@pytest.mark.parametrize("options", [{}, {"checkpoints": 2}, {"truncate_every": 3}])
def test_auxiliary_outputs_are_kept_once(options):
    model, calls = cell(), []

    def step(x, state):
        outputs, new = model.walk(x, state)
        y = torch.stack(outputs, 1)
        calls.append(None)
        return y.square().mean(), new, {"last": y[:, -1:], "accuracy": (y > 0).double().mean(), "name": "a"}

    torch.manual_seed(3)
    expected, state = [], begin()
    for x in segments():
        _, state, aux = step(x, state)
        expected.append({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in aux.items()})
    torch.manual_seed(3)
    calls.clear()
    out = replay(step, segments(), begin(), **options)
    agree(out.aux, expected, 1e-12)
    assert len(calls) > len(out.aux) == 7
    for aux in out.aux:
        assert not aux["last"].requires_grad
        assert aux["last"].untyped_storage().nbytes() == aux["last"].numel() * 8, "no activation is kept alive"


def test_an_object_that_holds_an_output_with_its_graph_is_refused():
    """The graphs of all steps would stay in memory."""
    model = cell()

    def step(x, state):
        outputs, new = model.walk(x, state)
        return outputs[0].square().mean(), new, SimpleNamespace(logits=hold(outputs[0]))

    hold = torch.clone
    with pytest.raises(InputError, match="step 6: expected auxiliary outputs made of tensors, found a SimpleNamespace"):
        replay(step, segments(), begin())
    hold = torch.detach
    assert not replay(step, segments(), begin()).aux[0].logits.requires_grad


OWN = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: float(torch.rand((), generator=g))),
    "python": (lambda: random.Random(1), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda g: float(g.random())),
    "philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda g: float(g.normal())),
    "legacy": (lambda: np.random.RandomState(1), lambda g: float(g.randn())),  # keeps a second normal number
}


@pytest.mark.parametrize("name", list(OWN))
def test_generators_of_the_caller(name):
    make, draw = OWN[name]
    model, ways = cell(dropout=0.0), []
    for registered in (False, True):
        own = make()

        def step(x, state, own=own):
            return model(x * (1 + draw(own)), state)

        if registered:
            out = replay(step, segments(), begin(), module=model, generators=[own], checkpoints=3)
            total = out.loss
        else:
            total = plain(step, segments(), begin())[0]
        ways.append((total, gradients(model), draw(own)))
    agree(ways[1], ways[0], 1e-12)

    own = make()
    with pytest.raises(InputError, match="or give yours as generators="):
        replay(lambda x, s: model(x * (1 + draw(own)), s), segments(), begin(), module=model)
    own = make()
    with pytest.raises(InputError, match=r"expected \(loss, state\)"):
        replay(lambda x, s: draw(own), segments(), begin(), generators=[own])
    assert draw(own) == draw(make())  # after an error a registered one is where it was


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


def reset_by_hand(step, begun):
    """The loss and the last state of the plain loop; begun(state, rows): with these rows as at the beginning."""
    total, state = torch.zeros(()), None
    for x, rows in zip(pieces(), ROWS, strict=True):
        loss, state = step(x, state if rows is None else begun(state, rows.view(1, 3, 1)))
        total = total + loss / 6
    total.backward()
    return total, state


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("axis", ["number", "pytree"])
def test_resets_of_rows_of_an_lstm_with_as_many_layers_as_rows(kind, axis):
    model, step = layered(kind)
    total, state = reset_by_hand(step, lambda s, rows: pytree.tree_map(lambda x: x * ~rows, s))
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

    def in_a_tuple(x, state):
        loss, y = step(x, state[0])
        return loss, (y,)

    start = torch.zeros(3, 4, 5)
    assert replay(step, lengths, start, module=linear, batch_axis=1).state.shape == (2, 4, 5)
    assert replay(in_a_tuple, lengths, (start,), module=linear, batch_axis=(1,)).state[0].shape == (2, 4, 5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_state_without_a_batch_is_called_one(kind):
    """A series of one feature, [T, 1], could be one row for the two that a state [layers, D] seems to have."""
    torch.manual_seed(0)
    model = kind(1, 4, num_layers=2).double()
    series = torch.randn(3, 5, 1, dtype=torch.float64)
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    start = (zeros, zeros) if kind is nn.LSTM else zeros

    def step(x, state):
        y, state = model(x, state)
        return y.square().mean(), state

    total, state = 0.0, start
    for x in series:
        loss, state = step(x, state)
        total = total + loss / 3
    total.backward()
    expected = gradients(model)
    refuses(
        r'found one of shape \(5, 1\).*batch_axis of the state \("none" if it has no batch\)',
        replay,
        step,
        series,
        start,
    )
    out = replay(step, series, start, module=model, batch_axis="none", resets=[None] * 3)
    agree((out.loss, out.state, gradients(model)), (total, state, expected), 1e-12)


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("checkpoints", ["all", 2])
def test_resets_to_a_learned_start(computed, checkpoints):
    model, step = layered(nn.GRU, layers=2)
    start = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def begin():
        return start.tanh().expand(2, 1, 4) if computed else start

    total, _ = reset_by_hand(step, lambda state, rows: torch.where(rows, begin(), state))
    expected, start.grad = (gradients(model), start.grad), None
    options = {"reset_to": begin if computed else start, "checkpoints": checkpoints}
    out = replay(step, pieces(), module=model, resets=ROWS, batch_axis=1, **options)
    agree((out.loss, gradients(model), start.grad), (total, *expected), 1e-12)
