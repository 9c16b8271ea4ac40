"""Forwards that a backward repeats after other forwards have promoted: each reads what it read the first time."""

import copy
import functools
import gc
from collections.abc import Callable

import pytest
import torch
from hosts import cached, close, example, open_caches, tensor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
from mnemos.attention import GatedCacheAttention
from mnemos.lab.vision.attention_cache import TokenCache
from mnemos.memory.gated_cache import caches


def trained(*args, **switches) -> nn.Module:
    """A cached host in training mode."""
    return cached(*args, **switches).train()


def repeated(forward: Callable, reentrant: bool, *args, **kwargs):
    if reentrant and not args[0].requires_grad:
        args = args[0].clone().requires_grad_(), *args[1:]
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)


def each_block(model: nn.Module, reentrant: bool) -> None:
    for block in model.blocks:
        block.forward = functools.partial(repeated, block.forward, reentrant)


def blocks_in_a_block(model: nn.Module, reentrant: bool) -> None:
    each_block(model, reentrant)
    model.blocks.forward = functools.partial(repeated, model.blocks.forward, reentrant)


def whole(model: nn.Module, reentrant: bool) -> None:
    model.forward_features = functools.partial(repeated, model.forward_features, reentrant)


def contrast(model: nn.Module, forward: Callable, number: int) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of one backward through several forwards, and the caches after two steps of that."""
    for start in (0, 10):
        model.zero_grad()
        found = [forward(model, start + seed) for seed in range(number)]
        sum((seed + 1) * one.square().sum() for seed, one in enumerate(found)).backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return gradients, [branch.cache.clone() for branch in caches(model.eval())]


def compare(model: nn.Module, other: nn.Module, forward: Callable, number: int = 2) -> None:
    tolerance = 1e-10 if next(model.parameters()).dtype == torch.float64 else 1e-5
    for a, b in zip(contrast(model, forward, number), contrast(other, forward, number), strict=True):
        for x, y in zip(a, b, strict=True):
            close(y, x, tolerance)


def pictures(model: nn.Module, seed: int) -> Tensor:
    return example("timm_vit", seed=seed, dtype=next(model.parameters()).dtype).args[0]


def images(model: nn.Module, seed: int) -> Tensor:
    return model(pictures(model, seed))


def features(model: nn.Module, seed: int) -> Tensor:
    """A part of the model, whose branches begin forwards of their own."""
    return model.forward_features(pictures(model, seed))


@pytest.mark.each_value
@pytest.mark.parametrize("forward", [images, features])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # float32 takes the kernels
@pytest.mark.parametrize("how", [each_block, whole, blocks_in_a_block])
@pytest.mark.parametrize("preset", ["mnemos", "paper"])
def test_several_forwards_before_one_backward(preset, how, reentrant, forward, dtype):
    model, other = trained("timm_vit", preset, dtype), trained("timm_vit", preset, dtype)
    how(other, reentrant)
    compare(model, other, forward, number=3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_shared(reentrant):
    """Its cache is read several times by a forward."""
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True).double()
    model = nn.ModuleList([layer, layer])
    mnemos.cache(layer, GRC(length=4))
    open_caches(layer)
    start = {name: value.clone() for name, value in layer.state_dict().items()}

    def forward(model: nn.Module, seed: int, how: Callable) -> Tensor:
        x = torch.randn(3, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        x.requires_grad_()
        for each in model:
            x = how(each, x)
        return x

    again = functools.partial(checkpoint, use_reentrant=reentrant)
    expected = contrast(model.train(), functools.partial(forward, how=lambda each, x: each(x)), 2)
    layer.load_state_dict(start)
    found = contrast(model.train(), functools.partial(forward, how=lambda each, x: again(each, x)), 2)
    for a, b in zip(expected, found, strict=True):
        for x, y in zip(a, b, strict=True):
            close(y, x)


def test_reversible_layers():
    """They are repeated by their own backward. The gradients of two forwards equal those of each alone."""
    grads = []
    for together in (True, False):
        model = trained("hf_reformer")
        losses = []
        for seed in (1, 2):
            torch.manual_seed(0)
            losses.append(tensor(model(**example("hf_reformer", seed=seed).kwargs)).square().sum())
            if not together:
                losses.pop().backward()
        for one in losses:
            one.backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scope", ["shared", "stream"])
def test_an_attention_of_this_library(scope, dtype):
    torch.manual_seed(0)
    layer = GatedCacheAttention(12, 2, grc=GRC(length=4, scope=scope, block=3), causal=scope == "stream").to(dtype)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 3, 7, 12, dtype=dtype)
    compare(layer, other, lambda m, i: m(x[i % 4])[0] if m is layer else repeated(lambda z: m(z)[0], False, x[i % 4]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_stored_tokens(reentrant):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    grads = []
    for again in (False, True):
        torch.manual_seed(0)
        cache, linear = TokenCache(2, 5, 8).double(), nn.Linear(8, 8).double()

        def run(z: Tensor, cache: nn.Module = cache, linear: nn.Module = linear) -> Tensor:
            return linear(cache(z).square())

        found = [repeated(run, reentrant, z) if again else run(z) for z in x]
        sum(one.square().sum() for one in found).backward()
        grads.append(linear.weight.grad)
    close(grads[1], grads[0])


def test_nothing_is_kept_without_checkpointing():
    model = trained("timm_vit")
    for seed in range(3):
        images(model, seed).sum().backward()
    assert not any(branch.reads._kept for branch in caches(model))
    each_block(model, False)
    for seed in range(3):
        images(model, seed).sum().backward()
    gc.collect()
    assert [len(branch.reads._kept) for branch in caches(model)] == [1, 1]
