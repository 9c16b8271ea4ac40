"""What replay refuses, always with the step's index, and that nothing is half-written then."""

import random

import pytest
import torch
from replay_standins import agree, begin, cell, gradients, segments
from torch import nn

from mnemos import InputError, Transformer, replay


def wrapped(model, at, change):
    """The model's step, whose (loss, state) `change` alters at step `at` of the seven, in every pass."""

    def step(x, state):
        loss, new = model(x, state)
        seen = int(state["seen"][0][0]) // 2
        return change(loss, new) if seen == at else (loss, new)

    return step


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

    def step(x, state):
        model.count += 1
        return wrapped(model[0], 2, change)(x, state)

    before = torch.get_rng_state()
    with pytest.raises((InputError, RuntimeError, IndexError), match=said):
        replay(step, segments(), begin(), module=model, checkpoints=checkpoints)
    assert model.count == 0
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

    with pytest.raises(InputError, match=r"step 0: .* changed in place"):
        replay(step, segments(), begin())

    def counting(x, state):
        loss, new = model(x, state)
        return loss, {**new, "seen": (state["seen"][0].add_(1), "rows")}

    with pytest.raises(InputError, match=r"step 0: .* changed in place"):
        replay(counting, segments(), begin())


@pytest.mark.parametrize(("options", "at"), [({}, 6), ({"advance": True}, 6), ({"truncate_every": 1}, 0)])
def test_a_state_changed_in_place_where_only_the_replay_sees_it(options, at):
    model = cell()

    def step(x, state):
        loss, new = model(x, state)
        if at == 0 or x.shape[1] == 3:  # the last, which no first pass runs
            state["seen"][0].add_(1)
        return loss, new

    with pytest.raises(InputError, match=rf"step {at}: .* changed in place"):
        replay(step, segments(), begin(), **({"advance": model.advance} if "advance" in options else options))
    if at:
        with pytest.raises(InputError, match=r"step 0: .* changed in place"):
            replay(step, segments(1), begin())


@pytest.mark.parametrize("resets", [None, [torch.tensor([True, False, True])] * 7])
def test_a_detached_state_beside_a_part_that_is_handed_on(resets):
    model, beside = cell(), torch.ones(3, 2, dtype=torch.float64)

    def step(x, state):
        loss, new = model(x, state[0])
        return loss, ({**new, "h": new["h"].detach()}, state[1], torch.ones(3, 0))

    with pytest.raises(InputError, match=r"step 6: .* found it detached"):
        replay(step, segments(), (begin(), beside, torch.ones(3, 0)), resets=resets)

    def attached(x, state):  # a part may be without gradient: the last that a segment held
        loss, new = model(x + state[2], state[0])
        return loss, (new, state[1], x[:, -1:])

    replay(attached, segments(), (begin(), beside, torch.ones(3, 1, 5, dtype=torch.float64)), resets=resets)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_an_infinity_in_the_state_hides_nothing(value):
    model = cell(dropout=0.0)

    def advance(x, state):
        return {**model.advance(x, {**state, "h": state["h"].nan_to_num(0.0, 0.0, 0.0)})}

    def spoilt(factor, column):
        def advanced(x, state):
            h = advance(x, state)["h"] * factor
            return {**advance(x, state), "h": torch.cat([h[:, :column], torch.full_like(h[:, :1], value), h[:, 3:]], 1)}

        return advanced

    def step(x, state):
        new = spoilt(1.0, 2)(x, state)
        return new["h"][:, 3:].square().mean(), new

    replay(step, segments(), begin(), advance=spoilt(1.0, 2), tolerance=1e-10)
    with pytest.raises(InputError, match=r"step 5: .* the state of the first pass"):
        replay(step, segments(), begin(), advance=spoilt(1.01, 2))

    def elsewhere(x, state):
        h = spoilt(1.0, 2)(x, state)["h"]
        return {**advance(x, state), "h": h[:, [0, 2, 1, 3, 4]]}

    with pytest.raises(InputError, match=r"step 5: .* the state of the first pass"):
        replay(step, segments(), begin(), advance=elsewhere)


def test_an_error_of_a_backward_pass_names_the_step():
    model, encoder = cell(), nn.Linear(5, 5).double()
    shared = encoder(torch.stack(segments()[:6])).tanh()
    said = "a second time(.|\n)*backward pass of step 4 (.|\n)*make a segment's tensors inside the step"
    with pytest.raises(RuntimeError, match=said):
        replay(model, shared, begin(), module=model)


def test_an_advance_that_is_another_model():
    model = cell()
    for wrong, said in (
        (lambda x, s: {**model.advance(x, s), "h": model.advance(x, s)["h"] * 1.01}, r"step 5: .* the state of the"),
        (lambda x, s: {**s, "h": s["h"].float()}, r"step 5: .*float64 of shape \(3, 5\) instead of torch\.float32"),
    ):
        with pytest.raises(InputError, match=said):
            replay(lambda x, s: model(x, {**s, "h": s["h"].double()}), segments(), begin(), advance=wrong)
    with pytest.raises(InputError, match=r"step \d: .* same structure"):
        replay(model, segments(), advance=lambda x, s: {**model.advance(x, s), "more": 1})


@pytest.mark.parametrize(
    ("arguments", "named", "said"),
    [
        ((None, segments()), {}, "step to be a function of"),
        ((segments(), cell()), {}, "step to be a function of"),
        ((cell(), None), {}, "segments to go through, as in replay.step, segments., found None"),
        ((cell(), cell().forward), {}, "segments to go through"),
        ((cell(), segments()), {"advance": 3}, "advance to be a function"),
        ((cell(), segments()), {"module": cell().forward}, r"module to be a torch.nn.Module, found <bound method"),
    ],
)
def test_arguments_of_the_wrong_kind(arguments, named, said):
    with pytest.raises(InputError, match=said):
        replay(*arguments, **named)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x, state: cell()(x, state), r"advance to return the new state alone, found \(loss, state\)"),
        (lambda x, state: None, "advance to return the new state alone, found None"),
    ],
)
@pytest.mark.parametrize("state", [None, begin()])
def test_an_advance_that_returns_something_else(returned, said, state):
    with pytest.raises(InputError, match=f"step 0: expected {said}"):
        replay(cell(), segments(), state, advance=returned)


def test_verification_is_as_strict_as_asked():
    model = cell(dropout=0.0)

    def rounded(x, state):
        state = model.advance(x, state)
        return {**state, "h": state["h"] * (1 + 1e-6)}

    with pytest.raises(InputError, match="step 5"):
        replay(model, segments(), begin(), advance=rounded)
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


def test_a_segment_longer_than_the_model_allows():
    model = Transformer(vocab_size=7, max_length=6, position="learned", dim=8, layers=1, num_heads=2, mlp=8)

    def step(x, state):
        logits, state = model(x, state)
        return logits.square().mean(), state

    with pytest.raises(InputError, match=r"^step 1: "):
        replay(step, [torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)])


def test_an_interrupt_puts_back_too():
    model, calls = cell(), []

    def step(x, state):
        calls.append(state)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return model(x, state)

    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        replay(step, segments(), begin(), module=model)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_segment_of_one_row_for_a_state_of_several_is_refused():
    layer = nn.Linear(8, 4)

    def step(segment, state):
        x = segment["x"] if isinstance(segment, dict) else segment
        state = 0.9 * (0 if state is None else state) + layer(x).mean(1)  # one row broadcasts
        return state.square().mean(), state

    segments = torch.randn(3, 4, 5, 8)
    state = replay(step, segments, module=layer).state
    few = [x[:1] for x in segments]
    for given in (few, torch.stack(few), [{"x": x} for x in few]):
        with pytest.raises(InputError, match="step 0: expected a segment of 4 rows"):
            replay(step, given, state, module=layer)
    with pytest.raises(InputError, match="step 2: expected a segment of 4 rows"):
        replay(step, [*segments[:2], few[2]], module=layer)
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
