"""Table 2's attention-based cache: beside each host, against the softmax over own and kept tokens, and by itself."""

import copy
import dataclasses
import math
import pickle

import processes
import pytest
import torch
from refusals import refuses
from torch import Tensor, nn
from torch.nn import functional as F

import mnemos
from mnemos.lab.vision.attention_cache import AttentionCache, TokenCache, cache_attention
from mnemos.lab.vision.classifiers import PVTConfig, ViTConfig
from mnemos.memory.gated_cache import accumulate_caches, hold_caches, stored

CONFIGS = {
    "vit": ViTConfig(image=12, patch=4, dim=12, depth=2, num_heads=3),
    "pvt": PVTConfig(image=16, dims=(8, 12), depths=(1, 1), num_heads=(2, 3)),
    "pvt2": PVTConfig(version=2, image=16, dims=(8, 12), depths=(1, 1), num_heads=(2, 3)),
}


def build(name: str, images: int | None = 1) -> nn.Module:
    torch.manual_seed(0)
    cache = None if images is None else AttentionCache(images)
    model = dataclasses.replace(CONFIGS[name], cache=cache).build().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def batch(name: str, seed: int = 1) -> Tensor:
    size = 3, 3, CONFIGS[name].image, CONFIGS[name].image
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def softmax_over(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Eq. 1 of each head."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (queries, keys, values))
    return (torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v).transpose(1, 2).flatten(2)


def oracle(attention: nn.Module, x: Tensor, kept: Tensor, size: tuple[int, int]) -> Tensor:
    """The attention's output for x [B, T, D] with the tokens `kept` [slots, D] among its keys and values."""

    def seen(own: Tensor) -> Tensor:
        return torch.cat([own, kept.expand(len(own), -1, -1)], 1)

    def reduced(convolution: nn.Module, norm: nn.Module) -> Tensor:
        return norm(convolution(x.transpose(1, 2).unflatten(2, size)).flatten(2).transpose(1, 2))

    if hasattr(attention, "qkv"):  # timm's Attention
        (wq, wk, wv), (bq, bk, bv) = attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3)
        keys, values = F.linear(seen(x), wk, bk), F.linear(seen(x), wv, bv)
        return attention.proj(softmax_over(F.linear(x, wq, bq), keys, values, attention.num_heads))
    if hasattr(attention, "kv"):  # timm's PVT v2
        own = x if attention.sr is None else reduced(attention.sr, attention.norm)
        (wk, wv), (bk, bv) = attention.kv.weight.chunk(2), attention.kv.bias.chunk(2)
        keys, values = F.linear(seen(own), wk, bk), F.linear(seen(own), wv, bv)
        return attention.proj(softmax_over(attention.q(x), keys, values, attention.num_heads))
    own = x  # Hugging Face's PVT
    if attention.sequences_reduction_ratio > 1:
        own = reduced(attention.sequence_reduction, attention.layer_norm)
    linear = {name: getattr(attention, name) for name in ("query", "key", "value")}
    q, k, v = (F.linear(seen(own) if n != "query" else x, m.weight, m.bias) for n, m in linear.items())
    return softmax_over(q, k, v, attention.num_attention_heads)


def attentions(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__ in ("PvtEfficientSelfAttention", "Attention")]


@pytest.mark.slow
@pytest.mark.parametrize("kept_images", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_softmax_over_own_and_kept_tokens(name, kept_images):
    model = build(name, kept_images)
    model(batch(name, 1))
    model.eval()
    for attention in attentions(model):
        caches = [m for m in attention.modules() if isinstance(m, TokenCache)]
        kept = caches[0].cache
        assert kept.abs().max() > 0
        assert all(torch.equal(kept, other.cache) for other in caches)
        side = 3 if name == "vit" else {8: 4, 12: 2}[kept.shape[1]]
        prefix = name == "vit" or (name == "pvt" and side == 2)
        x = torch.randn(3, side * side + prefix, kept.shape[1], dtype=torch.float64).requires_grad_()
        z = x.detach().clone().requires_grad_()
        y = attention(x) if name == "vit" else attention(x, *((side, side) if name == "pvt" else ((side, side),)))
        y = y[0] if isinstance(y, tuple) else y
        expected = oracle(attention, z, kept, (side, side))
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        upstream = torch.randn(y.shape, dtype=y.dtype)
        ours = torch.autograd.grad(y, [x, *attention.parameters()], upstream, allow_unused=True)
        right = torch.autograd.grad(expected, [z, *attention.parameters()], upstream, allow_unused=True)
        for a, b in zip(ours, right, strict=True):
            if b is None:
                assert a is None, "the oracle uses fewer parameters"
            else:
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_empty_cache_is_the_plain_model_in_values_and_gradients(name):
    plain, remembering = build(name, None), build(name, 2)
    x, z = batch(name).requires_grad_(), batch(name).requires_grad_()
    y, other = plain(x)[0], remembering(z)[0]
    torch.testing.assert_close(y, other, rtol=1e-10, atol=1e-10)
    y.square().sum().backward()
    other.square().sum().backward()
    torch.testing.assert_close(x.grad, z.grad, rtol=1e-9, atol=1e-10)
    assert (plain(x)[0] - remembering(z)[0]).abs().max() > 1e-6, "the second forward sees the first"


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_committed_once_a_forward_of_the_whole_model(name, tmp_path):
    model = build(name)
    model(batch(name, 1))
    pending = [cache.pending.clone() for cache in stored(model)]
    assert all(cache.cache.abs().max() == 0 for cache in stored(model))
    with hold_caches(model):
        model(batch(name, 2))

    def fail(*_: object) -> None:
        raise RuntimeError("half-way")

    handle = attentions(model)[-1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        model(batch(name, 3))
    handle.remove()
    model.eval()
    model(batch(name, 4))
    model.train().eval()  # what was read in evaluation is not kept
    for cache, expected in zip(stored(model), pending, strict=True):
        assert torch.equal(cache.cache, expected)
    mnemos.save(model, tmp_path)
    loaded = mnemos.load(tmp_path).double()
    torch.testing.assert_close(loaded(batch(name, 5))[0], model(batch(name, 5))[0], rtol=1e-4, atol=1e-4)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        clone.train()
        clone(batch(name, 6))
        clone.eval()
        assert not torch.equal(stored(clone)[0].cache, stored(model)[0].cache)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_nothing_is_changed():
    plain = build("pvt", None)
    for model, example, match in (
        (build("vit"), torch.zeros(1, 4, 8), "without caches"),
        (nn.TransformerEncoderLayer(8, 2, batch_first=True), torch.zeros(1, 4, 8), "found none"),
        (plain.host, torch.zeros(1, 3, 5), "example"),
    ):
        before = list(model.state_dict())
        refuses(match, cache_attention, model, AttentionCache(), example)
        assert list(model.state_dict()) == before
    assert not any(m._forward_pre_hooks for m in plain.modules())
    refuses(r"\[B, 5, 3\], found", TokenCache(1, 5, 3), torch.zeros(2, 4, 3))
    refuses(r"images=2.* found 1", TokenCache(2, 5, 3), torch.zeros(1, 5, 3))
    refuses("images", AttentionCache, 0)


# The tokens alone: what is kept, when it is committed.


def tokens(seed: int = 1, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cache() -> TokenCache:
    return TokenCache(2, 5, 3).double()


def kept(module: TokenCache) -> torch.Tensor:
    """What the next forward would see behind its own tokens."""
    with torch.no_grad(), hold_caches(module):
        return module(tokens(9))[0, 5:]


def test_the_first_images_of_the_batch_before_stand_behind_every_row():
    module = cache()
    for seed in (1, 2, 3):
        longer = module(tokens(seed))
        assert longer.shape == (4, 15, 3)
        assert torch.equal(longer[:, :5], tokens(seed))
        if seed == 1:
            assert torch.equal(longer[:, 5:], tokens(1).repeat(1, 2, 1)), "its own, while there is nothing"
        else:
            assert torch.equal(longer[:, 5:], tokens(seed - 1)[:2].flatten(0, 1).expand(4, -1, -1))


def test_micro_batches_keep_what_the_whole_batch_would():
    whole, parts = cache(), cache()
    whole(tokens(1))
    with accumulate_caches(parts):
        for part in tokens(1).split(2):
            parts(part)
    assert torch.equal(whole.eval().cache, parts.eval().cache)


def _rank(rank: int, world: int, out: str) -> None:
    module = cache()
    for seed in (1, 2):
        module(tokens(seed, 5).split([2, 3])[rank])
    torch.save(module.eval().cache, f"{out}{rank}")


@pytest.mark.slow
def test_two_processes_keep_what_one_would(tmp_path):
    processes.together(_rank, str(tmp_path / "out"))
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"out{rank}"), tokens(2, 5)[:2].flatten(0, 1))
