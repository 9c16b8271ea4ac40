"""Image models: the published sizes, the hosts' own outputs, small images, what is refused."""

import dataclasses
import json

import pytest
import torch
from refusals import refuses

import mnemos
from mnemos import GRC, libraries
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.lab.vision.classifiers import ImageConfig, PVTConfig, SwinConfig, ViTConfig
from mnemos.lab.vision.hosted import HostedClassifierConfig, Scaled
from mnemos.memory.gated_cache import caches, stored

NET = {"image": 224, "classes": 1000}
PYRAMID = {"dims": (64, 128, 320, 512), "num_heads": (1, 2, 5, 8), "mlp_ratios": (8, 8, 4, 4), **NET}
PYRAMID |= {"reductions": (8, 4, 2, 1)}
VIT_S = ViTConfig(patch=16, dim=384, depth=12, num_heads=6, mlp_ratio=4.0, **NET)
SWIN_T = SwinConfig(patch=4, window=7, dim=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), mlp_ratio=4.0, **NET)
PVT_TINY = PVTConfig(depths=(2, 2, 2, 2), **PYRAMID)
PVT2_B2 = PVTConfig(version=2, depths=(3, 4, 6, 3), **PYRAMID)

THREE = {"dims": (4, 8, 12), "num_heads": (1, 2, 3), "reductions": (4, 2, 1)}
FOUR = {"dims": (4, 8, 12, 16), "num_heads": (1, 2, 3, 4), "reductions": (8, 4, 2, 1)}
# Small enough for tests, at the sizes of the data that two cores can train on.
SMALL = {
    "digits": ViTConfig(image=8, channels=1, patch=2, dim=12, depth=2, num_heads=2),
    "mnist": ViTConfig(image=28, channels=1, patch=7, dim=12, depth=2, num_heads=2, pool="mean"),
    "cifar": ViTConfig(image=32, patch=4, dim=12, depth=2, num_heads=2, dropout=0.1, drop_path=0.1),
    "pvt-3": PVTConfig(depths=(1,) * 3, mlp_ratios=(2,) * 3, **THREE),
    "pvt-4": PVTConfig(image=64, depths=(1,) * 4, mlp_ratios=(2,) * 4, **FOUR),
    "pvt2": PVTConfig(version=2, dims=(8, 12), depths=(1, 2), num_heads=(1, 2)),
    "pvt-patch-2": PVTConfig(image=28, channels=1, patch=2, dims=(8, 12), depths=(1, 1), num_heads=(1, 2)),
    "pvt2-patch-2": PVTConfig(image=8, channels=1, version=2, patch=2, dims=(8, 12), depths=(1, 1), num_heads=(1, 2)),
    "swin": SwinConfig(dim=8, depths=(2, 2), num_heads=(2, 4)),
    "swin-3": SwinConfig(image=64, patch=4, window=4, dim=8, depths=(2, 1, 1), num_heads=(1, 2, 4)),
}


def images(config: ImageConfig, rows: int = 3, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, config.channels, config.image, config.image, generator=generator)


def build(config: ImageConfig, **fields: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return dataclasses.replace(config, **fields).build()


def library_model(name, **sizes):
    if name != "pvt":
        return libraries.timm().create_model(name, **sizes)
    found = libraries.transformers()
    return found.PvtForImageClassification(found.PvtConfig(**sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "widths", "small", "depths"),
    [
        (VIT_S, "vit_small_patch16_224", ("dim", "embed_dim"), 48, {"depth": 2}),
        (PVT_TINY, "pvt", ("dims", "hidden_sizes"), (8, 16, 40, 64), {"depths": (1, 1, 1, 1)}),
        (PVT2_B2, "pvt_v2_b2", ("dims", "embed_dims"), (8, 16, 40, 64), {"depths": (1, 1, 1, 1)}),
        (SWIN_T, "swin_tiny_patch4_window7_224", ("dim", "embed_dim"), 24, {"depths": (2, 1, 1, 1)}),
    ],
    ids=["vit", "pvt", "pvt2", "swin"],
)
def test_the_named_model_of_a_library_has_the_same_weights_and_outputs(config, name, widths, small, depths):
    """Of the whole the names and shapes of the weights; outputs of a narrow one with fewer layers."""
    with torch.device("meta"):
        whole = library_model(name), build(config).host
    shapes = [{name: x.shape for name, x in model.state_dict().items()} for model in whole]
    assert shapes[0] == shapes[1]
    ours, theirs = ({field: small, **depths} for field in widths)
    other, ours = library_model(name, **theirs).eval(), build(config, **ours).eval()
    ours.host.load_state_dict(other.state_dict(), strict=True)
    x = images(config, 1)
    with torch.no_grad():
        found = other(x)
        torch.testing.assert_close(ours(x)[0], getattr(found, "logits", found), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("preset", [None, "paper", "official", "mnemos"])
def test_small_images_with_and_without_a_cache(name, preset, tmp_path):
    config = dataclasses.replace(SMALL[name], cache=GRC(preset=preset) if preset else None)
    model = build(config)
    x = images(config)
    logits, state = model(x)
    assert logits.shape == (3, config.classes)
    assert state is None
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    mnemos.save(model, tmp_path)
    loaded = mnemos.load(tmp_path)
    assert loaded.config == config
    torch.testing.assert_close(loaded(x)[0], model.eval()(x)[0], rtol=0, atol=0)
    if preset:
        assert all(cache.cache.abs().max() > 0 for cache in caches(loaded))


SLOTS = {"digits": [16] * 2, "mnist": [16] * 2, "cifar": [64] * 2, "pvt-3": [4] * 3, "pvt-4": [4] * 4, "pvt2": [16] * 3}
SLOTS |= {"pvt-patch-2": [49, 49], "pvt2-patch-2": [4, 4], "swin": [16] * 4, "swin-3": [16] * 4}


@pytest.mark.parametrize("name", SMALL)
def test_every_attention_has_a_cache_as_long_as_the_keys_and_a_closed_gate_is_the_plain_model(name):
    config = SMALL[name]
    plain, cached = build(config).eval(), build(config, cache=GRC(gate_init=-100.0)).eval()
    cached.host.load_state_dict(plain.host.state_dict(), strict=True)
    assert [cache.cache.shape[0] for cache in caches(cached)] == SLOTS[name]
    with torch.no_grad():
        torch.testing.assert_close(cached(images(config))[0], plain(images(config))[0])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ViTConfig(image=30), "a multiple of 4, found image 30"),
        (ViTConfig(dim=10), "dim must be divisible by num_heads"),
        (ViTConfig(drop_path=1.0), "drop_path"),
        (ViTConfig(drop_path=-0.1), "drop_path"),
        (PVTConfig(depths=(2,)), "depths"),
        (PVTConfig(image=36), "a multiple of 8, found image 36"),
        (PVTConfig(reductions=(3, 1)), r"reductions: .* found \(3, 1\)"),
        (PVTConfig(reductions=(2, 2)), "reductions: .*2, 2"),
        (SwinConfig(window=0), "window"),
        (SwinConfig(image=31), "a multiple of 2, found image 31"),
        (SwinConfig(cache=AttentionCache()), "expected an attention of timm"),
        (ViTConfig(cache=GRC(scope="stream")), "scope"),
    ],
)
def test_impossible_sizes_are_one_line(config, words):
    refuses(words, config.build)


LEAST = [
    ViTConfig(image=1, channels=1, classes=1, patch=1, dim=2, depth=1, num_heads=1, mlp_ratio=0.5),
    SwinConfig(image=1, channels=1, classes=1, patch=1, window=1, dim=2, depths=(1,), num_heads=(1,), mlp_ratio=0.5),
    PVTConfig(2, 1, 1, patch=2, dims=(2,), depths=(1,), num_heads=(1,), mlp_ratios=(1,), reductions=(1,)),
]


@pytest.mark.parametrize("config", LEAST, ids=lambda config: config.name)
def test_the_least_sizes(config):
    assert build(config)(images(config))[0].shape == (3, config.classes)
    for name in {"image", "channels", "classes", "patch", "window", "depth", "mlp_ratio"} & vars(config).keys():
        less = 0.49 if name == "mlp_ratio" else getattr(config, name) - 1
        refuses(name, build, config, **{name: less})
    assert build(config, drop_path=0.9)


def test_other_images_are_refused():
    model, x = build(SMALL["cifar"]), images(SMALL["cifar"])
    for other in (x[:, :1], x[..., :28], x[0], x.long()):
        refuses("expected images", model, other)
    for more in ({"state": x}, {"mask": x[:, 0, 0] > 0}):
        refuses("expected no state and no mask", model, x, **more)
    for read in ("mean", "sample"):
        assert build(SMALL["digits"], cache=GRC(read=read)).rows_independent == (read == "sample")


@pytest.mark.parametrize("version", [1, 2])
def test_features_are_those_of_the_classifier_for_images_of_any_size(version):
    config = PVTConfig(version=version, image=16, dims=(4, 8), depths=(1, 1), num_heads=(1, 2), cache=GRC(length=4))
    classifier = build(config).eval()
    for cache in caches(classifier):
        cache.cache.fill_(3.0)
        cache.mix.data.fill_(-torch.inf)
    features = config.features().eval()
    mnemos.cache(features, config.cache, example=images(config, 1))
    weights = features.classifier_weights(classifier.state_dict())
    assert weights.keys() == features.classifier_weights(classifier.host.state_dict()).keys()
    found = features.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    assert [name.rpartition(".")[2] for name in found.missing_keys] == ["cache"] * 2, "they start empty"
    assert features.channels == [4, 8]
    x, seen = images(config), []
    stages = classifier.host.stages if version == 2 else [one[-1] for one in classifier.host.pvt.encoder.block]
    for stage in stages:
        stage.register_forward_hook(lambda _, args, y: seen.append(y if version == 2 else y[0].mT))
    with torch.no_grad():
        classifier(x)
        maps, wide = features(x), features(torch.cat([x, x], 3))
    torch.testing.assert_close(maps[0], seen[0].view(3, 4, 4, 4))
    if version == 2:
        torch.testing.assert_close(maps[1], seen[1])
    else:  # the classifier has a class token in the last stage, with the first position
        own, theirs = (one.patch_embeddings[-1] for one in (features.encoder, classifier.host.pvt.encoder))
        assert torch.equal(own.position_embeddings, theirs.position_embeddings[:, 1:])
    assert [one.shape for one in wide] == [(3, 4, 4, 8), (3, 8, 2, 4)]


def test_a_host_reads_images_of_its_own_size_and_channels():
    host, x = Scaled(torch.nn.Identity(), 3, (4, 6)), torch.rand(2, 1, 8, 6)
    for shown, smaller in ((x, True), (x[..., :3, :6], False)):
        expected = torch.nn.functional.interpolate(shown, (4, 6), mode="bilinear", antialias=smaller)
        torch.testing.assert_close(host(shown), expected.expand(-1, 3, -1, -1))
    assert Scaled(torch.nn.Identity(), 1, None)(x).shape == x.shape


_SIZES = {"num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1}
_STAGES = {"depths": [1, 1], "hidden_sizes": [4, 8], "num_attention_heads": [1, 1], "num_encoder_blocks": 2}
VIT = json.dumps({"model_type": "vit", "image_size": 8, "patch_size": 4, **_SIZES})
PVT = json.dumps({"model_type": "pvt", "image_size": 16, **_STAGES})


@pytest.mark.parametrize(
    ("host", "fields", "found"),
    [
        ("timm:test_vit", {"channels": 1, "drop_path": 0.1}, (3, (160, 160))),
        ("timm:test_vit", {"channels": 2}, "channels: expected 1 or the 3 of the host, found 2; choose another host"),
        ("timm:dla46_c", {"drop_path": 0.1}, "model of timm, found 'dla46_c'"),  # whose models have no drop_path
        ("timm:nonesuch", {}, r"host: expected a model of timm, found 'nonesuch' \(Unknown model"),
        (VIT, {"drop_path": 0.1}, "drop_path: expected 0 for a vit, which has none, found 0.1; set it to 0"),
        (PVT, {"drop_path": 0.1}, (3, (16, 16))),
    ],
)
@pytest.mark.each_value
def test_hosts_have_what_the_configuration_asks_for(host, fields, found):
    config = HostedClassifierConfig(host=host, classes=7, **fields)
    with torch.device("meta"):
        if isinstance(found, str):
            refuses(found, config.build)
            return
        model = config.build().host
    assert (model.channels, model.size) == found
    rates = [vars(one)["drop_prob"] for one in model.modules() if "drop_prob" in vars(one)]
    assert max(rates, default=0.0) == pytest.approx(fields.get("drop_path", 0.0))


def test_another_patch_than_timms_begins_as_timms_does():
    torch.manual_seed(0)
    model = PVTConfig(image=32, version=2, patch=2, dims=(64, 64), depths=(1, 1), num_heads=(1, 2)).build()
    projection = model.host.patch_embed.proj
    assert projection.weight.std().item() == pytest.approx((2 / (3 * 3 * 64)) ** 0.5, rel=0.05)
    assert not projection.bias.any()


@pytest.mark.slow
def test_one_seed_gives_one_model_and_a_cache_leaves_the_host_as_it_would_be():
    plain, again = build(SMALL["pvt-patch-2"]), build(SMALL["pvt-patch-2"])
    remembering = build(SMALL["pvt-patch-2"], cache=AttentionCache())
    cached = build(SMALL["pvt-patch-2"], cache=GRC())
    for name, value in plain.state_dict().items():
        for other in (again, cached, remembering):
            assert torch.equal(value, other.state_dict()[name]), name
    assert len(stored(remembering)) == 4  # keys and values of two layers
