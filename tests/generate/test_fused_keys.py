"""The fused step of softmax attention and of an encoder-decoder, against the model itself in float64."""

import functools
import itertools

import pytest
import torch
from fused_cases import close, equal, exactly, ids, make, stirred, stream, translator
from native_kernels import needs_kernels

import mnemos
from mnemos import Transformer
from mnemos.attention.linear import LinearConfig
from mnemos.attention.recurrent import DeltaConfig, GLAConfig, KimiDeltaConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.generate import fused
from mnemos.memory.key_values import BranchedKeyValues
from mnemos.types import leaves, map_state, select

pytestmark = needs_kernels

DECODERS = {
    "pre": {},
    "post": {"norm": "post", "position": "learned", "activation": "relu"},
    "rotary": {"position": "rotary", "activation": "silu", "dim": 36, "num_heads": 2},
    "window": {"attention": SoftmaxConfig(window=3), "position": "rotary"},
    "odd": {"dim": 21, "num_heads": 3, "mlp": 37, "position": "none"},
    "wide": {"dim": 320, "num_heads": 2, "mlp": 70},
}
TRANSLATORS = {
    "pre": {},
    "post": {"norm": "post", "activation": "silu", "position": "learned", "head_bias": True, "scale_embedding": False},
    "odd": {"dim": 21, "num_heads": 3, "mlp": 37, "share": "none", "source_vocab_size": 30},
    "window": {"decoder": SoftmaxConfig(window=2), "encoder": LinearConfig()},
    "linear": {"decoder": LinearConfig()},
    "narrow": {"dim": 48, "decoder": GLAConfig(key_width=1, value_width=1)},  # than the attention to the source
    "narrow heads": {"dim": 48, "decoder": DeltaConfig(key_width=9, value_width=2)},
}


def decoder(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "dim": 24, "layers": 3, "num_heads": 2, "mlp": 40, "max_length": 40}
    return stirred(Transformer(**(sizes | {"attention": SoftmaxConfig()} | fields)))


@pytest.mark.each_value
@pytest.mark.parametrize("rows", [1, 3, 17])
@pytest.mark.parametrize("name", DECODERS)
def test_a_transformer_with_softmax_attention_equals_the_model(name, rows, variant, poisoned, monkeypatch):
    model = decoder(**DECODERS[name])
    step = mnemos.fused_step(model)
    assert step.why == ""
    with torch.no_grad():
        _, state = model(ids(rows, 4), mask=torch.arange(4) >= torch.arange(rows)[:, None] % 3)  # padded on the left
    with monkeypatch.context() as alone:  # the kernel answers all of it; a window with padding is the model's
        if name != "window" or rows == 1:
            alone.setattr(Transformer, "forward", None)
        y, end = stream(step, ids(rows, 9), state)
    wanted, exact = stream(exactly(model), ids(rows, 9), exactly(state))
    close((y, end), (wanted, exact), 4e-6)


@pytest.mark.each_value
@pytest.mark.parametrize("name", TRANSLATORS)
def test_a_decoder_over_reordered_rows(name, variant, poisoned, monkeypatch):
    model = translator(**TRANSLATORS[name])
    step = mnemos.fused_step(model)
    assert step.why == ""
    mask = torch.arange(6) < torch.tensor([6, 4, 0])[:, None]
    with torch.no_grad():
        _, start = model(ids(3, 3), model.encode(ids(3, 6), mask))
        found, expected, exact = model.branch(start, 3), exactly(model.branch(start, 3)), exactly(model)
        for i in range(20):  # past the merging of entries
            with monkeypatch.context() as alone:
                alone.setattr(mnemos.EncoderDecoder, "forward", None)
                y, found = step(ids(9, 20 + i)[:, :1], found)
            wanted, expected = exact(ids(9, 20 + i)[:, :1], expected)
            close(y, wanted, 4e-6)
            rows = torch.tensor([0, 0, 2, 5, 4, 4, 6, 6, 6] if i % 3 else [2, 1, 0, 3, 4, 5, 8, 7, 7])
            if i == 15:  # a sentence leaves
                keep = torch.arange(6)
                found, expected = select(found, keep), select(expected, keep)
                break
            found, expected = select(found, rows), select(expected, rows)
    close(found.layers, expected.layers, 4e-6)


@torch.no_grad()
def states():
    for fields in ({}, {"attention": KimiDeltaConfig()}):
        yield make(**fields, layers=2), None
    model = decoder(layers=2)
    yield model, model(ids(3, 4))[1]
    yield model, model.branch(model(ids(3, 4))[1], 2)
    other = translator()
    _, state = other(ids(2, 2), other.encode(ids(2, 5)))
    yield other, other.branch(state, 3)


def test_the_given_state_is_never_changed_and_forks(variant):
    for model, state in states():
        step, x = mnemos.fused_step(model), ids(3 if state is None else len(state.seen), 5)
        _, state = stream(step, x, state)
        before = map_state(torch.clone, state)
        one, two = stream(step, x, state), stream(step, x, state)
        other = stream(step, x.roll(1, 1), state)
        assert equal(state, before)
        assert equal(one, two)
        assert not torch.equal(one[0], other[0])


@functools.cache
@torch.no_grad()
def begun():
    """The models, their steps, the next tokens and the states before them."""
    found = []
    for model, state in states():
        x = ids(3 if state is None else len(state.seen), 1)
        found.append((model, mnemos.fused_step(model), x, model(x, state)[1]))
    return found


def said(step, x, state):
    """The outputs and the state after them, or the kind of error."""
    try:
        return leaves(step(x, state))
    except Exception as error:
        return type(error)


CHANGES = {
    "double": torch.Tensor.double,
    "int32": torch.Tensor.int,
    "turned": lambda x: x.mT.contiguous().mT if x.dim() > 1 else torch.stack([x, x], 1)[:, 0],
    "negative": lambda x: torch._neg_view(-x) if x.is_floating_point() else x,
    "a row less": lambda x: x[1:],
    "a row more": lambda x: torch.cat([x[:1], x]),
    "narrow": lambda x: x[..., 1:] if x.dim() > 1 else x,
    "more": lambda x: x + 1 if x.dtype == torch.int64 else x,
    "marked": lambda x: x.logical_not() if x.dtype == torch.bool else x,
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_a_state_holds_the_answer_is_the_models(change):
    """Each tensor of a state in turn: other numbers, elsewhere in memory, of other sizes."""
    for model, step, x, state in begun():
        for number, part in enumerate(leaves(state)):
            if (new := change(part)) is part:
                continue
            count = itertools.count()
            other = map_state(lambda old, n=number, c=count, new=new: new if next(c) == n else old, state)
            found, expected = said(step, x, other), said(model, x, other)
            if isinstance(expected, list):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            else:
                assert found is expected


def test_layers_that_have_read_different_tokens_are_the_models():
    model = decoder(layers=2)
    step = mnemos.fused_step(model)
    with torch.no_grad():
        (_, short), (_, long) = model(ids(2, 3)), model(ids(2, 30))
        _, padded = model(ids(2, 3), mask=torch.tensor([[False, True, True]] * 2))
    for other in (long, padded):
        mixed = short._replace(layers=(other.layers[0], short.layers[1]))
        y, _ = step(ids(2, 1), mixed)
        torch.testing.assert_close(y, model(ids(2, 1), mixed)[0])
    narrow = decoder(layers=2, attention=SoftmaxConfig(window=3))  # and a state of a model without its window
    with torch.no_grad():
        _, between = model(ids(2, 3), mask=torch.tensor([[True, False, True]] * 2))
        for other in (long, padded, between):
            torch.testing.assert_close(mnemos.fused_step(narrow)(ids(2, 1), other)[0], narrow(ids(2, 1), other)[0])
    turned = decoder(layers=2, attention=LinearConfig(), position="rotary")
    with torch.no_grad():
        (_, short), (_, long) = turned(ids(2, 3)), turned(ids(2, 30))
        mixed = short._replace(layers=(short.layers[0], long.layers[1]))
        torch.testing.assert_close(mnemos.fused_step(turned)(ids(2, 1), mixed)[0], turned(ids(2, 1), mixed)[0])


def test_a_search_runs_on_the_kernel(monkeypatch):
    model, calls = translator(), []
    run = fused.FusedStep._step
    monkeypatch.setattr(fused.FusedStep, "_step", lambda *given: calls.append(run(*given)) or calls[-1])
    source, start = ids(2, 5), torch.ones(2, 1, dtype=torch.int64)
    config = mnemos.BeamConfig(eos=2, beams=3, max_length=30)
    found = mnemos.beam_search(model, model.encode(source), start, config)
    assert calls
    assert all(call is not None for call in calls)
    assert type(calls[0][1].layers[0]) is BranchedKeyValues
    expected = mnemos.beam_search(model, model.encode(source), start, config, step=model)
    for (one,), (other,) in zip(found, expected, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert one.score == pytest.approx(other.score, abs=1e-5)
