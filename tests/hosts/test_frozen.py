"""A frozen cache: its keys and values are projected once, and again when the weights or the cache have changed."""

import pytest
import torch
from hosts import FEW, build, cached, close, example, loss, run
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import caches


def count(model: nn.Module) -> list[int]:
    """How often keys and values were projected since; as long as the list is."""
    calls = [0]
    for branch in caches(model):
        for part in (branch.to_key, branch.to_value, branch.update_gate, branch.reset_gate, branch.candidate):
            part.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", FEW)
def test_eval_is_all_that_is_needed(name, mode):
    model, inputs = cached(name, "paper").train(), example(name)
    run(model, inputs)
    calls = count(model.eval())
    expected = run(model, inputs)  # with gradient nothing is kept, but a reversible layer's forward has none
    assert calls == [2 * len(caches(model))]
    with mode():
        for _ in range(3):
            close(run(model, inputs).clone(), expected)
    assert calls == [(2 if name == "hf_reformer" else 4) * len(caches(model))], "projected once"
    assert all(branch._frozen for branch in caches(model))
    run(model.train(), inputs)
    assert not any(branch._frozen for branch in caches(model)), "training keeps nothing"


def step(model: nn.Module, name: str) -> None:
    with torch.enable_grad():
        loss(model, example(name)).backward()  # in eval mode, as some fine-tune
    torch.optim.AdamW(model.parameters(), 0.05, fused=True).step()


def load(model: nn.Module, name: str) -> None:
    model.load_state_dict({k: v + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()})


def in_place(model: nn.Module, name: str) -> None:
    for branch in caches(model):
        branch.to_key.weight.mul_(-2)


def of_the_cache(model: nn.Module, name: str) -> None:
    for branch in caches(model):
        branch.cache.mul_(-2)


def of_the_gate(model: nn.Module, name: str) -> None:
    for branch in caches(model):
        branch.mix.add_(1)


def replaced(model: nn.Module, name: str) -> None:
    for branch in caches(model):
        branch.to_value.weight = nn.Parameter(branch.to_value.weight.flip(0))


def written_through_data(model: nn.Module, name: str) -> None:
    """As libraries exchange weights for averaged ones: addresses and versions stay."""
    for branch in caches(model):
        branch.to_value.weight.data.copy_(branch.to_value.weight.flip(0))


def rounded(model: nn.Module, name: str) -> None:
    model.half().double()


# Values are compared with copies, so it is all one how they are written.
CHANGES = {
    "step": step,
    "load": load,
    "of the weights": in_place,
    "of the cache": of_the_cache,
    "of the gate": of_the_gate,
    "replaced": replaced,
    "through .data, in place": written_through_data,
    "another type and back": rounded,
    "emptied": lambda model, name: mnemos.memory.clear_caches(model),
}


@pytest.mark.parametrize("name", ["timm_vit", "hf_bert"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(name, change):
    model, inputs = cached(name, "paper"), example(name)
    with torch.no_grad():
        before = run(model, inputs)
        CHANGES[change](model, name)
        after = run(model, inputs)
        assert not torch.equal(after, before)
        for branch in caches(model):
            branch._frozen = None
        assert torch.equal(run(model, inputs), after)


def test_a_transient_cache_is_projected_at_every_call():
    model, inputs = build("timm_vit"), example("timm_vit")
    mnemos.cache(model, GRC(length=3))
    calls = count(model)
    with torch.no_grad():
        for _ in range(2):
            run(model, inputs)
    assert calls == [2 * 2 * 2]
