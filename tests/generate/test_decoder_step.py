"""Steps without our kernels against the model's own forward: that of a search, packed matrices, the model itself."""

import copy

import pytest
import torch
from fused_cases import ids, make, stream, translator
from refusals import refuses
from torch import nn

import mnemos
from mnemos.attention.linear import LinearConfig
from mnemos.attention.softmax import SoftmaxConfig
from mnemos.generate import beam as steps
from mnemos.generate import fused as decoding
from mnemos.generate.beam import DecoderStep
from mnemos.types import leaves


@pytest.fixture(autouse=True)
def pack_everything(monkeypatch):
    """The step for many rows, with packed matrices."""
    monkeypatch.setattr(steps, "LEAST", 1)
    monkeypatch.setattr(steps, "FEW", 0)
    monkeypatch.setattr(steps, "ROWS", 0)


def tokens(rows, length):
    return ids(rows, length, 30)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm": "post", "activation": "silu", "position": "learned", "head_bias": True, "scale_embedding": False},
        {"decoder": SoftmaxConfig(window=2)},
        {"decoder": LinearConfig()},
    ],
    ids=["pre", "post", "window", "linear"],
)
def test_equals_the_model_over_reordered_rows(fields):
    model = translator(**fields)
    step = DecoderStep(model)
    mask = torch.arange(6) < torch.tensor([6, 4])[:, None]
    with torch.no_grad():
        _, start = model(tokens(2, 3), model.encode(tokens(2, 6), mask))
        expected = found = model.branch(start, 3)
        for i in range(12):
            x = tokens(6, 20 + i)[:, :1]
            (y, expected), (z, found) = model(x, expected), step(x, found)
            torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-5)
            rows = torch.tensor([0, 0, 2, 5, 4, 4])
            expected, found = mnemos.select(expected, rows), mnemos.select(found, rows)
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_search_has_the_weights_that_a_fused_optimiser_has_written():
    """PyTorch does not count the writes of its fused optimisers, so no copy may outlive a search."""
    model = translator()
    source, start = tokens(2, 5), torch.ones(2, 1, dtype=torch.int64)
    config = mnemos.BeamConfig(eos=2, beams=3, max_length=9)
    before = mnemos.beam_search(model, model.encode(source), start, config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    logits, _ = model.train()(mnemos.Pair(source, tokens(2, 4)))
    logits.square().mean().backward()
    optimiser.step()
    after = mnemos.beam_search(model.eval(), model.encode(source), start, config)
    again = mnemos.beam_search(copy.deepcopy(model), model.encode(source), start, config)
    assert [one.log_prob for (one,) in after] == [one.log_prob for (one,) in again]
    assert [one.log_prob for (one,) in after] != [one.log_prob for (one,) in before]


def test_hooks_gradients_and_other_kinds_of_numbers_use_the_modules_themselves():
    model, seen = translator(), []
    hook = model.head.register_forward_hook(lambda *_: seen.append(1))
    state = model.encode(tokens(2, 5))
    with torch.no_grad():
        steps.pack(model)(tokens(2, 1), state)
        assert seen == [1]
    hook.remove()
    y, _ = steps.pack(model)(tokens(2, 1), state)
    y.sum().backward()
    assert model.head.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert steps.pack(model)(tokens(2, 1), model.encode(tokens(2, 5)))[0].dtype == torch.bfloat16
    double = copy.deepcopy(model).double()
    assert all(type(part) is not steps.PackedLinear for part in steps.pack(double).modules())


class Repeated(nn.Module):
    """One layer three times, a name without a module, and a layer whose weights are read and not called."""

    def __init__(self):
        super().__init__()
        layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.layers, self.last = nn.ModuleList([layer, layer, layer]), nn.Linear(4, 4)
        self.register_module("norm", None)

    def forward(self, x, state):
        for layer in self.layers:
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return nn.functional.linear(x, self.last.weight, self.last.bias), state


def test_a_packed_model_has_all_names_and_weights_of_the_model():
    torch.manual_seed(0)
    model, x = Repeated(), torch.randn(2, 4)
    packed = steps.pack(model)
    with torch.no_grad():
        torch.testing.assert_close(packed(x, None)[0], model(x, None)[0])
    assert packed.state_dict().keys() == model.state_dict().keys()
    assert repr(packed.last) == repr(model.last).replace("Linear", "PackedLinear")


def test_a_model_trains_after_a_search_and_on_what_it_found():
    model = translator()
    config = mnemos.BeamConfig(eos=2, beams=3, max_length=9)
    (found,), _ = mnemos.beam_search(model, model.encode(tokens(2, 5)), torch.ones(2, 1, dtype=torch.int64), config)
    assert not found.tokens.is_inference()
    logits, _ = model.train()(mnemos.Pair(tokens(1, 5), found.tokens[None]))
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model.head.weight.mul_(2)
        state = model.eval().encode(tokens(2, 5))
        torch.testing.assert_close(steps.pack(model)(tokens(2, 1), state)[0], model(tokens(2, 1), state)[0])


def test_without_a_compiler_the_model_steps(monkeypatch):
    monkeypatch.setattr(decoding, "library", lambda: None)
    monkeypatch.setattr(decoding, "why_not", lambda: "the native kernels were not built: install a C++ compiler")
    model = make()
    step = mnemos.fused_step(model)
    assert not step.fused
    assert step.why == "the native kernels were not built: install a C++ compiler"
    assert torch.equal(stream(step, ids(2))[0], stream(model, ids(2))[0])


def test_a_state_of_another_model_is_refused():
    model = make()
    _, state = make(layers=4)(ids(2, 1))
    for wrong in (state, "hello"):
        for run in (model, mnemos.fused_step(model)):
            refuses("3 layers.* found", run, ids(2, 1), wrong)
