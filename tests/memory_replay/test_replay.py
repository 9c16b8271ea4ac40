"""Replay against one graph over all steps: the gradients, the losses, the state, what it is called with."""

import random

import numpy as np
import pytest
import torch
from replay_standins import agree, begin, cell, gradients, plain, segments

from mnemos import InputError, replay

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


@pytest.mark.parametrize("checkpoints", ["all", 2])
def test_the_step_makes_a_learned_start_from_none(checkpoints):
    model = cell(learned=True)
    out = compared(model, segments(), checkpoints=checkpoints)
    assert out.state_grad is None
    assert model.start.grad is None  # zeroed by `gradients`, which found it equal


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


def test_gradient_to_a_given_state():
    leaf = begin()["h"].clone().requires_grad_()
    start = torch.randn(5, dtype=torch.float64, requires_grad=True)
    for make, source in ((lambda: leaf, leaf), (lambda: (2 * start).expand(3, -1), start)):
        model, state = cell(), begin()
        torch.manual_seed(3)
        plain(model, segments(), {**state, "h": make()})
        expected, source.grad = source.grad, None
        gradients(model)
        torch.manual_seed(3)
        out = replay(model, segments(), {**state, "h": make()})
        agree(source.grad, expected, 1e-12)
        assert out.state_grad["seen"] == (None, None)
        agree(out.state_grad["h"] if source is leaf else 2 * out.state_grad["h"].sum(0), expected, 1e-12)
        source.grad = None


def test_the_gradient_of_a_plain_state_is_reported():
    model, leaf = cell(), begin()["h"].clone().requires_grad_()
    torch.manual_seed(3)
    plain(model, segments(), {**begin(), "h": leaf})
    torch.manual_seed(3)
    agree(replay(model, segments(), begin()).state_grad["h"], leaf.grad, 1e-12)


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


def test_advance_is_not_called_for_the_last_step_nor_the_step_before_it():
    model, calls = cell(), []

    def advance(x, state):
        calls.append("advance")
        return model.advance(x, state)

    def step(x, state):
        calls.append("step")
        return model(x, state)

    replay(step, segments(4), begin(), advance=advance)
    assert calls == ["advance"] * 3 + ["step"] * 4
    calls.clear()
    replay(step, segments(4), begin())
    assert calls == ["step"] * 7


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


def test_truncation_cuts():
    """What a wrapper that forgets to detach would pass unnoticed: the early steps hear nothing of the late loss."""
    model, last = cell(dropout=0.0), [0.0] * 6 + [1.0]
    replay(model, segments(), begin(), weights=last, truncate_every=1)
    cut = gradients(model)["keep.weight"]
    replay(model, segments(), begin(), weights=last)
    assert (gradients(model)["keep.weight"] - cut).norm() > 0.1 * cut.norm()


def test_a_truncated_step_is_run_once():
    model, calls = cell(), []

    def step(x, state):
        calls.append(state)
        return model(x, state)

    replay(step, segments(6), begin(), truncate_every=1)
    assert len(calls) == 6
    calls.clear()
    replay(step, segments(6), begin(), truncate_every=3)
    assert len(calls) == 6 + 2 * 2


def test_gradients_add_up():
    model = cell(dropout=0.0)
    replay(model, segments(3), begin())
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    replay(model, segments(3), begin())
    for name, p in model.named_parameters():
        agree(p.grad, 2 * once[name], 1e-12)


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
        agree({k: v for k, v in gradients(model).items() if v is not None}, _given(expected), 1e-12)


def test_a_step_that_draws_nothing_leaves_generators_alone():
    model = cell(dropout=0.0)
    before = torch.get_rng_state()
    replay(model, segments(), begin())
    assert torch.equal(before, torch.get_rng_state())


def test_segments_are_anything_and_read_one_at_a_time():
    model, pieces = cell(dropout=0.0), segments(4)
    replay(model, pieces, begin())
    expected = gradients(model)
    replay(model, iter(pieces), begin())
    agree(gradients(model), expected, 1e-12)
    replay(model, iter(pieces), begin(), weights=(0.25 for _ in pieces), resets=(None for _ in pieces))
    agree(gradients(model), expected, 1e-12)
    replay(lambda x, s: model(x["x"], s), [{"x": x} for x in pieces], begin())
    agree(gradients(model), expected, 1e-12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoints": 1}, "checkpoints"),
        ({"checkpoints": "some"}, "checkpoints"),
        ({"truncate_every": 0}, "truncate_every"),
        ({"slide": 0}, "slide from 1 to 7.*found 0"),
        ({"slide": 8}, "slide from 1 to 7.*found 8"),
        ({"weights": [1.0]}, "weights for 7 segments, found 1"),
        ({"truncate_every": True}, "truncate_every of at least 1, found True"),
        ({"resets": [None]}, "resets for 7 segments, found 1"),
        ({"weights": torch.ones(7, requires_grad=True)}, "weights without gradient; multiply the loss"),
        ({"scaler": 1, "backward": print}, "scaler or a backward"),
    ],
)
def test_impossible_arguments(options, said):
    with pytest.raises(InputError, match=said):
        replay(cell(), segments(), begin(), **options)


def test_nothing_to_do():
    with pytest.raises(InputError, match="at least one segment"):
        replay(cell(), [], begin())
    with torch.no_grad(), pytest.raises(InputError, match="gradient to be enabled"):
        replay(cell(), segments(), begin())
