"""Once a forward and never twice, in hosts: recomputation, micro-batches, evaluation, exceptions, parts alone.

A forward that a backward repeats after others have promoted reads what it read the first time.
"""

import copy
import functools
import gc
from collections.abc import Callable

import pytest
import torch
from hosts import ZOO, cached, close, example, few, loss, open_caches, run, tensor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
from mnemos.attention import GatedCacheAttention
from mnemos.memory.gated_cache import accumulate_caches, caches, hold_caches

# How forwards are repeated: reentrant or not, in float32, which takes the kernels on a CPU, or in float64.
HOW = [(True, torch.float32), (False, torch.float32), (False, torch.float64)]


def trained(*args, **switches) -> nn.Module:
    """A cached host in training mode."""
    return cached(*args, **switches).train()


def repeated(forward: Callable, reentrant: bool, *args, **kwargs):
    if reentrant and not args[0].requires_grad:  # such a segment needs an input that wants a gradient
        args = args[0].clone().requires_grad_(), *args[1:]
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)


def contents(model: nn.Module) -> list[torch.Tensor]:
    """What is stored once the last forward is committed; the model is left in training."""
    found = [branch.cache.clone() for branch in caches(model.eval())]
    model.train()
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def contrast(model: nn.Module, forward: Callable, number: int) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of one backward through several forwards, and the caches after two steps of that."""
    for start in (0, 10):
        model.zero_grad()
        found = [forward(model, start + seed) for seed in range(number)]
        sum((seed + 1) * one.square().sum() for seed, one in enumerate(found)).backward()
    gradients = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    return gradients, contents(model)


def compare(model: nn.Module, other: nn.Module, forward: Callable, number: int = 2) -> None:
    tolerance = 1e-10 if next(model.parameters()).dtype == torch.float64 else 1e-5
    for a, b in zip(contrast(model, forward, number), contrast(other, forward, number), strict=True):
        for x, y in zip(a, b, strict=True):
            close(y, x, tolerance)


def reads(name: str) -> Callable:
    """A forward of a batch of a host by its number."""
    return lambda model, seed: run(model, example(name, seed=seed, dtype=next(model.parameters()).dtype))


def _count_forwards(model: nn.Module) -> list[int]:
    """Calls of its branches; and those outside of a backward."""
    counts = [0, 0]

    def count(*_: object) -> None:
        counts[0] += 1
        counts[1] += torch._C._current_graph_task_id() == -1

    for branch in caches(model):
        branch.register_forward_pre_hook(count)
    return counts


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that hold one attention with its cache, one above it."""
    names = [name.rpartition(".grc")[0] for name, m in model.named_modules() if m in caches(model)]
    return [model.get_submodule(name.rpartition(".")[0]) for name in names]


def repeat_blocks(model: nn.Module, reentrant: bool) -> None:
    for block in blocks(model):
        block.forward = functools.partial(repeated, block.forward, reentrant)


class Whole(nn.Module):
    """A model that is recomputed as one segment, around its call."""

    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, *args, **kwargs) -> Tensor:
        return repeated(lambda *args, **kwargs: tensor(self.model(*args, **kwargs)), self.reentrant, *args, **kwargs)


class Features(nn.Module):
    """A part of a model, whose branches begin forwards of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.forward_features(x)


@pytest.mark.each_value
@pytest.mark.parametrize("number", [1, 3])  # of forwards before a backward
@pytest.mark.parametrize("segments", ["blocks", "whole", "blocks in a whole"])
@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "name", ["torch_time_first", "torch_padded", "timm_vit", "features", "timm_swin", "hf_pvt", "hf_swin"]
)
def test_segments_that_are_recomputed_commit_once(name, how, preset, segments, number):
    reentrant, dtype = how
    host = "timm_vit" if name == "features" else name
    plain, checked = (trained(host, preset, dtype) for _ in range(2))
    if name == "features":
        plain, checked = Features(plain), Features(checked)
    if "blocks" in segments:
        repeat_blocks(checked, reentrant)
    if "whole" in segments:
        checked = Whole(checked, reentrant)
    counted = _count_forwards(checked)
    compare(plain, checked, reads(host), number)
    assert all(branch.cache.any() for branch in caches(plain))
    assert counted[0] >= 2 * counted[1] > 0, "nothing was recomputed"
    assert segments == "blocks in a whole" or counted[0] == 2 * counted[1], "a block in both is recomputed more often"


@pytest.mark.parametrize("preset", ["paper", "mnemos"])
def test_reversible_layers_commit_once(preset):
    model = trained("hf_reformer", preset)
    counted = _count_forwards(model)
    stored = [branch.cache.clone() for branch in caches(model)]
    loss(model, example("hf_reformer")).backward()
    assert counted == [4, 2], "a reversible layer runs again in the backward"
    assert same([branch.cache for branch in caches(model)], stored)
    expected = [branch.pending.clone() for branch in caches(model)]
    assert same(contents(model), expected)
    # The gradient is that of the function itself: by differences, along one direction.
    generator = torch.Generator().manual_seed(3)
    branch = caches(model)[1]
    moved = [(p, torch.randn(p.shape, generator=generator, dtype=p.dtype)) for p in branch.parameters()]
    with hold_caches(model):
        model.zero_grad()
        loss(model, example("hf_reformer")).backward()
        slope = sum((p.grad * step).sum() for p, step in moved)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, step in moved:
                    p += sign * 1e-5 * step
                values.append(loss(model, example("hf_reformer")))
                for p, step in moved:
                    p -= sign * 1e-5 * step
    torch.testing.assert_close(slope, (values[0] - values[1]) / 2e-5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["timm_vit", "hf_reformer"])  # a forward, and layers that run again
def test_micro_batches_are_as_many_updates_or_one(name):
    whole, parts, several = trained(name), trained(name), trained(name)
    batch = example(name, rows=6)
    pieces = [batch.rows(0, 1), batch.rows(1, 4), batch.rows(4, 6)]
    loss(whole, batch).backward()
    with accumulate_caches(parts):
        for piece in pieces:
            loss(parts, piece).backward()
    for piece in pieces:
        loss(several, piece)
    for key, value in whole.named_parameters():
        if value.grad is not None:
            torch.testing.assert_close(parts.get_parameter(key).grad, value.grad, msg=key)
    updates = [torch.stack(contents(several)[:1]), torch.stack(contents(whole)[:1])]
    for a, b in zip(contents(parts), contents(whole), strict=True):
        close(a, b)
    assert not torch.allclose(*updates)
    twin = trained(name)
    for piece in pieces:
        loss(twin, piece)
        promoted = [branch.pending.clone() for branch in caches(twin)]
        assert same(contents(twin), promoted)
    assert same(contents(several), contents(twin)), "k micro-batches are k updates"


@pytest.mark.each_value
@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
@pytest.mark.parametrize("name", few(ZOO))
def test_evaluation_and_probes_write_nothing(name, preset):
    model = trained(name, preset, length=3)
    loss(model, example(name, seed=1)).backward()
    stored = contents(model)
    model.eval()
    for mode in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:
            run(model, example(name, seed=4))
    model.train()
    with hold_caches(model):
        loss(model, example(name, seed=5)).backward()
    assert same(contents(model), stored)
    run(model, example(name, seed=6))
    assert same([branch.cache for branch in caches(model)], stored), "the forward itself commits nothing"
    assert not same(contents(model), stored)


@pytest.mark.parametrize("name", ["timm_vit", "hf_reformer"])  # a forward, and layers that run again
def test_a_forward_that_fails_half_way_commits_nothing_and_the_next_is_right(name):
    model, twin = trained(name), trained(name)
    for each in (model, twin):
        loss(each, example(name, seed=1))
    last = caches(model)[-1]
    for broken in (last.register_forward_pre_hook(_fails), last.register_forward_hook(_fails)):
        with pytest.raises(ZeroDivisionError):
            run(model, example(name, seed=2))
        broken.remove()
    assert same(contents(copy.deepcopy(model)), contents(copy.deepcopy(twin)))
    compare(model, twin, reads(name), 1)


def _fails(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_of_the_model_called_alone_is_a_forward_of_its_own(fails):
    model, whole = trained("timm_vit"), trained("timm_vit")
    if fails:  # a failed forward of the whole does not stand in the way
        broken = model.head.register_forward_hook(_fails)
        with pytest.raises(ZeroDivisionError):
            reads("timm_vit")(model, 2)
        broken.remove()
    for seed in (3, 4, 1):
        batch = example("timm_vit", seed=seed).args[0]
        close(model.forward_head(model.forward_features(batch)), whole(batch))
    before = contents(model)
    assert same(before, contents(whole)), "the same forwards, the same caches"
    model.blocks[0](torch.randn(3, 17, 24, dtype=torch.float64))
    after = contents(model)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_shared(reentrant):
    """Its cache is read several times by a forward."""
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True).double()
    model = nn.ModuleList([layer, layer])
    assert [one.name for one in mnemos.cache(model, GRC(length=4)).swapped] == ["0.self_attn"]
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
    mnemos.uncache(model)
    assert not caches(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scope", ["shared", "stream"])
def test_an_attention_of_this_library(scope, dtype):
    torch.manual_seed(0)
    layer = GatedCacheAttention(12, 2, grc=GRC(length=4, scope=scope, block=3), causal=scope == "stream").to(dtype)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 3, 7, 12, dtype=dtype)
    compare(layer, other, lambda m, i: m(x[i % 4])[0] if m is layer else repeated(lambda z: m(z)[0], False, x[i % 4]))


def test_nothing_is_kept_without_checkpointing():
    model = trained("timm_vit")
    for seed in range(3):
        reads("timm_vit")(model, seed).sum().backward()
    assert not any(branch.reads._kept for branch in caches(model))
    repeat_blocks(model, False)
    for seed in range(3):
        reads("timm_vit")(model, seed).sum().backward()
    gc.collect()
    assert [len(branch.reads._kept) for branch in caches(model)] == [1, 1]
