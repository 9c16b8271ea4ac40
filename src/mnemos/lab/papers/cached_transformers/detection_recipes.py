"""Detection: COCO at the settings of the paper (Tables 3 and 7), and pictures of shapes in minutes."""

from dataclasses import replace
from functools import partial
from typing import Literal

from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig, recipe
from mnemos.lab.vision.classifiers import PVTConfig
from mnemos.lab.vision.detection.sources import COCOConfig, ShapesConfig
from mnemos.lab.vision.detectors import DetectorConfig, RegionConfig
from mnemos.memory.grc import GRC

from .memory_variants import PAPER_CACHE, unwritten

Kind = Literal["mask-rcnn", "faster-rcnn", "retinanet"]
_PVT = partial(
    PVTConfig,
    image=224,
    dims=(64, 128, 320, 512),
    num_heads=(1, 2, 5, 8),
    mlp_ratios=(8, 8, 4, 4),
    reductions=(8, 4, 2, 1),
    drop_path=0.1,
)
_TINY, _SMALL, _MEDIUM = (2, 2, 2, 2), (3, 4, 6, 3), (3, 4, 18, 3)
_EPOCH = 117_266 // 16  # photos of train2017 with an object, in batches of 16


def _cached(base: Recipe, cache: GRC = PAPER_CACHE) -> Recipe:
    assert isinstance(base.model, DetectorConfig)
    return replace(base, model=replace(base.model, backbone=replace(base.model.backbone, cache=cache)))


def _coco(kind: Kind, depths: tuple[int, ...]) -> Recipe:
    """COCO 2017, 12 epochs, batch 16 on 8 GPUs, AdamW at 1e-4, a tenth after 8 and 11 epochs; sides 800 and 1333.

    The paper gives these. 500 updates of warm-up and weight decay 1e-4 are those of the hosts' release as far as known.
    The backbone starts from a classifier trained on ImageNet: --train.init_from RUN of imagenet-pvt-…; its caches are
    then empty (Appendix B).
    """
    schedule = ScheduleConfig(name="step", warmup=500, start=1e-3, floor=0.1, drop_at=(8 * _EPOCH, 11 * _EPOCH))
    return Recipe(
        model=DetectorConfig(backbone=_PVT(depths=depths), detector=kind, classes=0),
        data=COCOConfig(masks=kind == "mask-rcnn", workers=4),
        optim=OptimConfig(lr=1e-4, weight_decay=1e-4, grad_clip=0.0, schedule=schedule),
        train=TrainConfig(
            steps=12 * _EPOCH, batch_size=16, devices=8, eval_every=_EPOCH, checkpoint_every=_EPOCH, log_every=50
        ),
    )


@recipe("coco-mask-rcnn-pvt-tiny")
def coco_mask_rcnn_pvt_tiny() -> Recipe:
    """Mask R-CNN on PVT-Tiny, COCO 1× as in Table 3 (--data.folder COCO --train.init_from RUN): 8 GPUs."""
    return _coco("mask-rcnn", _TINY)


@recipe("coco-mask-rcnn-pvt-tiny-cached")
def coco_mask_rcnn_pvt_tiny_cached() -> Recipe:
    """coco-mask-rcnn-pvt-tiny with a gated cache beside every attention."""
    return _cached(coco_mask_rcnn_pvt_tiny())


@recipe("coco-mask-rcnn-pvt-small")
def coco_mask_rcnn_pvt_small() -> Recipe:
    """Mask R-CNN on PVT-Small, COCO 1× as in Table 3."""
    return _coco("mask-rcnn", _SMALL)


@recipe("coco-mask-rcnn-pvt-small-cached")
def coco_mask_rcnn_pvt_small_cached() -> Recipe:
    """coco-mask-rcnn-pvt-small with a gated cache beside every attention."""
    return _cached(coco_mask_rcnn_pvt_small())


@recipe("coco-mask-rcnn-pvt-medium")
def coco_mask_rcnn_pvt_medium() -> Recipe:
    """Mask R-CNN on PVT-Medium, COCO 1× as in Table 3."""
    return _coco("mask-rcnn", _MEDIUM)


@recipe("coco-mask-rcnn-pvt-medium-cached")
def coco_mask_rcnn_pvt_medium_cached() -> Recipe:
    """coco-mask-rcnn-pvt-medium with a gated cache beside every attention."""
    return _cached(coco_mask_rcnn_pvt_medium())


@recipe("coco-retinanet-pvt-tiny")
def coco_retinanet_pvt_tiny() -> Recipe:
    """RetinaNet on PVT-Tiny, COCO 1× as in Table 7 (--data.folder COCO --train.init_from RUN): 8 GPUs."""
    return _coco("retinanet", _TINY)


@recipe("coco-retinanet-pvt-tiny-cached")
def coco_retinanet_pvt_tiny_cached() -> Recipe:
    """coco-retinanet-pvt-tiny with a gated cache beside every attention."""
    return _cached(coco_retinanet_pvt_tiny())


@recipe("coco-retinanet-pvt-small")
def coco_retinanet_pvt_small() -> Recipe:
    """RetinaNet on PVT-Small, COCO 1× as in Table 7."""
    return _coco("retinanet", _SMALL)


@recipe("coco-retinanet-pvt-small-cached")
def coco_retinanet_pvt_small_cached() -> Recipe:
    """coco-retinanet-pvt-small with a gated cache beside every attention."""
    return _cached(coco_retinanet_pvt_small())


@recipe("coco-retinanet-pvt-medium")
def coco_retinanet_pvt_medium() -> Recipe:
    """RetinaNet on PVT-Medium, COCO 1× as in Table 7."""
    return _coco("retinanet", _MEDIUM)


@recipe("coco-retinanet-pvt-medium-cached")
def coco_retinanet_pvt_medium_cached() -> Recipe:
    """coco-retinanet-pvt-medium with a gated cache beside every attention."""
    return _cached(coco_retinanet_pvt_medium())


_SHAPES_CACHE = GRC(length="paper")
_SMALL_PVT = partial(  # a small PVT v2, whose patches overlap: it needs no pretraining
    PVTConfig,
    version=2,
    dims=(32, 64, 96, 128),
    depths=(2, 2, 2, 2),
    num_heads=(1, 2, 3, 4),
    mlp_ratios=(4, 4, 4, 4),
    reductions=(8, 4, 2, 1),
)


def _coco_mini(kind: Kind) -> Recipe:
    """Photos in COCO's format at 240 × 320 pixels, learned by heart: scored on the photos that are trained on.

    160 photos at most are scored, so that the recipe also runs on COCO itself.
    """
    return Recipe(
        model=DetectorConfig(
            backbone=_SMALL_PVT(image=256),
            detector=kind,
            classes=0,
            channels=64,
            sides=(240,),
            longest=320,
            anchor=10,
            group_norm=True,
            regions=RegionConfig(proposals=200, sampled=64, dim=256, mask_dims=(64, 64)),
        ),
        data=COCOConfig(folder="coco-mini", train="train2017", test="train2017", masks=kind == "mask-rcnn", flip=False),
        optim=OptimConfig(lr=1e-3, weight_decay=0.0, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(
            steps=3000, batch_size=8, eval_every=1000, checkpoint_every=500, valid_rows=160, test_rows=160
        ),
    )


@recipe("coco-mini-retinanet")
def coco_mini_retinanet() -> Recipe:
    """RetinaNet learns a few photos in COCO's format by heart, and is scored on them: a check of data and losses."""
    return _coco_mini("retinanet")


@recipe("coco-mini-mask-rcnn")
def coco_mini_mask_rcnn() -> Recipe:
    """Mask R-CNN learns a few photos in COCO's format by heart, and is scored on them: boxes and masks."""
    return _coco_mini("mask-rcnn")


def _shapes(kind: Kind) -> Recipe:
    """Pictures of shapes of 128² pixels on a small PVT v2. Both detectors read maps from stride 4 on."""
    regions = kind == "mask-rcnn"
    return Recipe(
        model=DetectorConfig(
            backbone=_SMALL_PVT(image=128),
            detector=kind,
            classes=0,
            channels=64,
            sides=(128,),
            longest=128,
            anchor=12 if regions else 10,
            finest=0,
            group_norm=True,
            regions=RegionConfig(proposals=100, sampled=64, dim=256, mask_dims=(64, 64)),
        ),
        data=ShapesConfig(train=12_000, masks=regions),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, schedule=ScheduleConfig(name="cosine", warmup=200)),
        # Box AP 67 (log/2026-11-23-shapes-mask-rcnn.md), and RetinaNet's 70 (log/2026-11-24-shapes-retinanet.md).
        train=TrainConfig(steps=2500 if regions else 4000, batch_size=8, eval_every=1250, checkpoint_every=500),
    )


@recipe("shapes-mask-rcnn")
def shapes_mask_rcnn() -> Recipe:
    """Mask R-CNN on generated pictures of shapes: boxes and masks."""
    return _shapes("mask-rcnn")


@recipe("shapes-mask-rcnn-cached")
def shapes_mask_rcnn_cached() -> Recipe:
    """shapes-mask-rcnn with a gated cache beside every attention of the backbone."""
    return _cached(shapes_mask_rcnn(), _SHAPES_CACHE)


@recipe("shapes-mask-rcnn-cached-unwritten")
def shapes_mask_rcnn_cached_unwritten() -> Recipe:
    """shapes-mask-rcnn-cached with caches that are never written."""
    return unwritten(shapes_mask_rcnn_cached())


@recipe("shapes-retinanet")
def shapes_retinanet() -> Recipe:
    """RetinaNet on generated pictures of shapes: boxes."""
    return _shapes("retinanet")


@recipe("shapes-retinanet-cached")
def shapes_retinanet_cached() -> Recipe:
    """shapes-retinanet with a gated cache beside every attention of the backbone."""
    return _cached(shapes_retinanet(), _SHAPES_CACHE)


@recipe("shapes-retinanet-cached-unwritten")
def shapes_retinanet_cached_unwritten() -> Recipe:
    """shapes-retinanet-cached with caches that are never written."""
    return unwritten(shapes_retinanet_cached())
