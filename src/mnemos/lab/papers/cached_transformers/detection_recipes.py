"""Detection with and without a cache: COCO as in Tables 3 and 7, and pictures of shapes in minutes."""

from dataclasses import replace
from functools import partial
from typing import Literal

from mnemos.lab.recipes.family import family, variant
from mnemos.lab.run.recipe import OptimConfig, Recipe, ScheduleConfig, TrainConfig
from mnemos.lab.vision.classifiers import PVTConfig
from mnemos.lab.vision.detection.coco import COCOConfig
from mnemos.lab.vision.detection.shapes import ShapesConfig
from mnemos.lab.vision.detectors import DetectorConfig, RegionConfig
from mnemos.memory.gated_cache import GRC

from .image_recipes import PAPER_CACHE

Kind = Literal["mask-rcnn", "retinanet"]
_KINDS: tuple[Kind, ...] = ("mask-rcnn", "retinanet")
_NAMES = {"mask-rcnn": "Mask R-CNN", "retinanet": "RetinaNet"}
_DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3)}
_EPOCH = 117_266 // 16  # photos of train2017 with an object, in batches of 16


@family("coco-{kind}-pvt-{size}-{memory}", kind=_KINDS, size=_DEPTHS, memory=("", "cached"))
def coco(kind: Kind, size: str, memory: str) -> Recipe:
    """Detectors on PVT, COCO 1× as in Cached Transformers (Tables 3 and 7): 8 GPUs.

    COCO 2017, 12 epochs, batch 16 on 8 GPUs, AdamW at 1e-4, a tenth after 8 and 11 epochs; sides 800 and 1333. The
    paper gives these. 500 updates of warm-up and weight decay 1e-4 are those of the hosts' release as far as known. The
    backbone starts from a classifier trained on ImageNet: --train.init_from RUN of imagenet-pvt-…; its caches are then
    empty (Appendix B).
    """
    table = 3 if kind == "mask-rcnn" else 7
    about = f"{_NAMES[kind]} on PVT-{size.capitalize()}, COCO 1× as in Table {table}"
    if size == "tiny":
        about += " (--data.folder COCO --train.init_from RUN): 8 GPUs"
    if memory:
        about = f"coco-{kind}-pvt-{size} with a gated cache beside every attention"
    backbone = PVTConfig(
        image=224,
        dims=(64, 128, 320, 512),
        depths=_DEPTHS[size],
        num_heads=(1, 2, 5, 8),
        mlp_ratios=(8, 8, 4, 4),
        reductions=(8, 4, 2, 1),
        drop_path=0.1,
        cache=PAPER_CACHE if memory else None,
    )
    schedule = ScheduleConfig(name="step", warmup=500, start=1e-3, floor=0.1, drop_at=(8 * _EPOCH, 11 * _EPOCH))
    return Recipe(
        about=about,
        model=DetectorConfig(backbone=backbone, detector=kind, classes=0),
        data=COCOConfig(masks=kind == "mask-rcnn", workers=4),
        optim=OptimConfig(lr=1e-4, weight_decay=1e-4, grad_clip=0.0, schedule=schedule),
        train=TrainConfig(
            steps=12 * _EPOCH, batch_size=16, devices=8, eval_every=_EPOCH, checkpoint_every=_EPOCH, log_every=50
        ),
    )


_SMALL_PVT = partial(  # a small PVT v2, whose patches overlap: it needs no pretraining
    PVTConfig,
    version=2,
    dims=(32, 64, 96, 128),
    depths=(2, 2, 2, 2),
    num_heads=(1, 2, 3, 4),
    mlp_ratios=(4, 4, 4, 4),
    reductions=(8, 4, 2, 1),
)
_REGIONS = RegionConfig(sampled=64, dim=256, mask_dims=(64, 64))


@family("coco-mini-{kind}", kind=("retinanet", "mask-rcnn"))
def coco_mini(kind: Kind) -> Recipe:
    """Detectors learn a few photos in COCO's format by heart, at 240 × 320 pixels: a check of data and losses.

    They are scored on the photos that they are trained on, on 160 of them at most, so that the recipe also runs on COCO
    itself.
    """
    learned = f"{_NAMES[kind]} learns a few photos in COCO's format by heart, and is scored on them"
    return Recipe(
        about=f"{learned}: {'boxes and masks' if kind == 'mask-rcnn' else 'a check of data and losses'}",
        model=DetectorConfig(
            backbone=_SMALL_PVT(image=256),
            detector=kind,
            classes=0,
            channels=64,
            sides=(240,),
            longest=320,
            anchor=10,
            group_norm=True,
            regions=replace(_REGIONS, proposals=200),
        ),
        data=COCOConfig(folder="coco-mini", train="train2017", test="train2017", masks=kind == "mask-rcnn", flip=False),
        optim=OptimConfig(lr=1e-3, weight_decay=0.0, schedule=ScheduleConfig(name="cosine", warmup=100)),
        train=TrainConfig(
            steps=3000, batch_size=8, eval_every=1000, checkpoint_every=500, valid_rows=160, test_rows=160
        ),
    )


@family("shapes-{kind}-{memory}", kind=_KINDS, memory=("", "cached", "cached-unwritten"))
def shapes(kind: Kind, memory: str) -> Recipe:
    """Detectors on generated pictures of shapes, with caches in the backbone and without: minutes on one core.

    Pictures of 128² pixels on a small PVT v2. Both detectors read maps from stride 4 on.
    """
    regions = kind == "mask-rcnn"
    backbone = _SMALL_PVT(image=128)
    plain = Recipe(
        about=f"{_NAMES[kind]} on generated pictures of shapes: {'boxes and masks' if regions else 'boxes'}",
        model=DetectorConfig(
            backbone=backbone,
            detector=kind,
            classes=0,
            channels=64,
            sides=(128,),
            longest=128,
            anchor=12 if regions else 10,
            finest=0,
            group_norm=True,
            regions=replace(_REGIONS, proposals=100),
        ),
        data=ShapesConfig(train=12_000, masks=regions),
        optim=OptimConfig(lr=1e-3, weight_decay=0.05, schedule=ScheduleConfig(name="cosine", warmup=200)),
        # Box AP 67 (log/2026-11-23-shapes-mask-rcnn.md), and RetinaNet's 70 (log/2026-11-24-shapes-retinanet.md).
        train=TrainConfig(steps=2500 if regions else 4000, batch_size=8, eval_every=1250, checkpoint_every=500),
    )
    cache, name = GRC(length="paper"), f"shapes-{kind}"
    if memory == "cached":
        about = f"{name} with a gated cache beside every attention of the backbone"
        return variant(plain, about, backbone=replace(backbone, cache=cache))
    if memory == "cached-unwritten":
        about = f"{name}-cached with caches that are never written"
        return variant(plain, about, backbone=replace(backbone, cache=cache.unwritten()))
    return plain
