"""What every registered model promises; the cases of a test are chosen by what the models declare."""

import itertools
import typing
from contextlib import nullcontext

import contract_cases
import pytest
import torch
from contract_cases import (
    BANDS,
    PADDED,
    ROWS,
    TOKENS,
    VOCABULARY,
    ModelCase,
    close,
    holds_where,
    numbers,
    over_models,
    same_state,
)
from torch.func import functional_call, grad, vmap

import mnemos
from mnemos import registry
from mnemos.memory import gated_cache
from mnemos.models import Pair
from mnemos.modes import evaluating
from mnemos.types import Advances, InputError, RecurrentModel, Splits, StateKind, map_state, reset

pytest_generate_tests = contract_cases.generate


@pytest.fixture
def model(request):
    return request.param.build()


def inputs(model, seed=2, t=TOKENS):
    """What the model declares as its inputs."""
    c, generator = model.config, torch.Generator().manual_seed(seed)
    if c.inputs == "images":
        return torch.randn(ROWS, c.channels, c.image, c.image, dtype=torch.float64, generator=generator)
    if c.inputs == "frames":
        return torch.randn(ROWS, t, BANDS, dtype=torch.float64, generator=generator)
    tokens = torch.randint(VOCABULARY, (ROWS, t), generator=generator)
    return Pair(tokens.flip(1), tokens) if c.inputs == "pairs" else tokens


def begun(model, x):
    """Tokens, and the state before them: that of their sources, where the model reads some."""
    return (x.target, model.encode(x.source)) if isinstance(x, Pair) else (x, None)


def at(x, rows):
    return map_state(lambda part: part[rows], x)


def at_times(x, times):
    return map_state(lambda part: part[:, times], x)


def predicts(case):
    return case.predicts


def advances(case):
    return case.inputs == "tokens" and isinstance(case.build(), Advances)


@over_models()
def test_declarations_are_complete_and_true(model, request):
    case = request.node.callspec.params["model"]
    assert isinstance(model, RecurrentModel)
    assert model.splits in typing.get_args(Splits)
    assert model.state_kind in typing.get_args(StateKind)
    assert {type(model.rows_independent), type(model.state_gradient), type(model.autoregressive)} == {bool}
    assert model.autoregressive == case.predicts
    assert (model.initial_state(ROWS) is None) == (model.state_kind == "none") == (model.splits == "never")
    with torch.no_grad(), evaluating(model):
        y, state = model(inputs(model))
        assert y.shape[: 2 if y.dim() == 3 else 1] == ((ROWS, TOKENS) if y.dim() == 3 else (ROWS,))
        assert y.shape[-1] == (VOCABULARY if model.autoregressive else 5)
        assert (state is None) == (model.state_kind == "none")
        with pytest.raises(InputError, match=r"expected (no|a|the) state"):  # of another model
            model(inputs(model), torch.zeros(ROWS, 1))
        if case.inputs in ("tokens", "pairs"):
            x, state = begun(model, inputs(model, t=240))
            long = model(x, state)[1]
            longer = model(x, long)[1]
            first, then = numbers(long), numbers(longer)
            kinds = {"none": then == first == 0, "constant": then == first > 0, "growing": then > first}
            assert kinds[model.state_kind]


def is_ours(case):
    return type(case.build()).__module__.startswith("mnemos.models.")


@over_models(is_ours)  # a host's own code computes what a new state holds
def test_new_states_are_where_the_weights_are(model):
    holds_where(model)


@over_models(predicts)
def test_split_and_resume(model):
    assert model.splits == "anywhere"
    model.eval()
    whole, end = model(inputs(model))
    x, start = begun(model, inputs(model))
    for cuts in ([4], range(1, TOKENS)):
        state, parts = start, []
        for a, b in itertools.pairwise([0, *cuts, TOKENS]):
            y, state = model(x[:, a:b], state)
            parts.append(y)
        close(torch.cat(parts, 1), whole)
        same_state(state, end)
    fresh = reset(end, torch.tensor([True, False, True]))
    new = whole if start is None else model(x, model.initial_state(ROWS))[0]
    close(model(x, fresh)[0][[0, 2]], new[[0, 2]])


@over_models(lambda case: case.inputs in ("tokens", "pairs"))
def test_tokens_of_32_bits_are_tokens(model):
    """The outputs and the state are those of 64 bits, also inside a segment."""
    model.eval()
    x = inputs(model)
    found = []
    with torch.no_grad():
        for dtype in (torch.int64, torch.int32):
            tokens = map_state(lambda part, dtype=dtype: part.to(dtype), x)
            _, state = model(at_times(tokens, slice(8)))
            rest = at_times(tokens, slice(8, 10))
            found.append(model(rest.target if isinstance(rest, Pair) else rest, state))
    close(found[1][0], found[0][0])
    same_state(found[1][1], found[0][1])


@over_models(advances)
@pytest.mark.parametrize("t", [8, 11])  # segments that are whole, and not
def test_advance_gives_the_state_of_forward_and_its_gradient(model, t):
    model = ModelCase.build(_case(model), dropout=0.2).train()
    mask = torch.ones(ROWS, t, dtype=torch.bool)
    mask[1, -3:] = False
    found = []
    for step in (model.advance, lambda *given, **named: model(*given, **named)[1]):
        state = None
        for seed, x, valid in ((5, inputs(model, t=4), None), (6, inputs(model, 3, t), mask)):
            torch.manual_seed(seed)  # dropout: `advance` draws the first of the numbers that `forward` draws
            state = step(x, state, mask=valid)
        model.zero_grad(set_to_none=False)
        torch.manual_seed(7)
        model(inputs(model, 4), state)[0].square().sum().backward()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        found.append((state, gradients))
    (left, gradients), (right, expected) = found
    same_state(left, right)
    assert sum(bool(g.abs().max() > 1e-9) for g in expected) > len(expected) // 2
    for a, b in zip(gradients, expected, strict=True):
        close(a, b)


def _case(model):
    return ModelCase(model.config.name, None, True)


@over_models()
def test_rows_are_independent(model):
    """In evaluation always; in training as declared."""
    model.eval()
    x = inputs(model)
    whole = model(x)[0]
    close(whole[1:2], model(at(x, slice(1, 2)))[0])
    other = map_state(lambda a, b: torch.cat([a[:1], b[1:]]), inputs(model, 3), x)
    close(model(other)[0][1:], whole[1:])
    model.train()
    with gated_cache.hold_caches(model):
        same = torch.allclose(model(other)[0][1:], model(x)[0][1:], rtol=1e-9, atol=1e-9)
    assert same == model.rows_independent


@over_models(lambda case: case.inputs == "frames")
def test_a_mask_hides_padding_behind_frames(model):
    """A row gives the same outputs alone and next to a longer row, whatever its padding holds."""
    model.eval()
    x, mask = inputs(model), torch.arange(TOKENS) < torch.tensor([[TOKENS], [7], [TOKENS]])
    alone = model(x[1:2, :7])[0][0]
    for padded in (x, torch.where(mask[..., None], x, 100.0)):
        close(model(padded, None, mask=mask)[0][1, : len(alone)], alone)


@over_models(predicts)
def test_the_future_cannot_change_the_past(model):
    model.train()
    with gated_cache.hold_caches(model):
        x, state = begun(model, inputs(model))
        before = model(x, state)[0]
        for j in range(TOKENS):
            other = x.clone()
            other[:, j] = (other[:, j] + 1) % VOCABULARY
            close(before[:, :j], model(other, state)[0][:, :j])


@over_models()
def test_gradients_and_save(model, tmp_path):
    model.train()
    model(inputs(model))[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if "bias" not in name:
            assert parameter.grad.abs().max() > 1e-12, name
    mnemos.save(model, tmp_path)
    loaded = mnemos.load(tmp_path).double()
    assert loaded.config == model.config
    for (name, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=1e-6, msg=name)


@over_models(lambda case: case.cache is None or case.name == "transformer")
def test_built_on_meta_and_materialised_it_is_the_same(model, request):
    case, x = request.node.callspec.params["model"], inputs(model)
    with torch.no_grad():
        for other in contract_cases.materialised(case.build, model.eval()):
            for _ in range(2):  # the second call meets what the first one wrote
                torch.manual_seed(3)
                y, state = model(x)
                torch.manual_seed(3)
                found, after = other(x)
                assert torch.equal(found, y)
                if state is not None:
                    same_state(after, state)


@over_models(lambda case: case.inputs != "images")
def test_what_padding_holds_and_where_it_stands_changes_nothing(model, request):
    """In outputs, in states that go on, and in gradients: positions and segments count valid tokens."""
    case = request.node.callspec.params["model"]
    generator = torch.Generator().manual_seed(2)
    x, source = torch.randint(2, VOCABULARY, (4, 40), generator=generator).split([32, 8], 1)
    if case.inputs == "frames":
        x = torch.randn(4, 32, BANDS, generator=generator, dtype=torch.float64)
    known = PADDED.clone()
    known[2] = True  # no source is empty
    field = typing.get_type_hints(registry.load("model", case.name)).get("position")
    for position in (typing.get_args(field) if case.cache is None else ()) or (None,):
        model = case.build(max_length=60, **({} if position is None else {"position": position})).eval()

        def call(x, state, mask, rows, model=model):
            if case.inputs == "pairs" and state is None:
                valid = known[rows]
                alone = len(valid) == 1  # without padding
                state = model.encode(source[rows][:, valid[0]] if alone else source, None if alone else valid)
            return model(x, state, mask=mask)

        # Frames are stacked where they stand: padding before a valid one is refused.
        with pytest.raises(InputError, match="valid frames") if case.inputs == "frames" else nullcontext():
            contract_cases.padding_changes_nothing(model, x, call)


# PyTorch's LSTM cannot be batched so in float64, nor can encoders of other libraries that pick rows by their values.
@over_models(lambda case: advances(case) or contract_cases.has(registry.load("model", case.name), "attention"))
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_row_by_vmap_are_its_own(model):
    model.eval()
    x, parameters = inputs(model), {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, row):
        found = functional_call(model, (parameters, dict(model.named_buffers())), (row[None],))
        return found[0].square().mean()

    each = vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, x)
    for row in range(ROWS):
        for name, alone in grad(loss)(parameters, x[row]).items():
            close(each[name][row], alone)
