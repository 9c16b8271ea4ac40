"""mix="heads": eq. 2 of Cached Transformers inside other people's attentions, before their projection."""

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import matrix
import pytest
import torch
import torch.distributed as dist
from hosts import build, example, given, run
from matrix import CHECKS
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos import GRC, InputError
from mnemos.hosts import Host
from mnemos.hosts.host import TokenReader
from mnemos.libraries import timm, transformers
from mnemos.memory.gated_cache import caches
from mnemos.ops.gated_cache.reference import (
    reference_attend,
    reference_mix,
    reference_resample,
    reference_update,
)

PAPER = GRC(preset="paper", length=5, mix="heads")
MNEMOS = GRC(length=5, mix="heads")
HOSTS = "timm_vit", "timm_swin", "timm_pvt2", "hf_vit", "hf_swin", "hf_pvt", "hf_bert", "hf_bigbird", "hf_bart"


def linear(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight.T + module.bias


def in_heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(len(x), heads, -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([reference_attend(q[:, h], k[:, h], v[:, h]) for h in range(q.shape[1])], 1)


def remembered(branch: Any, x: Tensor, valid: Tensor, cache: Tensor) -> list[Tensor]:
    """o_mem [T, H, D/H] of each sample of x (eq. 3 to 5); tokens after the class tokens that are valid are written."""
    weights = {}
    for name, module in (("u", branch.update_gate), ("r", branch.reset_gate), ("c", branch.candidate)):
        weights |= {f"W_{name}": module.weight, f"b_{name}": module.bias}
    if branch.candidate_norm is not None:
        weights |= {"gain": branch.candidate_norm.weight, "shift": branch.candidate_norm.bias}
    d, found, outputs = branch.cache_dim, [], []
    for tokens, one in zip(x, valid, strict=True):
        written = reference_resample(tokens[branch.prefix :][one[branch.prefix :], :d], len(cache))
        found.append(reference_update(written, cache, weights, branch.grc.candidate))
    mean = sum(found) / len(found)
    for tokens, own in zip(x[..., :d], found, strict=True):
        read = mean if branch.grc.read == "mean" else own
        read = cache if not branch.training and branch.grc.inference == "frozen" else read
        q, k, v = linear(branch.to_query, tokens), linear(branch.to_key, read), linear(branch.to_value, read)
        outputs.append(attended(*(in_heads(z, branch.num_heads) for z in (q, k, v))))
    return outputs


def convolved(branch: Any, x: Tensor) -> Tensor:
    """The grouped convolution of a sample's grid [T, D], tap by tap; zero for class tokens."""
    (rows, columns), weight = branch.grid, branch.convolution.weight
    each = weight.shape[1]
    image = F.pad(x[branch.prefix :].reshape(rows, columns, -1), (0, 0, 1, 1, 1, 1))
    total = branch.convolution.bias.expand(rows, columns, -1)
    for a in range(3):
        for b in range(3):
            matrix_of_tap = torch.block_diag(*weight[:, :, a, b].split(each))
            total = total + image[a : a + rows, b : b + columns] @ matrix_of_tap.T
    return torch.cat([x.new_zeros(branch.prefix, x.shape[1]), total.reshape(rows * columns, -1)])


def by_timm(attention: Any, x: Tensor, valid: Tensor, cache: Tensor) -> Tensor:
    """timm's `Attention` with a cache and its convolution: heads, eq. 2, projection."""
    branch, rows = attention.grc, []
    for tokens, o_mem in zip(x, remembered(branch, x, valid, cache), strict=True):
        o_self = attended(*(in_heads(z, 3) for z in linear(attention.qkv, tokens).chunk(3, 1)))
        mixed = reference_mix(o_mem, o_self, branch.mix)
        rows.append(linear(attention.proj, mixed.flatten(1)) + convolved(branch, tokens))
    return torch.stack(rows)


def by_bert(attention: Any, x: Tensor, valid: Tensor, cache: Tensor) -> Tensor:
    """Hugging Face's `BertAttention` with a cache: heads, eq. 2, projection, residual, norm."""
    own, out, rows = attention.self, attention.output, []
    for tokens, seen, o_mem in zip(x, valid, remembered(own.grc, x, valid, cache), strict=True):
        asked = (own.query, tokens), (own.key, tokens[seen]), (own.value, tokens[seen])
        q, k, v = (in_heads(linear(module, z), 3) for module, z in asked)
        mixed = reference_mix(o_mem, attended(q, k, v), own.grc.mix)
        total = tokens + linear(out.dense, mixed.flatten(1))
        total = total - total.mean(1, keepdim=True)
        scale = torch.sqrt(total.square().mean(1, keepdim=True) + out.LayerNorm.eps)
        rows.append(total / scale * out.LayerNorm.weight + out.LayerNorm.bias)
    return torch.stack(rows)


def timm_attention(grc: GRC) -> tuple[Any, tuple]:
    """The attention of a vision transformer with a class token and 3 x 5 patches, and its second argument."""
    sizes = {"img_size": (12, 20), "patch_size": 4, "embed_dim": 18, "depth": 1, "num_heads": 3}
    model = timm().create_model("vit_tiny_patch16_224", **sizes)
    mnemos.cache(model, replace(grc, convolution=True))
    return model.double().blocks[0].attn, ()


def bert_attention(grc: GRC) -> tuple[Any, tuple]:
    """The attention of a BERT, and the mask of 16 tokens in rows of 16 and 9."""
    library = transformers()
    sizes = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 1, "intermediate_size": 7}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 9}
    model = library.BertModel(library.BertConfig(**sizes, **still, attn_implementation="sdpa"))
    mnemos.cache(model, grc)
    return model.double().encoder.layer[0].attention, (torch.where(VALID, 0.0, -torch.inf)[:, None, None].double(),)


VALID = torch.arange(16) < torch.tensor([[16], [9]])
MODULES = {"timm": (timm_attention, by_timm, 18), "BERT": (bert_attention, by_bert, 15)}


@pytest.mark.parametrize("grc", [PAPER, MNEMOS], ids=["paper", "mnemos"])
@pytest.mark.parametrize("name", MODULES)
def test_values_and_gradients_of_the_equations(name, grc):
    """Of the heads' mixing and all around it, with respect to the tokens and all parameters of host and branch."""
    torch.manual_seed(0)
    make, oracle, width = MODULES[name]
    attention, more = make(grc)
    valid = VALID if more else torch.ones(2, 16, dtype=torch.bool)
    (branch,) = caches(attention)
    with torch.no_grad():
        for value in (*attention.parameters(), branch.cache):
            value += 0.3 * torch.randn_like(value)
    x = torch.randn(2, 16, width, dtype=torch.float64, requires_grad=True)
    wanted = [x, *attention.parameters()]
    for training in (True, False):
        attention.train(training)
        expected = oracle(attention, x, valid, branch.cache.clone())
        found = attention(x, *more)
        found = found[0] if isinstance(found, tuple) else found
        torch.testing.assert_close(found, expected)
        upstream = torch.sin(torch.arange(found.numel(), dtype=found.dtype)).view_as(found)
        grads = [torch.autograd.grad((y * upstream).sum(), wanted, allow_unused=True) for y in (found, expected)]
        for mine, theirs in zip(*grads, strict=True):
            both = [torch.zeros(()).double() if grad is None else grad for grad in (mine, theirs)]
            torch.testing.assert_close(*torch.broadcast_tensors(*both))


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

    monkeypatch.setattr(matrix, "GRC", by_heads)
    CHECKS[check]("hf_pvt")


def test_hosts_without_heads_are_refused_with_what_to_do():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 1)
    with pytest.raises(InputError, match="torch MultiheadAttention, of which"):
        mnemos.cache(encoder, MNEMOS)
    assert not caches(encoder)
    with pytest.raises(InputError, match='source="input" and lift="project"'):
        GRC(preset="official", mix="heads")
    with pytest.raises(InputError, match="leave mix out"):
        mnemos.attention.GatedCacheAttention(12, 2, grc=GRC(length=4, mix="channels"))


def test_a_norm_between_heads_and_projection_is_refused():
    """The mix at the projection's input would be one of normed heads."""
    sizes = {"img_size": 28, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 5}
    plain, normed = (timm().create_model("eva02_base_patch14_224", scale_attn_inner=n, **sizes) for n in (False, True))
    mnemos.cache(plain, MNEMOS)
    with pytest.raises(InputError, match="with norm before it"):
        mnemos.cache(normed, MNEMOS)
    assert not caches(normed)


class Added(nn.Module):
    """An adapter around a projection, which adds its own part."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.own = base, nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.own(x)


def opened(**more: Any) -> Any:
    """A vision transformer in eval mode, with half-open caches that hold something."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    model = timm().create_model("vit_tiny_patch16_224", **sizes)
    mnemos.cache(model, replace(MNEMOS, gate_init=0.0, **more))
    return model.eval()


@torch.no_grad()
def test_tools_that_wrap_unwrap_or_copy_a_projection_keep_the_mix():
    model, x = opened(), torch.randn(2, 3, 16, 16)
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
    model, x = opened(), torch.randn(2, 3, 16, 16)
    attention = model.blocks[0].attn

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    for part in (attention.qkv, attention.proj_drop):
        handle = part.register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        with pytest.raises(InputError, match="in each call of its attention"):
            attention.proj(torch.randn(2, 17, 12))
    found = weakref.ref(model)
    del model, attention, handle, part
    gc.collect()
    assert found() is None


class Inner(nn.Module):
    dim, num_heads = 12, 3

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x.softmax(-1))


class Outer(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.inner(x).sin())


@torch.no_grad()
def test_attentions_inside_one_another_and_with_one_projection(monkeypatch):
    monkeypatch.setattr("mnemos.hosts.adapters._registered", {})
    mnemos.register_host(Host(f"{__name__}:Inner", ("x",), "dim", "num_heads", TokenReader("x"), projection="proj"))
    x = torch.randn(2, 5, 12)
    for tied in (False, True):
        model = Outer()
        if tied:
            model.inner.proj = model.proj
        weights = [(one.proj.weight, one.proj.bias) for one in (model.inner, model)]
        mnemos.cache(model, replace(MNEMOS, gate_init=0.0))
        given: list[Tensor] = []
        for one in (model.inner, model):
            one.grc.register_forward_hook(lambda _, args, y, given=given: given.extend((*args[:2], y)))
        out = model.eval()(x)
        inner_x, inner_heads, inner_mixed, outer_x, outer_heads, outer_mixed = given
        assert torch.equal(inner_x, x)
        assert torch.equal(outer_x, x)
        assert torch.equal(inner_heads, x.softmax(-1))
        assert torch.equal(outer_heads, F.linear(inner_mixed, *weights[0]).sin())
        assert torch.equal(out, F.linear(outer_mixed, *weights[1]))


@pytest.mark.skipif(not dist.is_available(), reason="torch without processes")
def test_sharded_alone_the_branch_has_its_convolution(tmp_path):
    """FSDP2 of the branch: its weights are whole inside its own forward only."""
    from torch.distributed.fsdp import fully_shard

    expected, x = opened(convolution=True).train(), torch.randn(2, 3, 16, 16)
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


def test_settings_without_a_mix_are_by_channels_as_they_were():
    model = build("timm_vit")
    report = mnemos.cache(model, GRC(preset="paper", length=4))
    assert {one.grc.mix for one in report.swapped} == {"channels"}
    assert "3 heads, mix=channels" in str(report)
    assert "3 heads, mix=heads" in str(mnemos.cache(mnemos.uncache(model), PAPER))
