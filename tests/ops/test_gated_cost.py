"""The hand formula of a gated cache's cost against what torch counts while it runs."""

from collections import OrderedDict

import pytest
import torch
from kernel_cases import kept_bytes
from native_kernels import needs_kernels

import mnemos
from mnemos import GRC
from mnemos.attention import GatedCacheAttention, SoftmaxAttention
from mnemos.lab.measure.flops import count_flops
from mnemos.ops.gated_cache import cost, native
from mnemos.ops.gated_cache.cost import Shape

B, T, TM, D, HEADS = 3, 20, 7, 24, 2
SWITCHES = [
    {"preset": "paper"},
    {"preset": "mnemos"},
    {"preset": "official"},
    {"preset": "official", "convolution": False},
    {"preset": "paper", "inference": "transient"},
    {"preset": "mnemos", "inference": "frozen", "ratio": 0.25},
    {"preset": "paper", "branch": "linear"},
    {"preset": "mnemos", "branch": "linear"},
    {"preset": "paper", "convolution": True, "ratio": 1.0},
]
IDS = ["-".join(map(str, s.values())) for s in SWITCHES]


def counted(layer, x):
    """FLOPs of a forward, and of one with its backward, in the mode that the layer is in."""
    with torch.no_grad():
        if not layer.training:
            layer(x.detach())  # a frozen cache's keys and values are projected once
        forward = count_flops(lambda: layer(x.detach()))
    return forward, count_flops(lambda: layer(x)[0].sum().backward()) if layer.training else 0


def agrees(plain, cached, x, shapes):
    """What a model of these gated caches multiplies and learns more than without them."""
    (alone, alone_step), (forward, step) = counted(plain, x), counted(cached, x)
    training = sum(cost.training_macs(*both, B) for both in shapes)
    assert forward - alone == 2 * training > 0
    assert step - alone_step == 2 * (training + sum(cost.backward_macs(*both, B) for both in shapes))
    # torch's encoder layers leave their fast path in eval once they have a cache, which counts nothing of its own.
    assert counted(cached.eval(), x)[0] - alone == 2 * sum(cost.inference_macs(*both, B) for both in shapes)
    more = sum(p.numel() for p in cached.parameters()) - sum(p.numel() for p in plain.parameters())
    assert more == sum(cost.parameters(*both) for both in shapes)


@pytest.mark.each_value
@pytest.mark.parametrize("switches", SWITCHES, ids=IDS)
@pytest.mark.parametrize("length", [TM, T])
def test_the_formula_counts_what_our_own_layer_multiplies(switches, length):
    grid = (4, 5) if switches.get("convolution") is not False else None
    layer = GatedCacheAttention(D, HEADS, grc=GRC(length=length, **switches), grid=grid)
    shape = Shape(T, length, D, layer.cache_dim, HEADS, grid_tokens=0 if grid is None else 20, lifts=False)
    agrees(SoftmaxAttention(D, HEADS), layer, torch.randn(B, T, D, requires_grad=True), [(shape, layer.grc)])


def encoder():
    layer = torch.nn.TransformerEncoderLayer(D, HEADS, 32, 0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize("switches", [s for s in SWITCHES if not s.get("convolution")], ids=str)
def test_the_formula_counts_what_a_host_gains(switches):
    torch.manual_seed(0)
    plain, host = encoder(), encoder()
    x = torch.randn(B, T, D, requires_grad=True)
    report = mnemos.cache(host, GRC(length=TM, **switches), example=x)
    shapes = [(one.shape, one.grc) for one in report.swapped]
    assert [shape.tokens for shape, _ in shapes] == [T, T]
    agrees(plain, host, x, shapes)
    assert report.flops == sum(2 * cost.training_macs(*both) for both in shapes)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("preset", ["paper", "mnemos", "official", "heads"])
@pytest.mark.parametrize("name", ["vit", "pvt", "pvt2", "swin"])
def test_the_formula_counts_what_image_models_gain(name, preset):
    """Class tokens, keys reduced by convolution, windows folded in the batch, grids."""
    from mnemos.lab.vision.classifiers import PVTConfig, SwinConfig, ViTConfig

    configs = {
        "vit": ViTConfig(dim=32, depth=2),
        "pvt": PVTConfig(dims=(16, 32), depths=(1, 1)),
        "pvt2": PVTConfig(version=2, dims=(16, 32), depths=(1, 1)),
        "swin": SwinConfig(dim=16),
    }
    plain, model = configs[name].build(), configs[name].build()
    x = torch.randn(B, 3, 32, 32)
    grc = GRC(preset="paper", mix="heads") if preset == "heads" else GRC(preset=preset)
    report = mnemos.cache(model.host, grc, example=x)
    agrees(plain, model, x, [(one.shape, one.grc) for one in report.swapped])
    assert report.parameters == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in plain.parameters())


class Mixing(torch.nn.Linear):
    """Every token reads the mean of all; autograd keeps nothing more for it."""

    def forward(self, x):
        return super().forward(x) + x.mean(1, keepdim=True)


def kept(rows, length, preset="mnemos"):
    """Bytes that autograd keeps of a training forward more with a cache than without, what the formula says, shape."""
    x, host = torch.randn(rows, T, D, requires_grad=True), torch.nn.Sequential(OrderedDict(attention=Mixing(D, D)))

    def here():
        return kept_bytes(lambda: host(x), x, *host.parameters())

    alone = here()
    grc = GRC(length=length, preset=preset, convolution=False)
    (found,) = mnemos.cache(host, grc, where="attention", example=x.detach()).swapped
    return lambda: here() - alone, cost.kept_bytes(found.shape, found.grc, rows), found.shape


@pytest.mark.parametrize("preset", ["paper", "mnemos", "official"])
@pytest.mark.parametrize("length", [TM, T])
def test_what_is_kept_for_the_backward_is_what_the_formula_says(preset, length, monkeypatch):
    """Of the composition; small numbers aside, such as a norm's means and the weights that λ has scaled."""
    monkeypatch.setattr(native, "takes", lambda *_: False)
    more, formula, _ = kept(16, length, preset)
    assert 0.9 < formula / more() <= 1.0


@needs_kernels
def test_the_kernels_keep_no_more_at_large_sizes(monkeypatch):
    """Beside what the formula says only rows of whole vectors, and intermediates of at most a megabyte each."""
    more, formula, shape = kept(64, T)
    everything, few = more(), native._FEW
    monkeypatch.setattr(native, "_FEW", 0)
    assert 0.9 < more() / formula <= native._whole(shape.cache_width) / shape.cache_width
    assert everything <= more() + 2 * 4 * few
