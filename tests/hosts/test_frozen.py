"""A frozen cache: its keys and values are projected once, and again when the weights or the cache have changed."""

import pytest
import torch
from hosts import FEW, cached, close, example, run
from torch import nn

from mnemos.memory.gated_cache import caches


def count(model: nn.Module) -> list[int]:
    """How often keys and values were projected since; as long as the list is."""
    calls = [0]
    for branch in caches(model):
        for part in (branch.to_key, branch.to_value, branch.update_gate, branch.reset_gate, branch.candidate):
            part.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    return calls


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*FEW, "torch_padded"])  # PyTorch's encoder has a kernel that would pass it by
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


# Values are compared with copies, so it is all one how they are written; through .data addresses and versions stay.
CHANGES = {
    "key": lambda branch: branch.to_key.weight.data.mul_(-2),
    "value": lambda branch: branch.to_value.bias.data.add_(1),
    "cache": lambda branch: branch.cache.mul_(-2),
    "gate": lambda branch: branch.mix.add_(1),
    "replaced": lambda branch: setattr(branch.to_value, "weight", nn.Parameter(branch.to_value.weight.flip(0))),
    "another type and back": lambda branch: branch.half().double(),
}


@pytest.mark.parametrize("name", ["timm_vit", "hf_bert"])
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_is_seen(name, change):
    model, inputs = cached(name, "paper"), example(name)
    before = run(model, inputs)
    for branch in caches(model):
        CHANGES[change](branch)
    after = run(model, inputs)
    assert not torch.equal(after, before)
    for branch in caches(model):
        branch._frozen = None
    assert torch.equal(run(model, inputs), after)
