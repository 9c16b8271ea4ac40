"""Once a forward and never twice, in hosts: recomputation, micro-batches, evaluation, exceptions, parts alone.

A forward that a backward repeats after others have promoted reads what it read the first time.
"""

import copy
import functools
import gc
from collections.abc import Callable

import pytest
import torch
from hosts import cached, close, example, loss, normal, open_caches, run, tensor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
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
    for a, b, c in zip(contents(parts), contents(whole), contents(several), strict=True):
        close(a, b)
        assert not torch.allclose(b, c), "each micro-batch by itself is an update"


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
    other = copy.deepcopy(model)

    def forward(each: nn.Module, seed: int) -> Tensor:
        x = normal(seed, 3, 7, 12).double().requires_grad_()
        for part in each:
            x = part(x) if each is model else checkpoint(part, x, use_reentrant=reentrant)
        return x

    compare(model, other, forward)
    mnemos.uncache(model)
    assert not caches(model)


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
