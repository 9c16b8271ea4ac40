"""mix="heads": eq. 2 of Cached Transformers inside other people's attentions, before their projection."""

import copy
from dataclasses import replace
from typing import Any

import matrix
import pytest
import torch
from hosts import build, example, given, run
from matrix import CHECKS
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos import GRC, InputError
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


def test_a_projection_that_another_took_the_place_of_is_refused():
    """An adapter around it would add its own part of heads without the cache."""
    model = build("timm_vit")
    mnemos.cache(model, MNEMOS)
    attention = model.blocks[0].attn
    attention.proj = nn.Sequential(attention.proj)
    with pytest.raises(InputError, match=r"projection \(proj\) that mnemos.cache\(\) found"):
        run(model, example("timm_vit"))


def test_settings_without_a_mix_are_by_channels_as_they_were():
    model = build("timm_vit")
    report = mnemos.cache(model, GRC(preset="paper", length=4))
    assert {one.grc.mix for one in report.swapped} == {"channels"}
    assert "3 heads, mix=channels" in str(report)
    assert "3 heads, mix=heads" in str(mnemos.cache(mnemos.uncache(model), PAPER))
