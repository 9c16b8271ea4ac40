"""A cache that is never written: the branch of a cached layer, over update(own tokens, 0) and nothing older."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.attention import GatedCacheAttention
from mnemos.memory import gated_cache as stored_module
from mnemos.memory.gated_cache import PRESETS

D, H, TM, T = 8, 2, 3, 12


def layer(causal=False, **grc):
    torch.manual_seed(0)
    made = GatedCacheAttention(D, H, grc=GRC(**{"length": TM, **grc}), causal=causal).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.4 * torch.randn_like(parameter)
    return made


def tokens(seed=1):
    return torch.randn(2, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_it_computes_what_the_written_one_computes_before_its_first_write_and_stays_there():
    written, unwritten = layer(), layer(write=False)
    shapes = [{name: x.shape for name, x in model.state_dict().items()} for model in (written, unwritten)]
    assert shapes[0] == shapes[1]
    first, _ = written(tokens())
    for seed in (1, 2, 3):
        unwritten(tokens(seed))[0].sum().backward()
    again, _ = unwritten(tokens())
    assert torch.equal(again, first)
    assert torch.equal(unwritten.eval()(tokens())[0], again), "evaluation reads what training read"
    assert unwritten.state_dict()["cache"].abs().max() == unwritten.pending.abs().max() == 0
    written(tokens(2))
    assert not torch.equal(written(tokens())[0], first), "the written one moves on"


def test_a_loaded_cache_is_read_and_kept():
    written, unwritten = layer(), layer(write=False)
    written(tokens(2))
    unwritten.load_state_dict(written.state_dict())
    assert torch.equal(unwritten(tokens())[0], written(tokens())[0])
    unwritten(tokens(3))
    assert torch.equal(unwritten.eval().cache, written.cache)


@pytest.mark.parametrize("scope", ["shared", "stream"])
def test_a_causal_block_reads_the_block_before_it_and_no_older_one(scope):
    module = layer(causal=True, scope=scope, write=False)
    with torch.no_grad():
        module.mix.fill_(torch.inf)  # o_mem alone
    x = tokens()
    whole, _ = module.heads(x)
    for block in range(T // TM):
        here = slice(block * TM, (block + 1) * TM)
        before = x[:, (block - 1) * TM : block * TM, : module.cache_dim]
        read = module.update(before, module.cache) if block else module.cache[None]
        expected = module.answer(x[:, here, : module.cache_dim], read)
        torch.testing.assert_close(whole[:, here], expected, rtol=1e-12, atol=1e-12)
    first, state = module.heads(x[:, :5])
    rest, _ = module.heads(x[:, 5:], state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, rtol=1e-12, atol=1e-12)


def test_a_stream_carries_nothing_from_call_to_call():
    module = layer(scope="stream", write=False)
    fresh, state = module(tokens())
    later, state = module(tokens(), state)
    assert torch.equal(later, fresh)
    assert state.updates.cache.abs().max() == 0
    assert state.updates.seen.tolist() == [2 * T] * 2
    assert not module.state_gradient


def test_several_processes_have_nothing_to_reduce(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a reduction")

    monkeypatch.setattr(stored_module, "several_processes", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", refuse)
    module = layer(write=False)
    module(tokens())
    with stored_module.accumulate_caches(module):
        module(tokens())
    with pytest.raises(AssertionError, match="a reduction"):
        layer()(tokens())


@pytest.mark.parametrize(
    "grc",
    [
        *(GRC(preset=preset) for preset in PRESETS),
        GRC(preset="paper", read="sample", inference="transient"),
        GRC(preset="paper", inference="transient"),
        GRC(preset="mnemos", inference="frozen"),
        GRC(scope="stream"),
    ],
)
def test_the_baseline_differs_from_its_cache_in_the_writing_alone(grc):
    baseline = grc.unwritten()
    assert baseline.resolved() == replace(grc.resolved(), write=False)
    assert baseline.constant == (grc.resolved().inference == "frozen")


def test_a_constant_is_read_as_a_stored_cache_is_at_inference_and_learned():
    written, constant = layer(preset="paper"), layer(preset="paper", write=False, inference="frozen")
    written(tokens())
    found = constant.load_state_dict(written.eval().state_dict())
    assert not found.missing_keys
    assert torch.equal(constant.eval()(tokens(2))[0], written(tokens(2))[0]), "read alike"
    content = constant.cache.detach().clone()
    y, _ = constant.train()(tokens(2))
    assert torch.equal(y, written(tokens(2))[0]), "in training too"
    y.pow(2).sum().backward()
    assert constant.cache.grad.abs().min() > 0
    assert all(p.grad is not None for p in constant.parameters()), "DistributedDataParallel waits for every gradient"
    stored_module.clear_caches(constant)
    assert torch.equal(constant.eval().cache, content), "no forward writes it, and clearing leaves parameters"
    alone = constant(tokens(2)[:1])[0]
    torch.testing.assert_close(alone, y[:1], rtol=1e-12, atol=1e-12)
    assert constant.rows_independent
    assert not written.rows_independent


def test_the_slots_of_a_constant_differ_at_the_start():
    torch.manual_seed(0)
    cache = GatedCacheAttention(D, H, grc=GRC(preset="paper", length=TM).unwritten()).cache
    assert cache.std(0).min() > 0


def test_beside_a_host_it_costs_the_same_and_stays_empty():
    def host():
        torch.manual_seed(0)
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 16, batch_first=True, dropout=0.0), 2).double()

    written, unwritten, plain = host(), host(), host()
    costs = [mnemos.cache(model, GRC(length=TM, write=write)) for model, write in ((written, True), (unwritten, False))]
    assert costs[0].flops == costs[1].flops
    assert costs[0].parameters == costs[1].parameters
    unwritten.load_state_dict(written.state_dict())
    for seed in (1, 1):
        said = [model.train()(tokens(seed)) for model in (written, unwritten)]
    assert not torch.equal(*said)
    stored = [cache.cache for cache in stored_module.stored(unwritten.eval())]
    assert len(stored) == 2
    assert all(cache.abs().max() == 0 for cache in stored)
    x = tokens()
    assert torch.equal(mnemos.uncache(unwritten)(x), plain.eval()(x))
