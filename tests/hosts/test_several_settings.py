"""Several calls of cache() on one model, with settings of their own; and any cached model on disk."""

import copy
import json

import pytest
import torch
from hosts import build, close, example, given, loss, open_caches, run
from torch import nn

import mnemos
from mnemos import GRC, InputError
from mnemos.hosts import from_pretrained, load, save
from mnemos.memory.gated_cache import caches

FIRST, SECOND = GRC(length=4, write=False), GRC(preset="paper", length=3, ratio=0.34)


def twice(name: str) -> nn.Module:
    """The first layer is cached in one way, which is never written, and the others in another."""
    model = build(name)
    torch.manual_seed(0)
    first = named_attentions(name)[0]
    mnemos.cache(model, FIRST, where=first, **given(name))
    mnemos.cache(model, SECOND, **given(name))
    open_caches(model)
    return model


def named_attentions(name: str) -> list[str]:
    return [one.name for one in mnemos.cache(build(name), GRC(length=3), **given(name)).swapped]


@pytest.mark.parametrize("name", ["timm_vit", "torch_padded", "hf_bert", "hf_bigbird_short"])
def test_two_settings_are_one_model(name):
    model = twice(name)
    branches = caches(model)
    assert [branch.cache.shape[0] for branch in branches] == [4, 3]
    assert [branch.grc.write for branch in branches] == [False, True]
    model.train()
    loss(model, example(name, seed=1)).backward()
    stored = [branch.cache.clone() for branch in branches]
    pending = branches[1].pending.clone()
    loss(model, example(name, seed=2)).backward()
    assert torch.equal(branches[0].cache, stored[0])
    assert torch.equal(branches[1].cache, pending), "the next forward promotes"
    assert all(p.grad is not None for branch in branches for p in branch.parameters())
    assert mnemos.uncache(model) is model
    assert not caches(model)
    assert not [
        key for module in model.modules() for key in module.__dict__ if "mnemos" in key or key == "gated_caches"
    ]
    assert list(model.state_dict()) == list(build(name).state_dict())


def test_an_attention_is_cached_once():
    model = build("timm_vit")
    report = mnemos.cache(model, GRC(length=3), where="blocks.0.attn")
    with pytest.raises(InputError, match=r"blocks.0.attn: .*without a cache, found one.*uncache"):
        mnemos.cache(model, GRC(length=4), where="blocks.*.attn")
    with pytest.raises(InputError, match="found 1 of another call"):
        mnemos.cache(model.blocks, GRC(length=4))
    again = mnemos.cache(model, GRC(length=4))
    assert [one.name for one in (*report.swapped, *again.swapped)] == ["blocks.0.attn", "blocks.1.attn"]
    assert [(one.name, one.why) for one in again.left] == [("blocks.0.attn", "it has a cache already")]
    with pytest.raises(InputError, match=r"blocks.0.attn' was left .it has a cache already"):
        mnemos.cache(model, GRC(length=4))


@pytest.mark.parametrize("name", ["timm_vit", "torch_padded", "hf_bert"])
def test_any_model_is_saved_with_all_settings(name, tmp_path):
    model = twice(name).train()
    loss(model, example(name, seed=1)).backward()
    save(model, tmp_path / "new")
    again = load(build(name), tmp_path / "new").train()
    assert [branch.grc for branch in caches(again)] == [branch.grc for branch in caches(model)]
    for seed in (2, 3):
        close(loss(again, example(name, seed=seed)), loss(model, example(name, seed=seed)))
    save(copy.deepcopy(again), tmp_path / "copy")
    assert json.loads((tmp_path / "copy/caches.json").read_text()) == json.loads(
        (tmp_path / "new/caches.json").read_text()
    )
    with pytest.raises(InputError, match=r"cache.. was called on, found none"):
        save(build(name), tmp_path / "plain")
    with pytest.raises(InputError, match=r"expected caches.json and model.safetensors"):
        load(build(name), tmp_path)


def test_hugging_face_saves_all_settings(tmp_path):
    model = twice("hf_bert").float()
    model.save_pretrained(tmp_path)
    again = from_pretrained(type(model), tmp_path)
    assert [branch.grc for branch in caches(again)] == [branch.grc for branch in caches(model)]
    inputs = example("hf_bert", dtype=torch.float32)
    close(run(again, inputs), run(model, inputs), 1e-5)
    mnemos.uncache(again)
    assert not hasattr(again.config, "mnemos")


def test_groups_of_parameters():
    model = build("timm_vit")
    mnemos.cache(model, GRC(length=3), where="blocks.0.attn")
    model.patch_embed.requires_grad_(False)
    groups = mnemos.hosts.parameter_groups(model, lr=1e-5, branch_lr=1e-3, gate_lr=1e-2, weight_decay=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = [(group["lr"], group["weight_decay"]) for group in groups]
    assert kinds == [(1e-5, 0.1), (1e-5, 0.0), (1e-3, 0.1), (1e-3, 0.0), (1e-2, 0.0)]
    found = [[names.pop(id(parameter)) for parameter in group["params"]] for group in groups]
    assert all(name.startswith("patch_embed") for name in names.values()), "every other parameter is in one group"
    assert found[4] == ["blocks.0.attn.grc.mix"]
    assert all(".grc." in name for name in found[2] + found[3])
    assert not any(".grc." in name for name in found[0] + found[1])
    assert "blocks.0.attn.grc.to_query.weight" in found[2]
    assert "blocks.0.attn.grc.to_query.bias" in found[3]
    torch.optim.AdamW(groups)
    assert {group["lr"] for group in mnemos.hosts.parameter_groups(model, lr=0.5)} == {0.5}
