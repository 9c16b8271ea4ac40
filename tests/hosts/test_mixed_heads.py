"""mix="heads": eq. 2 of Cached Transformers inside other people's attentions, before their projection."""

import copy
import functools
import gc
import warnings
import weakref
from typing import Any

import hosts
import matrix
import pytest
import torch
import torch.distributed as dist
from hosts import build, cached, close, example, given, open_caches, run
from matrix import CHECKS
from refusals import refuses
from torch import Tensor, nn

import mnemos
from mnemos import GRC
from mnemos.hosts import hooks
from mnemos.libraries import timm
from mnemos.memory.gated_cache import caches, hold_caches

MNEMOS = GRC(length=4, mix="heads")
HOSTS = "timm_vit", "timm_swin", "timm_pvt2", "hf_vit", "hf_swin", "hf_pvt", "hf_bert", "hf_bigbird", "hf_bart"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [name for name in HOSTS if name not in ("hf_bert", "hf_bigbird")])
def test_the_mix_is_what_the_projection_reads(name, training):
    """An attention gives what the host's gives with its heads exchanged for those that the branch makes; gradients too.

    The convolution's output is added to the attention's. The branch is called here by itself: its equations are those
    of `test_host_branch`.
    """
    host = build(name)
    model, calls = copy.deepcopy(host), {}
    report = mnemos.cache(model, MNEMOS, **given(name))
    open_caches(model)
    for one in report.swapped:

        def record(_, args, kwargs, y, key=one.name) -> None:
            calls[key] = args, kwargs, y

        model.get_submodule(one.name).register_forward_hook(record, with_kwargs=True)
    with hold_caches(model):
        run(model.train(training), example(name))
    assert len(calls) == len(report.swapped)
    assert not hooks._stack.calls  # which would keep the model alive
    for key, (args, kwargs, y) in calls.items():
        branch, plain = model.get_submodule(key).grc, host.train(training).get_submodule(key)
        assert branch.inside == branch.host.projection
        projection = plain.get_submodule(branch.host.projection)

        call, added = branch.host.call(plain, args, kwargs), []

        def exchange(_, heads, branch=branch, call=call, added=added):
            with hold_caches(branch):
                mixed = branch(call.x, call.tokens(heads[0]), call.mask)
            mixed, *position = mixed if isinstance(mixed, tuple) else (mixed,)
            added.extend(position)
            return call.like(mixed, heads[0])

        handle = projection.register_forward_pre_hook(exchange)
        expected = plain(*args, **kwargs)
        handle.remove()
        found, expected = (z[0] if isinstance(z, tuple) else z for z in (y, expected))
        for position in added:
            expected = expected + call.like(position, expected)
        close(found, expected)
        wanted = [branch.mix, branch.to_key.weight, branch.update_gate.weight]
        for mine, theirs in zip(
            *(torch.autograd.grad(z.square().sum(), wanted) for z in (found, expected)), strict=True
        ):
            assert theirs.any()
            close(mine, theirs)


@pytest.mark.parametrize("name", HOSTS)
def test_with_the_gate_closed_the_host_is_what_it_was_bit_for_bit(name):
    host, inputs = build(name), example(name)
    model = copy.deepcopy(host)
    length = "paper" if name.endswith(("swin", "pvt", "pvt2")) else 4
    report = mnemos.cache(model, GRC(preset="paper", mix="heads", length=length), **given(name))
    assert {one.grc.mix for one in report.swapped} == {"heads"}
    with torch.no_grad():
        for branch in caches(model):
            assert branch.lift is None
            branch.mix.fill_(-torch.inf)
            branch.cache.normal_()
    for training in (False, True):
        assert torch.equal(run(model.train(training), inputs), run(host.train(training), inputs))
    with torch.no_grad():
        for branch in caches(model):
            branch.mix.zero_()
    assert not torch.allclose(run(model, inputs), run(host, inputs), atol=1e-3)
    assert torch.equal(run(mnemos.uncache(model).eval(), inputs), run(host.eval(), inputs))


FAST = "strict state", "deepcopy", "checkpointing", "save, load", "uncache"


@pytest.mark.parametrize("check", [c if c in FAST else pytest.param(c, marks=pytest.mark.exhaustive) for c in CHECKS])
def test_what_holds_of_a_cached_host_holds_by_heads(check, monkeypatch):
    def by_heads(**switches: Any) -> GRC:
        return GRC(**switches) if switches.get("preset") == "official" else GRC(mix="heads", **switches)

    for module in (hosts, matrix):
        monkeypatch.setattr(module, "GRC", by_heads)
    CHECKS[check]("hf_pvt")


def test_hosts_without_heads_are_refused_with_what_to_do():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 1)
    refuses("torch MultiheadAttention, of which", mnemos.cache, encoder, MNEMOS)
    assert not caches(encoder)
    refuses('source="input" and lift="project"', GRC, preset="official", mix="heads")
    refuses("leave mix out", mnemos.attention.GatedCacheAttention, 12, 2, grc=GRC(length=4, mix="channels"))


def test_a_norm_between_heads_and_projection_is_refused():
    """The mix at the projection's input would be one of normed heads."""
    sizes = {"img_size": 28, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 5}
    plain, normed = (timm().create_model("eva02_base_patch14_224", scale_attn_inner=n, **sizes) for n in (False, True))
    mnemos.cache(plain, MNEMOS)
    refuses("with norm before it", mnemos.cache, normed, MNEMOS)
    assert not caches(normed)


class Added(nn.Module):
    """An adapter around a projection, which adds its own part."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.own = base, nn.Linear(24, 24).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.own(x)


X = example("timm_vit").args[0]


@torch.no_grad()
def test_tools_that_wrap_unwrap_or_copy_a_projection_keep_the_mix():
    model, x = cached("timm_vit", mix="heads"), X
    attention = model.blocks[0].attn
    before, proj, seen = model(x), attention.proj, []
    proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    attention.proj = Added(proj)
    attention.proj.own.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    assert not torch.allclose(model(x), before)
    assert torch.equal(*seen)  # the adapter's own part reads the mixed heads
    attention.proj = proj
    assert torch.equal(model(x), before)
    attention.proj = copy.deepcopy(proj)
    del attention.proj._mnemos_handles  # as quantisation makes its copies
    assert torch.equal(model(x), before)
    mnemos.uncache(model)
    assert not attention.proj._forward_pre_hooks.keys() - proj._forward_pre_hooks.keys()
    model(x)


@torch.no_grad()
def test_a_call_that_raised_leaves_nothing_behind():
    model, x = cached("timm_vit", mix="heads"), X
    attention = model.blocks[0].attn

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for hook in (
        attention.qkv.register_forward_hook,
        attention.proj_drop.register_forward_hook,
        functools.partial(attention.register_forward_pre_hook, prepend=True),  # before the call is noted
    ):
        handle = hook(fail)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns of a hook that raises, too
            with pytest.raises(ZeroDivisionError):
                model(x)
        handle.remove()
        refuses("in each call of its attention", attention.proj, torch.randn(2, 17, 24).double())
    attention.forward = lambda x, **_: x  # as a tool may that fuses it
    refuses("timm Attention: expected a call of its proj, found none", model, x)
    found = weakref.ref(model)
    del model, attention, handle, hook
    gc.collect()
    assert found() is None


@pytest.mark.skipif(not dist.is_available(), reason="torch without processes")
def test_sharded_alone_the_branch_has_its_convolution(tmp_path):
    """FSDP2 of the branch: its weights are whole inside its own forward only."""
    from torch.distributed.fsdp import fully_shard

    expected, x = cached("timm_vit", mix="heads", convolution=True).train(), X
    model = copy.deepcopy(expected)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for block in model.blocks:
            fully_shard(block.attn.grc)
        for one in (expected, model):
            one(x).square().sum().backward()
        name = "blocks.0.attn.grc.convolution.weight"
        found, wanted = (dict(one.named_parameters())[name].grad for one in (model, expected))
        torch.testing.assert_close(found.full_tensor(), wanted)
        assert wanted.any()
    finally:
        dist.destroy_process_group()
