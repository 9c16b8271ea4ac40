"""Once a forward and never twice, in hosts: recomputation, micro-batches, evaluation, exceptions, parts alone."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from hosts import FEW, ZOO, cached, close, example, few, loss, run, tensor
from torch import nn
from torch.utils.checkpoint import checkpoint

import mnemos
from mnemos import GRC
from mnemos.memory.gated_cache import accumulate_caches, caches, hold_caches

HUGGING_FACE = [
    name if name in ("hf_vit", "hf_swin", "hf_bert", "hf_bart") else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in ZOO
    if name.startswith("hf_") and not name.startswith(("hf_pvt", "hf_reformer"))
]


# How forwards are repeated: reentrant or not, in float32, which takes the kernels on a CPU, or in float64.
HOW = [(True, torch.float32), (False, torch.float32), (False, torch.float64)]


def trained(*args, **switches) -> nn.Module:
    """A cached host in training mode."""
    return cached(*args, **switches).train()


def contents(model: nn.Module) -> list[torch.Tensor]:
    """What is stored once the last forward is committed; the model is left in training."""
    found = [branch.cache.clone() for branch in caches(model.eval())]
    model.train()
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def train_alike(models: list[nn.Module], name: str, steps: int = 3) -> None:
    """Steps of several models: equal losses, gradients and caches at each."""
    dtype = next(models[0].parameters()).dtype
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for seed in range(steps):
        losses = []
        for model in models:
            model.zero_grad()
            losses.append(loss(model, example(name, seed=seed, dtype=dtype)))
            losses[-1].backward()
        first, *others = models
        for other, value in zip(others, losses[1:], strict=True):
            close(value, losses[0], tolerance)
            for (key, a), b in zip(first.named_parameters(), other.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None), key
                if a.grad is not None:
                    torch.testing.assert_close(b.grad, a.grad, msg=lambda m, k=key: f"{k}: {m}")
            for a, b in zip(caches(first), caches(other), strict=True):
                close(b.cache, a.cache, tolerance)
                close(b.pending, a.pending, tolerance)
        for model in models:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 1e-3 * parameter.grad
    assert not same(contents(models[0]), [torch.zeros_like(c) for c in contents(models[0])])


@pytest.mark.each_value
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_gradient_checkpointing_of_hugging_face_commits_once(name, how):
    reentrant, dtype = how
    plain, checked = trained(name, dtype=dtype), trained(name, dtype=dtype)
    checked.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # such a segment needs an input that wants a gradient
        for model in (plain, checked):
            for part in model.modules():
                if type(part).__name__.endswith(("Embeddings", "ConvProjection")):
                    part.register_forward_hook(_wanting)
    counted = _count_forwards(checked)
    train_alike([plain, checked], name)
    assert counted[0] >= 2 * counted[1] > 0, "nothing was recomputed"  # Swin's stages and their layers are segments


def _wanting(module: nn.Module, args: tuple, output):
    if isinstance(output, torch.Tensor) and not output.requires_grad:
        output.requires_grad_()


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


@pytest.mark.each_value
@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["torch_encoder", "torch_padded", "timm_vit", "timm_swin", "hf_pvt", "hf_pvt2"])
def test_blocks_that_are_recomputed_commit_once(name, how, preset):
    reentrant, dtype = how
    plain, checked = trained(name, preset, dtype), trained(name, preset, dtype)
    for block in blocks(checked):
        forward = block.forward
        block.forward = functools.partial(_again, forward, reentrant)
    counted = _count_forwards(checked)
    train_alike([plain, checked], name)
    assert counted[0] == 2 * counted[1] > 0, "nothing was recomputed"


def _again(forward: Callable, reentrant: bool, *args, **kwargs):
    if not args[0].requires_grad:  # as a reentrant segment has to
        args = args[0].clone().requires_grad_(), *args[1:]
    return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["timm_vit", "hf_swin", "torch_time_first"])
def test_a_whole_model_that_is_recomputed_commits_once(name, reentrant):
    plain = trained(name)
    checked = trained(name)
    for seed in range(3):
        one = example(name, seed=seed)
        x = one.args[0].clone().requires_grad_()
        tensor(plain(one.args[0])).square().sum().backward()
        checkpoint(lambda z: tensor(checked(z)), x, use_reentrant=reentrant).square().sum().backward()
        for a, b in zip(caches(plain), caches(checked), strict=True):
            close(a.pending, b.pending)
            close(a.cache, b.cache)
    for a, b in zip(plain.parameters(), checked.parameters(), strict=True):
        close(torch.zeros(()) if a.grad is None else a.grad, torch.zeros(()) if b.grad is None else b.grad)


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


@pytest.mark.parametrize("name", FEW)
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


@pytest.mark.parametrize("name", FEW)
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
    train_alike([model, twin], name, steps=2)


def _fails(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_of_the_model_called_alone_is_a_forward_of_its_own(fails):
    model, twin = trained("timm_vit"), trained("timm_vit")
    x, other = example("timm_vit", seed=1).args[0], example("timm_vit", seed=2).args[0]
    if fails:  # a failed forward of the whole does not stand in the way
        broken = model.head.register_forward_hook(_fails)
        with pytest.raises(ZeroDivisionError):
            model(other)
        broken.remove()
    for seed in (3, 4):
        batch = example("timm_vit", seed=seed).args[0]
        close(model.forward_features(batch), twin.forward_features(batch))
    close(model.forward_features(x), twin.forward_features(x))
    caches_left = contents(model), contents(twin)
    assert same(*caches_left)
    whole = trained("timm_vit")
    for seed in (3, 4):
        whole(example("timm_vit", seed=seed).args[0])
    whole(x)
    assert same(contents(whole), caches_left[0]), "the same forwards, the same caches"
    before = contents(model)
    tokens = torch.randn(3, 17, 24, dtype=torch.float64)
    model.blocks[0](tokens)
    after = contents(model)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_layers_that_share_an_attention_share_its_cache():
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, layer).double()
    report = mnemos.cache(model, GRC(length=4))
    assert [one.name for one in report.swapped] == ["0.self_attn"]
    x = torch.randn(3, 7, 12, dtype=torch.float64)
    model(x).sum().backward()
    (branch,) = caches(model)
    assert branch.cache.abs().max() == 0
    last = branch.pending.clone()
    assert torch.equal(branch.eval().cache, last)
    mnemos.uncache(model)
    assert not caches(model)
