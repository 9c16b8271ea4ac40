import math

import numpy as np
import pytest
import torch
from cached_images import PVT, SWIN, VIT, cached, layers, seen

import mnemos
from mnemos import GRC
from mnemos.lab.evaluate.branches import BranchOutputs, maps, observe_mixing, picture_grid


def test_class_tokens_are_left_out_and_other_shapes_are_no_grid():
    model = cached(VIT)
    layer = next(iter(layers(model).values()))
    outputs = BranchOutputs(*(torch.randn(2, 17, 16) for _ in range(2)))
    assert picture_grid(layer, outputs, (16, 16)) == (4, 4)
    torch.testing.assert_close(maps(layer, (4, 4), outputs)[1], outputs.o_self[:, 1:].mean(-1).view(2, 4, 4))
    other = BranchOutputs(torch.randn(2, 18, 16), torch.randn(2, 18, 16))
    assert picture_grid(layer, other, (16, 16)) == "its 17 tokens form no known grid"
    assert picture_grid(layer, BranchOutputs(*(torch.zeros(2, 13, 16),) * 2), (3, 4)) == (3, 4), "a token a pixel"


@pytest.mark.parametrize("config", [VIT, PVT, SWIN], ids=["vit", "pvt", "swin"])
@pytest.mark.parametrize("preset", ["paper", "official", "mnemos"])
def test_recorded_branches_are_those_that_are_mixed(config, preset):
    model = cached(config, preset=preset, convolution=False)
    x = torch.randn(2, 3, 16, 16)
    outputs = {}
    for name, layer in layers(model).items():
        layer.register_forward_hook(lambda _, args, y, name=name: outputs.__setitem__(name, (args, y)))
    found = seen(model, x)
    assert list(found) == list(layers(model))
    for name, layer in layers(model).items():
        (_, y, *_), mixed = outputs[name]
        share = torch.sigmoid(layer.mix).repeat_interleave(y.shape[-1] // layer.num_heads)
        torch.testing.assert_close(found[name].o_self, y)
        torch.testing.assert_close(share * found[name].o_mem + (1 - share) * y, mixed)
        assert layer.observer is None


def test_recorded_branches_of_a_layer_of_ours():
    torch.manual_seed(0)
    for preset in ("paper", "official", "mnemos"):
        layer = mnemos.attention.GatedCacheAttention(12, 2, grc=GRC(length=5, preset=preset, convolution=False)).train()
        for _ in range(2):
            layer(torch.randn(3, 7, 12))
        layer.eval()
        x, found = torch.randn(2, 7, 12), []
        with torch.no_grad(), observe_mixing(layer, lambda *both, found=found: found.append(BranchOutputs(*both))):
            y, _ = layer(x)
            (one,) = found
            share = torch.sigmoid(layer.mix).repeat_interleave(6)
            mixed = share * one.o_mem + (1 - share) * one.o_self
            torch.testing.assert_close(layer.project(mixed.unflatten(-1, (2, 6))), y)
            torch.testing.assert_close(
                layer.inner(x)[0],
                one.o_self if preset == "official" else layer.inner.project(one.o_self.unflatten(-1, (2, 6))),
            )
        layer(x)
        assert len(found) == 1, "it is no longer observed"
        assert not layer.map("query")._forward_hooks


def test_numbers_of_maps():
    model = cached(VIT)
    layer = next(iter(layers(model).values()))
    torch.manual_seed(1)
    o_self = torch.randn(5, 17, 16)
    # The same image for every picture, and against o_self in each.
    o_mem = torch.randn(1, 17, 16).expand(5, -1, -1)
    with torch.no_grad():
        numbers, own, memory = maps(layer, (4, 4), BranchOutputs(o_self, o_mem))
    torch.testing.assert_close(own, o_self[:, 1:].mean(-1).view(5, 4, 4))
    assert numbers.memory_own == pytest.approx(0, abs=1e-6)
    within, common = own.var(0).mean(), own.mean(0).var() - own.var(0).mean() / 5
    assert numbers.self_own == pytest.approx(float(within / (within + common.clamp(min=0))))
    expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(own.flatten(1), memory.flatten(1), strict=True)]
    assert list(numbers.correlation) == np.round(expected, 4).tolist()
    share = torch.sigmoid(layer.mix.detach()).repeat_interleave(8)
    sizes = [float((s * o).square().mean().sqrt()) for s, o in ((share, o_mem), (1 - share, o_self))]
    assert numbers.weight == pytest.approx(sizes[0] / sum(sizes))
    # As much of its own as all have in common.
    o_mem = (torch.randn(1, 1601, 1) + torch.randn(3, 1601, 1)).expand(-1, -1, 16)
    assert maps(layer, (40, 40), BranchOutputs(o_mem, o_mem))[0].memory_own == pytest.approx(0.5, abs=0.04)
    against = maps(layer, (4, 4), BranchOutputs(o_self, -2 * o_self))[0]
    assert against.correlation == pytest.approx((-1,) * 5)
    none = maps(layer, (113, 1), BranchOutputs(*(torch.zeros(1, 114, 16),) * 2))
    assert (none[0].weight, none[1].shape) == (0, (1, 56, 1))
    two = maps(layer, (4, 4), BranchOutputs(o_self[:2], o_self[:1].expand(2, -1, -1) * 0))[0]
    assert [none[0].self_own, two.memory_own] == pytest.approx([math.nan] * 2, nan_ok=True)
    assert 0 < two.self_own <= 1
    # Large maps are averaged down.
    o = torch.arange(-1.0, 112 * 56).view(1, -1, 1).expand(2, -1, 16)
    with torch.no_grad():
        found = maps(layer, (112, 56), BranchOutputs(o, -o))
    squares = o[0, 1:, 0].view(56, 2, 28, 2).mean((1, 3))
    for one, expected in zip(found[1:], (squares, -squares), strict=True):
        torch.testing.assert_close(one, expected.expand(2, -1, -1))
