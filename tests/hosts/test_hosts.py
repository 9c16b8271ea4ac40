"""A cache beside each host: the host stays what it was until the gate opens, and is what it was afterwards."""

import copy

import pytest
import torch
from hosts import FEW, ZOO, build, close, example, few, loss, open_caches, run

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import caches

PRESETS = ("paper", "official", "mnemos")


def inside(name: str) -> bool:
    return ".grc." in f".{name}"


@pytest.mark.parametrize("name", few(ZOO))
def test_the_gate_opens_to_the_cache_and_a_move_of_the_model_moves_it(name):
    """Before and after `.to()`: the same model either way; and the outputs above were not the host's by accident."""
    host, inputs = build(name, torch.float32), example(name)
    before, after = copy.deepcopy(host).double(), copy.deepcopy(host)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        mnemos.cache(after, GRC(length=4))
        torch.manual_seed(3)
        mnemos.cache(before, GRC(length=4))
    after.double()
    assert {b.pending.dtype for b in (*caches(before), *caches(after))} == {torch.float64}
    before.load_state_dict(after.state_dict())
    for model in (before, after):
        open_caches(model)
        assert {b.cache.dtype for b in caches(model)} == {torch.float64}
    for training in (False, True):
        found = [run(model.train(training), inputs) for model in (before, after)]
        close(*found)
        assert (found[0] - run(host.double().train(training), inputs)).abs().max() > 1e-3


@pytest.mark.each_value
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", few(ZOO))
def test_a_cached_checkpoint_loads_before_the_first_forward(name, assign):
    model, fresh = build(name), build(name)
    mnemos.cache(model, GRC(length=4, preset="paper"))
    open_caches(model)
    model.train()
    for seed in (1, 2):
        loss(model, example(name, seed=seed)).backward()
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    mnemos.cache(fresh, GRC(length=4, preset="paper"))
    fresh.load_state_dict(saved, strict=True, assign=assign)
    for a, b in zip(fresh.state_dict().values(), saved.values(), strict=True):
        assert torch.equal(a, b)
    for seed in (3, 4):
        close(loss(fresh.train(), example(name, seed=seed)), loss(model, example(name, seed=seed)), 1e-9)


@pytest.mark.parametrize("name", FEW)
def test_a_damaged_checkpoint_is_refused(name):
    model = build(name)
    mnemos.cache(model, GRC(length=4))
    whole = model.state_dict()
    own = [k for k in whole if inside(k)]
    first = own[0].rpartition("grc.")[0]
    damaged = [
        {k: v for k, v in whole.items() if k != own[0]},
        {k: v for k, v in whole.items() if not k.endswith("grc.cache")},
        {k: v for k, v in whole.items() if not (inside(k) and k.startswith(first))},  # one whole branch
        {**whole, f"{first}grc.more": torch.zeros(1)},
        {**whole, own[0]: torch.zeros(7)},
    ]
    for one in damaged:
        with pytest.raises(RuntimeError, match="grc"):
            model.load_state_dict(one, strict=True)
    model.load_state_dict(whole, strict=True)


@pytest.mark.parametrize("name", ["torch_encoder", "torch_padded"])
def test_the_fused_encoder_does_not_bypass_the_cache(name):
    model, inputs = build(name), example(name)
    with torch.no_grad():
        host = run(model, inputs)
    mnemos.cache(model, GRC(length=4))
    open_caches(model)
    slow = run(model, inputs)  # gradients wanted: no fast path
    seen: list[torch.Tensor] = []
    for branch in caches(model):
        branch.register_forward_hook(lambda *args: seen.append(args[2]))
    for mode in (torch.no_grad(), torch.inference_mode()):
        seen.clear()
        with mode:
            fast = run(model, inputs)
        assert len(seen) == 2
        close(fast.clone(), slow)
    assert (fast - host).abs().max() > 1e-3
