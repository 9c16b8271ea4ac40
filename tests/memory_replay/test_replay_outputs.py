"""Auxiliary outputs of a step, states whose lists grow, and the caches of Transformers."""

from types import SimpleNamespace

import pytest
import torch
from replay_standins import agree, begin, cell, gradients, plain, segments
from torch.nn import functional as F

from mnemos import InputError, replay


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


def test_steps_without_auxiliary_outputs():
    assert replay(cell(), segments(3), begin()).aux == [None] * 3


def test_a_cache_of_transformers_is_a_state():
    import mnemos.libraries
    from mnemos.memory_replay import register_transformers_caches

    mnemos.libraries.transformers()
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    register_transformers_caches()
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.1)).double()

    def step(ids, cache):
        cache = DynamicCache(config=model.config) if cache is None else cache
        logits = model(ids[:, :-1], **{mnemos.libraries.cache_name(): cache}).logits
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:]), cache

    pieces = [torch.randint(11, (2, n)) for n in (4, 5, 3, 4)]
    for start in (lambda: None, lambda: DynamicCache(config=model.config)):
        torch.manual_seed(3)
        total, _, end = plain(step, pieces, start())
        expected = gradients(model)
        torch.manual_seed(3)
        out = replay(step, pieces, start(), module=model)
        agree((out.loss, gradients(model)), (total, expected), 1e-10)
        assert isinstance(out.state, DynamicCache)
        assert out.state.get_seq_length() == end.get_seq_length() == 12
        agree(out.state.layers[1].keys, end.layers[1].keys, 1e-10)
