"""A cache beside each host: the host stays what it was until the gate opens, and is what it was afterwards."""

import copy

import pytest
import torch
from hosts import FEW, ZOO, build, close, example, few, given, loss, open_caches, run, state

import mnemos
from mnemos import GRC, InputError
from mnemos.hosts import HostBranch
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


@pytest.mark.parametrize("name", few(ZOO))
def test_the_hosts_own_checkpoint_still_loads(name):
    host = build(name)
    model = copy.deepcopy(host)
    mnemos.cache(model, GRC(length=4))
    open_caches(model)
    model.train()
    loss(model, example(name))  # something is pending, too
    before = {k: v.clone() for k, v in model.state_dict().items() if inside(k)}
    assert [k for k in model.state_dict() if not inside(k)] == list(host.state_dict())
    with torch.no_grad():
        for parameter in host.parameters():
            parameter += 1
    for assign in (False, True):
        other = {k: v.clone() for k, v in host.state_dict().items()}
        model.load_state_dict(other, strict=True, assign=assign)
        assert set(other) == set(host.state_dict()), "what was given was changed"
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key] if inside(key) else other[key]), key
    loss(model, example(name)).backward()


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


def passes(model: torch.nn.Module, inputs) -> torch.Tensor:
    loss(model.train(), inputs).backward()
    model.zero_grad()
    with torch.no_grad():
        return run(model.eval(), inputs)


@pytest.mark.each_value
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", few(ZOO))
def test_uncache_leaves_nothing_behind(name, preset):
    model, inputs, calls = build(name), example(name), []
    last = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]
    mine = last.register_forward_hook(lambda *_: calls.append("mine"))
    output = passes(model, inputs)  # hosts remember things of a forward
    before = state(model)
    mnemos.cache(model, GRC(preset=preset, length=3), **given(name))
    assert state(model) != before
    passes(model, inputs)
    assert mnemos.uncache(model) is model
    assert state(model) == before
    close(passes(model, inputs), output)
    assert state(model) == before
    assert not any(isinstance(m, HostBranch) for m in model.modules())
    calls.clear()
    run(model, inputs)
    assert calls or name == "torch_mha", "a hook of the user's was taken away"
    mine.remove()
    with pytest.raises(InputError, match="found none of its caches"):
        mnemos.uncache(model)
    assert mnemos.cache(model, GRC(length=3)).swapped
    run(model.train(), inputs)


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
