"""Cached hosts under what people do to models: copies, pickles, other types, autocast, torch.compile."""

import copy

import pytest
import torch
from hosts import FEW, cached, close, example, libraries, loss, open_caches, run
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import caches


@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
@pytest.mark.parametrize("name", [*FEW[:4], "hf_bigbird_short", "hf_reformer"])  # sparse BigBird takes no autocast
@pytest.mark.each_value
def test_half_precision_stays_near_and_keeps_the_cache_in_float32(name, preset):
    single, half = (cached(name, preset, torch.float32).train() for _ in range(2))
    for seed in (1, 2):
        inputs = example(name, seed=seed, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            found = run(half, inputs)
            low = loss(half, inputs) if seed == 2 else found.float().square().sum()
        expected = run(single, inputs)
        if seed == 2:
            loss(single, inputs)
        low.backward()
        assert found.isfinite().all()
        if name != "hf_reformer":  # which hashes to other buckets
            assert (found.float() - expected).norm() < 0.1 * expected.norm()
        for branch, other in zip(caches(half), caches(single), strict=True):
            assert branch.cache.dtype == branch.pending.dtype == torch.float32
            assert all(p.grad is not None and p.grad.isfinite().all() for p in branch.parameters())
            if name != "hf_reformer":
                assert (branch.cache - other.cache).norm() < 0.1 * other.cache.norm()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        first = run(half.eval(), inputs)
        assert torch.equal(run(half, inputs), first)
    with torch.no_grad():  # what was remembered in half precision is not taken now
        close(run(half, inputs), run(copy.deepcopy(half).eval(), inputs), 1e-6)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "way",
    ["function", *(pytest.param(way, marks=pytest.mark.exhaustive) for way in ("wrapper", "compile", "graph break"))],
)
@pytest.mark.filterwarnings("ignore:mnemos.cache")  # of attentions without a model around them
def test_a_cache_in_a_compiled_model(fresh_compiler, way):
    """However a model was compiled, it computes its caches, and without them what it computed before."""
    attention = libraries.timm().layers.attention.Attention
    model, x = nn.Sequential(attention(12, 2), attention(12, 2)).eval(), torch.randn(3, 7, 12)
    other = copy.deepcopy(model)

    def function(x):
        if way == "graph break":
            torch._dynamo.graph_break()
        return model(x)

    if way == "compile":
        model.compile(backend="eager")
    call = model if way == "compile" else torch.compile(model if way == "wrapper" else function, backend="eager")
    with torch.no_grad():
        call(x)
        for where in ("0", None):  # a further call adds to what the first one gave
            mnemos.cache(model, GRC(length=3), where=where)
            open_caches(model)
            torch.testing.assert_close(call(x), copy.deepcopy(model)(x))
            assert not torch.allclose(call(x), other(x))
        mnemos.uncache(model)
        torch.testing.assert_close(call(x), other(x))


@pytest.mark.parametrize("preset", ["paper", "mnemos"])
def test_an_ensemble_by_functional_calls(preset):
    models = [cached("torch_mha", preset), cached("torch_mha", preset)]
    inputs = example("torch_mha")
    with torch.no_grad():
        models[1].in_proj_weight.add_(0.1)
        models[1].grc.to_key.weight.add_(0.1)
        states = torch.func.stack_module_state(models)
        call = torch.vmap(lambda state: torch.func.functional_call(models[0], state, inputs.args, inputs.kwargs)[0])
        for found, model in zip(call(states), models, strict=True):
            close(found[inputs.valid], run(model, inputs))


@pytest.mark.parametrize("name", ["timm_vit", "hf_bert"])
def test_a_gradient_by_a_functional_call_trains_the_cache(name):
    plain, other = cached(name).train(), cached(name).train()
    for seed in (1, 2):
        inputs = example(name, seed=seed)
        plain.zero_grad()
        loss(plain, inputs).backward()

        def call(weights: dict, inputs=inputs) -> torch.Tensor:
            return loss(lambda *args, **kwargs: torch.func.functional_call(other, weights, args, kwargs), inputs)

        found = torch.func.grad(call)({key: p.detach() for key, p in other.named_parameters()})
        for key, p in plain.named_parameters():
            if p.grad is not None:
                close(found[key], p.grad)
    for a, b in zip(caches(plain.eval()), caches(other.eval()), strict=True):
        close(b.cache, a.cache)
