import numpy as np
import pytest
import torch
from cached_images import PVT, SWIN, VIT, cached, layers, seen

import mnemos
from mnemos import GRC
from mnemos.lab.evaluate.branches import BranchOutputs, TokenPositions, maps, observe_branches, token_positions
from mnemos.libraries import timm, transformers


def swin(library, image, window):
    """The host, and the name of its norms before attention."""
    if library == "timm":
        timm()
        from timm.models.swin_transformer import SwinTransformer

        sizes = {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
        return SwinTransformer(image, 2, 3, 3, window_size=window, **sizes).eval(), "norm1"
    transformers()
    from transformers import SwinConfig as Config
    from transformers import SwinForImageClassification

    sizes = {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "num_labels": 3}
    config = Config(image_size=image, window_size=window, **sizes)
    return SwinForImageClassification(config).eval(), "layernorm_before"


@pytest.mark.parametrize(
    ("library", "image", "window"),
    [
        ("timm", (16, 16), 4),
        ("timm", (24, 24), 5),
        ("timm", (8, 8), 4),
        ("timm", (16, 32), 4),
        ("transformers", (24, 24), 5),
    ],
)
def test_windows_are_put_back_where_the_host_cut_them(library, image, window):
    torch.manual_seed(0)
    model, norm = swin(library, image, window)
    mnemos.cache(model, GRC())
    before = {}
    for name, block in model.named_modules():
        if hasattr(block, norm):
            keep = lambda _, args, y, name=name: before.__setitem__(name, y.detach().flatten(1, -2))  # noqa: E731
            getattr(block, norm).register_forward_hook(keep)
    inputs = {}
    for name, layer in layers(model).items():
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.__setitem__(name, args[0]))
    b = 3
    with torch.no_grad():
        model(torch.randn(b, 3, *image))
    assert len(before) == len(inputs) == 4
    padded = 0
    for (name, x), whole in zip(inputs.items(), before.values(), strict=True):
        found = token_positions(model, name, layers(model)[name], x.shape[0] // b, x.shape[1], image)
        assert isinstance(found, TokenPositions), found
        index = found.index
        expected = torch.where((index >= 0)[..., None], whole[:, index.clamp(min=0)], torch.zeros(()))
        torch.testing.assert_close(x.unflatten(0, (b, -1)), expected)
        torch.testing.assert_close(found.unfolded(x[..., 0]).flatten(1), whole[..., 0])
        padded += int((index < 0).sum())
    assert (padded > 0) == (window == 5), "the odd window was to be one that needs padding"


def test_class_tokens_are_left_out_and_other_shapes_are_no_grid():
    model = cached(VIT)
    name, layer = next(iter(layers(model).items()))
    found = token_positions(model, name, layer, 1, 17, (16, 16))
    assert (found.grid, found.prefix) == ((4, 4), 1)
    values = torch.arange(2 * 17.0).view(2, 17)
    torch.testing.assert_close(found.unfolded(values), values[:, 1:].view(2, 4, 4))
    assert token_positions(model, name, layer, 1, 18, (16, 16)).startswith("its 17 tokens")
    assert "windows" in token_positions(model, name, layer, 4, 5, (16, 16))


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
        x, found = torch.randn(2, 7, 12), {}
        with torch.no_grad(), observe_branches({"it": layer}, found.__setitem__):
            y, _ = layer(x)
            one = found["it"]
            share = torch.sigmoid(layer.mix).repeat_interleave(6)
            mixed = share * one.o_mem + (1 - share) * one.o_self
            torch.testing.assert_close(layer.project(mixed.unflatten(-1, (2, 6))), y)
            torch.testing.assert_close(
                layer.inner(x)[0],
                one.o_self if preset == "official" else layer.inner.project(one.o_self.unflatten(-1, (2, 6))),
            )


def test_numbers_of_maps():
    model = cached(VIT)
    layer = next(iter(layers(model).values()))
    place = TokenPositions((4, 4), 1, torch.arange(16)[None])
    torch.manual_seed(1)
    o_self = torch.randn(5, 17, 16)
    # The same image for every picture, and against o_self in each.
    o_mem = torch.randn(1, 17, 16).expand(5, -1, -1)
    with torch.no_grad():
        numbers, own, memory = maps(layer, place, BranchOutputs(o_self, o_mem))
    torch.testing.assert_close(own, o_self[:, 1:].mean(-1).view(5, 4, 4))
    assert numbers.memory_own == pytest.approx(0, abs=1e-6)
    assert numbers.self_own > 0.8
    expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(own.flatten(1), memory.flatten(1), strict=True)]
    assert list(numbers.correlation) == pytest.approx(expected, abs=1e-4)
    share = torch.sigmoid(layer.mix.detach()).repeat_interleave(8)
    sizes = [float((s * o).square().mean().sqrt()) for s, o in ((share, o_mem), (1 - share, o_self))]
    assert numbers.weight == pytest.approx(sizes[0] / sum(sizes))
    # As much of its own as all have in common.
    wide = TokenPositions((40, 40), 0, torch.arange(1600)[None])
    o_mem = (torch.randn(1, 1600, 1) + torch.randn(3, 1600, 1)).expand(-1, -1, 16)
    assert maps(layer, wide, BranchOutputs(o_mem, o_mem))[0].memory_own == pytest.approx(0.5, abs=0.04)
    against = maps(layer, place, BranchOutputs(o_self, -2 * o_self))[0]
    assert against.correlation == pytest.approx((-1,) * 5)
    # Large maps are averaged down.
    o = torch.arange(112 * 56.0).view(1, 112 * 56, 1).expand(2, -1, 16)
    with torch.no_grad():
        found = maps(layer, TokenPositions((112, 56), 0, torch.arange(112 * 56)[None]), BranchOutputs(o, -o))
    squares = o[0, :, 0].view(56, 2, 28, 2).mean((1, 3))
    for one, expected in zip(found[1:], (squares, -squares), strict=True):
        torch.testing.assert_close(one, expected.expand(2, -1, -1))
