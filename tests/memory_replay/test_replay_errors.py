"""What replay refuses, always with the step's index, and that nothing is half-written then."""

import functools
import random

import pytest
import torch
from refusals import refuses
from replay_standins import agree, begin, cell, gradients, segments
from torch import nn

from mnemos import InputError, add_auxiliary_loss, replay

BAD = {
    "detached": (lambda loss, s: (loss, {**s, "h": s["h"].detach()}), r"step 2: .* found it detached"),
    "rows": (lambda loss, s: (loss, {"h": s["h"][:2], "seen": (s["seen"][0][:2], "rows")}), None),
    "several losses": (lambda loss, s: (loss.expand(2), s), r"step 2: .* scalar tensor"),
    "a number": (lambda loss, s: (float(loss), s), r"step 2: .* a scalar tensor of floats, found \d"),
    "no state": (lambda loss, s: loss, r"step 2: expected \(loss, state\) or .*, found Tensor"),
    "an object": (lambda loss, s: (loss, {**s, "h": {1, 2}}), r"step 2: .* found a set in it"),
    "a random state": (
        lambda loss, s: (loss, {**s, "h": s["h"] + _other()}),
        r"step [23]: .* the state of the first pass",
    ),
    "a random count": (
        lambda loss, s: (loss, {**s, "seen": (s["seen"][0] + _other().long() * 2, "rows")}),
        r"step \d: .* the state of the first pass",
    ),
    "a random loss": (lambda loss, s: (loss * _other(), s), r"step 2: .* the loss of the first pass"),
    "a random auxiliary loss": (
        lambda loss, s: (add_auxiliary_loss(_other()), (loss, s))[1],
        r"step 2: .* the loss of the first pass",
    ),
    "an interrupt": (lambda loss, s: _raise(KeyboardInterrupt()), None),
    "an error of ours": (lambda loss, s: _raise(InputError("too long")), "step 2: too long"),
    "an error": (lambda loss, s: _raise(RuntimeError("shapes")), "shapes\nin step 2 of the rollout"),
}
_own = random.Random(0)


def _other():
    return torch.tensor(_own.uniform(1.0, 100.0))  # of a generator that nobody else knows


def _raise(error):
    raise error


@pytest.mark.parametrize("name", list(BAD))
@pytest.mark.parametrize("checkpoints", ["all", 2])
def test_a_wrong_step_is_named_and_leaves_nothing_behind(name, checkpoints):
    change, said = BAD[name]
    model = nn.Sequential(cell())
    model.register_buffer("count", torch.zeros(()))

    def step(x, state):  # step 2 of the seven is wrong, in every pass
        model.count += 1
        loss, new = model[0](x, state)
        if int(state["seen"][0][0]) != 2 * 2:
            return loss, new
        model.last = loss.detach()
        return change(loss, new)

    before = torch.get_rng_state()
    with pytest.raises((InputError, RuntimeError, IndexError, KeyboardInterrupt), match=said):
        replay(step, segments(), begin(), module=model, checkpoints=checkpoints)
    assert model.count == 0
    assert not hasattr(model, "last")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_that_a_step_detaches_is_no_error_where_nothing_crosses():
    model = cell(dropout=0.0)

    def detaching(x, state):
        loss, new = model(x, state)
        return loss, new if int(new["seen"][0][0]) == 2 else {**new, "h": new["h"].detach()}

    replay(model, segments(), begin(), truncate_every=1)
    expected = gradients(model)
    replay(detaching, segments(), begin(), truncate_every=1)
    agree(gradients(model), expected, 1e-12)


def test_a_state_changed_in_place():
    model = cell()

    def step(x, state):
        loss, new = model(x, {**state, "h": state["h"].clone()})
        state["seen"][0].add_(1)
        return loss, new

    refuses(r"step 0: .* changed in place", replay, step, segments(), begin())

    def counting(x, state):
        loss, new = model(x, state)
        return loss, {**new, "seen": (state["seen"][0].add_(1), "rows")}

    refuses(r"step 0: .* changed in place", replay, counting, segments(), begin())


def test_an_error_of_a_backward_pass_names_the_step():
    model, encoder = cell(), nn.Linear(5, 5).double()
    shared = encoder(torch.stack(segments()[:6])).tanh()
    said = "a second time(.|\n)*backward pass of step 4 (.|\n)*make a segment's tensors inside the step"
    with pytest.raises(RuntimeError, match=said):
        replay(model, shared, begin(), module=model)


def test_an_advance_that_is_another_model():
    model = cell()
    wide = lambda x, s: model(x, {**s, "h": s["h"].double()})  # noqa: E731
    with pytest.raises(InputError, match=r"step 5: .*float64 of shape \(3, 5\) instead of torch\.float32"):
        replay(wide, segments(), begin(), advance=lambda x, s: {**s, "h": s["h"].float()})
    for pair, found in ((model, r"\(loss, state\)"), (lambda x, s: None, "None")):
        refuses(f"step 0: expected advance .* alone, found {found}", replay, model, segments(), begin(), advance=pair)
    with pytest.raises(InputError, match=r"step \d: .* same structure"):
        replay(model, segments(), advance=lambda x, s: {**model.advance(x, s), "more": 1})


def test_verification_is_as_strict_as_asked():
    model = cell(dropout=0.0)

    def rounded(x, state):
        state = model.advance(x, state)
        return {**state, "h": state["h"] * (1 + 1e-6)}

    refuses("step 5", replay, model, segments(), begin(), advance=rounded)
    replay(model, segments(), begin(), advance=rounded, tolerance=1e-5)
    replay(model, segments(), begin(), advance=rounded, verify=False)
    replay(model, segments(), begin(), advance=model.advance, tolerance=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_no_error(value):
    """A scaler skips such an update."""
    model = cell()
    pieces = segments()
    pieces[3] = pieces[3] * value
    out = replay(model, pieces, begin())
    assert not out.loss.isfinite()
    assert not gradients(model)["read.weight"].isfinite().all()


def test_an_infinity_that_only_one_pass_finds_is_an_error():
    model = cell(dropout=0.0)

    def overflow(x, state):
        state = model.advance(x, state)
        last = int(state["seen"][0][0]) == int(begin()["seen"][0][0]) + 12  # after step 5
        return {**state, "h": state["h"].index_fill(1, torch.tensor(0), torch.inf) if last else state["h"]}

    refuses(r"step 5: .*infinities or NaN at other positions", replay, model, segments(), begin(), advance=overflow)


def test_losses_without_gradient():
    model = cell()
    with pytest.raises(InputError, match="a loss that requires gradient"):
        replay(lambda x, s: (torch.ones(()), model.advance(x, s)), segments(), begin())
    out = replay(
        lambda x, s: (model(x, s)[0] if int(s["seen"][0][0]) == 6 else torch.ones((), dtype=x.dtype), model(x, s)[1]),
        segments(),
        begin(),
    )
    assert out.losses.tolist().count(1.0) == 6
    assert gradients(model)["keep.weight"].abs().max() > 0


def test_resets_of_the_wrong_rows():
    with pytest.raises(InputError, match="step 1: reset: expected a mask of 3 rows"):
        replay(cell(), segments(2), begin(), resets=[None, torch.ones(2, dtype=torch.bool)])
    with pytest.raises(InputError, match=r"step 1: reset: expected a mask \[B\] of booleans"):
        replay(cell(), segments(2), begin(), resets=[None, torch.ones(3)])
    resets, weight = [torch.ones(3) > 0, None], torch.ones(3, 4, requires_grad=True)
    for said, options in (
        (r"reset_to of a shape that broadcasts to \(3, 4\), found \(3,\)", {"reset_to": torch.ones(3)}),
        ("reset_to with the structure of the state, which has 1 leaves, .* with 2", {"reset_to": (0, 0)}),
        ("batch_axis with the structure of the state, which has 1 leaves, .* with 2", {"batch_axis": (0, 0)}),
        ("a mask of no rows, as axis 2 of", {"batch_axis": 2}),
    ):
        step = lambda x, s: ((s * weight).sum(), s * weight)  # noqa: E731
        refuses(f"step 0: reset: expected {said}", replay, step, [1, 2], torch.ones(3, 4), resets=resets, **options)


def test_a_segment_of_one_row_for_a_state_of_several_is_refused():
    layer = nn.Linear(8, 3)  # its state is not square: the error counts rows

    def step(segment, state):
        x = segment["x"] if isinstance(segment, dict) else segment
        state = 0.9 * (0 if state is None else state) + layer(x).mean(1)  # one row broadcasts
        return state.square().mean(), state

    segments = torch.randn(3, 4, 5, 8)
    state = replay(step, segments, module=layer).state
    few = [x[:1] for x in segments]
    for given in (few, torch.stack(few), [{"x": x} for x in few]):
        refuses("step 0: expected a segment of 4 rows", replay, step, given, state, module=layer)
    refuses("step 2: expected a segment of 4 rows", replay, step, [*segments[:2], few[2]], module=layer)
    with pytest.raises(InputError, match=r"step 2: expected a segment of 4 rows.*x\.expand\(4, -1, -1\)"):
        replay(step, [*segments[:2], few[2]], module=layer, batch_axis=0)


def test_a_segment_may_hold_a_tensor_that_all_rows_share():
    layer = nn.Linear(8, 4)

    def step(segment, state):
        scale, x = segment
        state = 0.9 * state + scale * layer(x).mean(1)
        return state.square().mean(), state

    x = torch.randn(3, 4, 5, 8)
    shared = [(torch.full(shape, 0.5), one) for shape, one in zip([(1,), (1, 4), (1, 1)], x, strict=True)]
    begin = torch.zeros(4, 4)
    expected = replay(step, [(0.5, one) for one in x], begin, module=layer)
    torch.testing.assert_close(replay(step, shared, begin, module=layer).state, expected.state)
    with pytest.raises(InputError, match="step 0: expected a segment of 4 rows"):
        replay(step, [(scale, one[:1]) for scale, one in shared], begin, module=layer)


@pytest.mark.parametrize("batch_first", [False, True])
def test_segments_of_one_token_and_a_state_of_layers_are_read(batch_first):
    recurrent = nn.GRU(8, 6, num_layers=2, batch_first=batch_first)

    def step(segment, state):
        y, state = recurrent(segment, state)
        return y.square().mean(), state

    shape = (3, 1, 8) if batch_first else (1, 3, 8)
    assert replay(step, torch.randn(4, *shape), torch.zeros(2, 3, 6)).state.shape == (2, 3, 6)


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.cell, self.own = cell(), random.Random(0)

    def forward(self, x, state):
        loss, state = self.cell(x, state)
        return loss, {**state, "h": state["h"] + self.own.random()}


@pytest.mark.parametrize(
    "call",
    [
        lambda model, **named: replay(model, segments(), begin(), **named),
        lambda model, **named: replay(functools.partial(model.forward), segments(), begin(), **named),
        lambda model, **named: replay(lambda x, s: model(x, s), segments(), begin(), module=model, **named),
    ],
    ids=["module", "method", "named module"],
)
def test_a_nondeterministic_step_is_found_in_every_call_unless_nobody_looks(call):
    model = Noisy()
    for _ in range(2):
        refuses(r"step \d: .* the state of the first pass", call, model)
    call(model, verify=False)
    call(model, truncate_every=1)  # there is no first pass to compare with


def test_what_the_model_keeps_itself_is_named_as_the_state_that_is_missing():
    weight, kept = torch.ones(5, requires_grad=True), []

    def step(x, state):
        kept.append(x * weight)
        return sum(kept).sum(), None

    refuses(
        "different .*; return what the model keeps as the state, which has no tensors here, draw",
        replay,
        step,
        segments()[:3],
    )
