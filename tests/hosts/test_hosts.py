"""A cache beside each host: opened, moved, loaded, of several settings; what all hosts keep is in `matrix`."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hosts import ZOO, build, cached, close, example, few, loss, open_caches, run, twice
from refusals import refuses
from torch import nn

import mnemos
from mnemos import GRC
from mnemos.hosts import Host, HostBranch, adapters
from mnemos.hosts.inputs import NamedModule
from mnemos.memory.gated_cache import caches


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
    left = {key for module in model.modules() for key in module.__dict__}
    assert not [key for key in left if "mnemos" in key or key == "gated_caches"]
    assert list(model.state_dict()) == list(build(name).state_dict())


def test_an_attention_is_cached_once():
    model = build("timm_vit")
    report = mnemos.cache(model, GRC(length=3), where="blocks.0.attn")
    refuses("0.attn: .*without a cache, found one.*uncache", mnemos.cache, model, GRC(length=4), where="blocks.*.attn")
    refuses("found 1 of another call", mnemos.cache, model.blocks, GRC(length=4))
    again = mnemos.cache(model, GRC(length=4))
    assert [one.name for one in (*report.swapped, *again.swapped)] == ["blocks.0.attn", "blocks.1.attn"]
    assert [(one.name, one.why) for one in again.left] == [("blocks.0.attn", "it has a cache already")]
    refuses(r"blocks.0.attn' was left .it has a cache already", mnemos.cache, model, GRC(length=4))


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


@pytest.mark.parametrize("says", ["is_decoder", "is_causal", "config", ""])
def test_an_attention_of_a_decoder_says_so_or_its_configuration_does(says):
    module = nn.Identity()
    setattr(module, says or "other", True)
    module.config = SimpleNamespace(is_decoder=says == "config")
    reason = adapters._decoder(NamedModule("layer.0.attention.self", module, ())) or ""
    assert ("in a decoder" in reason) == bool(reason) == bool(says)


def test_sizes_are_those_of_the_attributes_that_are_named():
    host = Host("library:Attention", (), "inner.width", "heads", None, out="out")
    assert host.sizes(SimpleNamespace(inner=SimpleNamespace(width=6), out=8, heads=2)) == (6, 8, 2)
    refuses(r"integer widths and heads, found \[None, 8, 0\]", host.sizes, SimpleNamespace(out=8, heads=0))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.each_value
def test_a_branch_is_given_the_hosts_own_input_output_and_mask(name, training):
    """The host alone, on what the branch was given as its input, gives what the branch was given as its output."""
    model, inputs = cached(name).train(training), example(name)
    hosts, calls = {}, {}
    for module in model.modules():
        if isinstance(getattr(module, "grc", None), HostBranch):
            hosts[module.grc] = module
            hook = lambda m, args, kwargs, branch=module.grc: calls.__setitem__(branch, (args, kwargs))  # noqa: E731
            part = module.get_submodule(module.grc.inside)
            part.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)  # before it is mixed
    seen: dict = {}
    for branch in hosts:
        branch.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, args))
    run(model, inputs)
    assert seen.keys() == hosts.keys()
    padding = next((x for key, x in inputs.kwargs.items() if key.endswith("key_padding_mask")), None)
    valid = inputs.kwargs["attention_mask"].bool() if "attention_mask" in inputs.kwargs else None
    for branch, (x, y, mask) in seen.items():
        if padding is not None or valid is not None:
            assert mask.dtype == torch.bool
            assert torch.equal(mask, valid if padding is None else ~padding)
        if name == "hf_reformer":  # its hashes are drawn again
            continue
        args, kwargs = calls[branch]
        flipped = getattr(hosts[branch], "batch_first", True) is False
        if branch.inside:  # it is given (o_self, x)
            own, tokens = args[0], args[1] if len(args) > 1 else x
        else:
            tokens = args[0] if args else kwargs["hidden_states"]
            own = hosts[branch].forward(*args, **kwargs)
            own = own[0] if isinstance(own, tuple) else own
        close(x, tokens.transpose(0, 1) if flipped else tokens)
        close(y, own.transpose(0, 1) if flipped else own)
