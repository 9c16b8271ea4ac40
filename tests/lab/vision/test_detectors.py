"""Detectors of torchvision on cached backbones: a closed gate, images of any size, and padding."""

import copy

import pytest
import torch
from refusals import refuses
from torch import nn

import mnemos
from mnemos import libraries
from mnemos.lab.vision.attention_cache import AttentionCache
from mnemos.lab.vision.classifiers import PVTConfig, PVTFeatures
from mnemos.lab.vision.detectors import DetectorConfig, FeaturePyramid, ValidPart, leave_out_padding
from mnemos.memory.gated_cache import caches

torchvision = libraries.torchvision()
GRC = mnemos.GRC(length="paper", preset="paper")
SIZES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4]}


def pvt():
    library = libraries.transformers()
    return PVTFeatures(library.PvtModel(library.PvtConfig(image_size=64, mlp_ratios=[2] * 4, **SIZES)).encoder)


def timms(name, **sizes):
    return libraries.timm().create_model(name, features_only=True, **sizes)


def pvt_v2():
    return timms("pvt_v2_b0", depths=(1,) * 4, embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4))


def swin():
    sizes = {"depths": (1, 1, 2, 1), "embed_dim": 8, "num_heads": (1, 2, 2, 4), "img_size": 64, "window_size": 4}
    return timms("swin_tiny_patch4_window7_224", strict_img_size=False, **sizes)


BACKBONES = {"pvt": pvt, "pvt_v2": pvt_v2, "swin": swin}


def backbone(name):
    torch.manual_seed(0)
    return BACKBONES[name]()


def mask_rcnn(host):
    from torchvision.models.detection import MaskRCNN, faster_rcnn, mask_rcnn
    from torchvision.models.detection.rpn import AnchorGenerator

    torch.manual_seed(1)
    pyramid = FeaturePyramid(host, 16)
    return MaskRCNN(
        pyramid,
        min_size=64,
        max_size=96,
        rpn_anchor_generator=AnchorGenerator(tuple((8 * 2**i,) for i in range(pyramid.maps)), ((1.0,),) * pyramid.maps),
        rpn_post_nms_top_n_train=40,
        rpn_post_nms_top_n_test=20,
        box_head=faster_rcnn.TwoMLPHead(16 * 49, 8),
        box_predictor=faster_rcnn.FastRCNNPredictor(8, 3),
        box_batch_size_per_image=16,
        mask_head=mask_rcnn.MaskRCNNHeads(16, (8,), 1),
        mask_predictor=mask_rcnn.MaskRCNNPredictor(8, 8, 3),
        box_score_thresh=0.0,
        box_detections_per_img=6,
    )


def images(*sizes):
    generator = torch.Generator().manual_seed(4)
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def written(module):
    """Every cache of a model, filled, and its gate closed."""
    with torch.no_grad():
        for cache in caches(module):
            cache.cache.normal_(generator=torch.Generator().manual_seed(2))
            cache.mix.fill_(-torch.inf)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("pvt", marks=pytest.mark.exhaustive), "pvt_v2", "swin"])
def test_a_closed_gate_detects_what_the_uncached_detector_does(name):
    host = backbone(name)
    plain = mask_rcnn(copy.deepcopy(host)).eval()
    mnemos.cache(host, GRC, example=torch.zeros(1, 3, 64, 64))
    cached = leave_out_padding(mask_rcnn(host)).eval()
    assert len(caches(cached)) == len(list(caches(host))) > 0
    cached.load_state_dict(plain.state_dict())  # the host's own checkpoint
    written(cached)
    with torch.no_grad():
        for batch in (images((64, 64)), images((64, 90), (80, 64))):
            for a, b in zip(plain(batch), cached(batch), strict=True):
                assert len(a["boxes"]) > 0
                for key in a:
                    torch.testing.assert_close(b[key], a[key], rtol=1e-5, atol=1e-4)
    again = mask_rcnn(backbone(name))
    mnemos.cache(again.backbone.backbone, GRC, example=torch.zeros(1, 3, 64, 64))
    again.load_state_dict(cached.state_dict())
    assert all(torch.equal(a.cache, b.cache) for a, b in zip(caches(again), caches(cached), strict=True))
    mnemos.uncache(host)
    assert not caches(cached)


@pytest.mark.each_value
@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize("resample", [None, "linear", "grid"])
def test_what_is_written_of_a_padded_image_is_what_is_written_of_it_alone(name, resample):
    """Of the first layer: the tokens of later ones depend on the padding, to which the first attention attends."""
    host, grc = backbone(name), GRC if resample is None else mnemos.GRC(length=4, resample=resample)
    mnemos.cache(host, grc, example=torch.zeros(1, 3, 64, 64))
    detector = nn.Module()
    detector.transform, detector.host = nn.Identity(), host
    leave_out_padding(detector)
    part = detector.transform.valid_part
    first = caches(host)[0]
    (small,) = images((32, 64))
    host.train()

    def stored(batch, *sizes):
        mnemos.memory.clear_caches(host)
        part.note(sizes, tuple(batch.shape[-2:]))
        host(batch)
        host.eval().train()
        return first.cache.clone()

    alone = stored(small[None], (32, 64))
    padded = torch.cat([small, 9 * torch.ones(3, 64, 64)], 1)[None]
    assert alone.abs().max() > 1e-4
    if name == "pvt":  # patches do not overlap; but their positions are those of another grid
        for patches in host.encoder.patch_embeddings:
            patches.position_embeddings.data.zero_()
        alone = stored(small[None], (32, 64))
    else:  # the patches at the edge overlap with the padding
        padded[:, :, 32:] = 0
    torch.testing.assert_close(stored(padded, (32, 64)), alone, rtol=0, atol=1e-6)
    assert not torch.allclose(stored(padded, (96, 64)), alone, atol=1e-4)


def test_the_backbone_alone_does_not_use_the_sizes_of_the_detectors_last_call():
    """Neither after a call of the detector nor after one that fails; another number of images is no error."""
    host = backbone("pvt")
    mnemos.cache(host, mnemos.GRC(length=4), example=torch.zeros(1, 3, 64, 64))
    detector = leave_out_padding(mask_rcnn(host)).train()
    batch = images((64, 64), (64, 40))
    targets = [
        {"boxes": torch.tensor([[1.0, 1, 20, 20]]), "labels": torch.tensor([1]), "masks": one[:1] > 0.5}
        for one in batch
    ]
    part, seen = detector.transform.valid_part, []
    handle = host.register_forward_hook(lambda *_: seen.append(part.at((16, 16))))
    losses = detector(batch, targets)
    sizes = [(11, 16), (16, 15)]  # 64 x 64 and, scaled, 96 x 60 of 96 x 64 pixels
    assert seen == [sizes]
    next(detector.parameters()).register_hook(lambda _: seen.append(part.at((16, 16))))
    sum(losses.values()).backward()
    assert seen.pop() == sizes  # activation checkpointing repeats the call here
    host(torch.rand(2, 3, 64, 64))
    host(torch.rand(3, 3, 64, 64))
    handle.remove()
    failing = host.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        detector(batch, targets)
    failing.remove()
    host(torch.rand(3, 3, 64, 64))
    assert seen[1:] == [None, None]


def test_maps_with_as_many_rows_as_channels_are_not_transposed():
    """Swin returns [B, H, W, C]; here the first map has 8 rows, 16 columns and 8 channels."""
    host = backbone("swin").eval()
    pyramid = FeaturePyramid(host, 16).eval()
    x = images((32, 64))[0][None]
    with torch.no_grad():
        found = pyramid(x)
        assert [tuple(one.shape[2:]) for one in found.values()] == [(8, 16), (4, 8), (2, 4), (1, 2), (1, 1)]
        maps = {str(i): one.permute(0, 3, 1, 2) for i, one in enumerate(host(x))}
        for name, wanted in pyramid.merge(maps).items():
            torch.testing.assert_close(found[name], wanted)
    host.output_fmt = "NCHW"
    refuses(r"found a map \[1, 16, 8, 8\] for 8", FeaturePyramid(host, 16), images((64, 32))[0][None])


@pytest.mark.parametrize(("maps", "found"), [([torch.zeros(1, 4, 2, 2)], "1 maps"), ({"0": torch.zeros(1)}, "dict")])
def test_a_backbone_that_returns_something_else_is_refused(maps, found):
    host = nn.Identity()
    host.channels, host.forward = [4, 8], lambda x: maps
    refuses(f"expected a list of 2 maps of the backbone, found {found}", FeaturePyramid(host, 16), torch.zeros(1))


def test_levels_coarser_maps_and_what_is_refused():
    pyramid = FeaturePyramid(backbone("pvt"), 8, levels=(1, 2, 3), coarser="convolutions")
    found = pyramid(torch.zeros(1, 3, 64, 64))
    assert [tuple(x.shape[1:]) for x in found.values()] == [(8, 8, 8), (8, 4, 4), (8, 2, 2), (8, 1, 1), (8, 1, 1)]
    assert pyramid.maps == len(found)
    for call, words in (
        (lambda: FeaturePyramid(backbone("pvt"), 8, levels=(4,)), "levels: expected 0 to 3"),
        (lambda: FeaturePyramid(backbone("pvt"), 8, levels=(-1,)), "levels: expected 0 to 3"),
        (lambda: FeaturePyramid(nn.Linear(2, 2)), "features_only=True"),
        (lambda: leave_out_padding(mask_rcnn(backbone("pvt"))), r"with 0 caches; call mnemos\.cache"),
        (lambda: leave_out_padding(backbone("pvt")), "expected a whole detector"),
        (lambda: DetectorConfig(PVTConfig(cache=AttentionCache())).build(), r"backbone.cache: expected a gated cache"),
    ):
        refuses(words, call)


def test_the_part_of_a_grid_that_is_of_an_image():
    part = ValidPart()
    assert part.at((4, 6)) is None, "before a call"
    part.note([(40, 90), (64, 61), (1, 1)], (64, 96))
    assert part.at((4, 6)) == [(3, 6), (4, 4), (1, 1)]
    assert part.at((1, 1)) == [(1, 1)] * 3
    mask = part.mask([(2, 1), (1, 3)], (2, 3), torch.device("cpu"))
    assert mask.tolist() == [[True, False, False, True, False, False], [True, True, True, False, False, False]]
    part.note([(64, 96)], (64, 96))
    assert part.at((4, 6)) is None, "nothing is padded"
