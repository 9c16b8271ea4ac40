"""Mask R-CNN, Faster R-CNN and RetinaNet (torchvision's) on a PVT, as a registered model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mnemos.config import ModelConfig
from mnemos.hosts.attach import cache
from mnemos.lab.vision.classifiers.pvt import PVTConfig
from mnemos.libraries import torchvision
from mnemos.memory.gated_cache import caches
from mnemos.memory.grc import GRC
from mnemos.models.blocks import Stateless
from mnemos.registry import register
from mnemos.types import InputError

from .padding import leave_out_padding
from .pyramid import FeaturePyramid

_ASPECTS = (0.5, 1.0, 2.0)
_BACKBONE = "backbone.backbone"  # in the pyramid, in the detector


@dataclass(frozen=True)
class RegionConfig:
    """The second stage of R-CNN detectors; the defaults are torchvision's.

    proposals: boxes of a picture that the second stage reads in evaluation, twice as many before the sampling of
    training. sampled: of these, the boxes that a training loss reads. dim: width of the two layers that classify a box.
    mask_dims: widths of the convolutions of the mask branch.
    """

    proposals: int = 1000
    sampled: int = 512
    dim: int = 1024
    mask_dims: tuple[int, ...] = (256, 256, 256, 256)


@register
@dataclass(frozen=True)
class DetectorConfig(ModelConfig):
    """Detectors of torchvision on a PVT: Mask R-CNN (boxes and masks), Faster R-CNN and RetinaNet (boxes).

    backbone: the PVT; its `image` is the size for which the lengths of its caches are chosen, and pictures may have any
    size. classes: of objects, without the background. channels: width of the feature pyramid.
    sides: pictures are scaled so that their shorter side is one of these in training, chosen at random, and the last
    one in evaluation; longest: but their longer side at most this. anchor: side of the smallest anchor boxes, twice as
    large at each coarser level. finest: the backbone's finest map that RetinaNet reads; 1, the second, as published
    (stride 8 of a PVT); 0 for small objects. The others read all maps. frozen_stages: the first stages of the backbone,
    whose parameters are not trained. group_norm: normalise after the convolutions of the pyramid's levels and within
    RetinaNet's heads and the mask branch, in groups of 8 channels (Wu and He 2018); RetinaNet's two coarsest levels and
    the region proposals have no normalisation. For training without a pretrained backbone: RetinaNet's heads begin with
    weights of 0.01, through four layers of which almost nothing comes if they are narrow. False, as in the paper, is
    torchvision's default.
    """

    name: ClassVar[str] = "detector"
    inputs: ClassVar[str] = "photos"

    backbone: PVTConfig = field(default_factory=PVTConfig)
    detector: Literal["mask-rcnn", "faster-rcnn", "retinanet"] = "mask-rcnn"
    classes: int = 80
    channels: int = 256
    sides: tuple[int, ...] = (800,)
    longest: int = 1333
    anchor: int = 32
    finest: int = 1
    frozen_stages: int = 0
    group_norm: bool = False
    regions: RegionConfig = field(default_factory=RegionConfig)

    def build(self) -> "Detector":
        """The detector. Raises InputError for sizes out of range or that do not fit together."""
        for name in ("classes", "channels", "longest", "anchor"):
            if getattr(self, name) < 1:
                raise InputError(f"detector: {name}: expected at least 1, found {getattr(self, name)}; raise it")
        if not self.sides or min(self.sides) < 1:
            raise InputError(f"detector: sides: expected at least one of at least 1, found {self.sides}; change them")
        if not 0 <= self.frozen_stages <= len(self.backbone.depths):
            raise InputError(
                f"detector: frozen_stages: expected 0 to {len(self.backbone.depths)}, the stages of the backbone, "
                f"found {self.frozen_stages}; change it"
            )
        if self.detector == "retinanet" and not 0 <= self.finest < len(self.backbone.depths):
            raise InputError(
                f"detector: finest: expected 0 to {len(self.backbone.depths) - 1}, a map of the backbone, found "
                f"{self.finest}; change it"
            )
        features = self.backbone.features()
        if isinstance(self.backbone.cache, GRC):
            side = self.backbone.image
            cache(features, self.backbone.cache, example=torch.zeros(1, self.backbone.channels, side, side))
        elif self.backbone.cache is not None:
            raise InputError("detector: backbone.cache: expected a gated cache (GRC) or none, found another; change it")
        for part in features.first_stages(self.frozen_stages):
            part.requires_grad_(False)
        host = self._retinanet(features) if self.detector == "retinanet" else self._rcnn(features)
        if caches(features):
            leave_out_padding(host)
        return Detector(self, host)

    def _sizes(self) -> dict[str, Any]:
        return {"min_size": self.sides, "max_size": self.longest}

    def _retinanet(self, features: nn.Module) -> nn.Module:
        torchvision()
        from torchvision.models.detection import RetinaNet
        from torchvision.models.detection.retinanet import RetinaNetHead
        from torchvision.models.detection.rpn import AnchorGenerator

        levels = tuple(range(self.finest, len(self.backbone.depths)))
        norm = _group_norm if self.group_norm else None
        pyramid = FeaturePyramid(features, self.channels, levels, "convolutions", norm)
        scales = [self.anchor * 2**i for i in range(pyramid.maps)]
        sizes = tuple(tuple(round(scale * 2 ** (third / 3)) for third in range(3)) for scale in scales)
        anchors = AnchorGenerator(sizes, (_ASPECTS,) * pyramid.maps)
        head = RetinaNetHead(self.channels, 3 * len(_ASPECTS), self.classes + 1, norm)
        settings: dict[str, Any] = {"anchor_generator": anchors, "head": head, **self._sizes()}
        return RetinaNet(pyramid, self.classes + 1, detections_per_img=100, **settings)

    def _rcnn(self, features: nn.Module) -> nn.Module:
        torchvision()
        from torchvision.models.detection import FasterRCNN, MaskRCNN
        from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
        from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
        from torchvision.models.detection.rpn import AnchorGenerator
        from torchvision.ops import MultiScaleRoIAlign

        norm = _group_norm if self.group_norm else None
        pyramid = FeaturePyramid(features, self.channels, norm=norm)
        names, regions, classes = [str(i) for i in range(pyramid.maps - 1)], self.regions, self.classes + 1
        sizes = tuple((self.anchor * 2**i,) for i in range(pyramid.maps))
        settings: dict[str, Any] = {
            "rpn_anchor_generator": AnchorGenerator(sizes, (_ASPECTS,) * pyramid.maps),
            "rpn_pre_nms_top_n_train": 2 * regions.proposals,
            "rpn_pre_nms_top_n_test": regions.proposals,
            "rpn_post_nms_top_n_train": 2 * regions.proposals,
            "rpn_post_nms_top_n_test": regions.proposals,
            "box_roi_pool": MultiScaleRoIAlign(names, 7, 2),
            "box_head": TwoMLPHead(self.channels * 49, regions.dim),
            "box_predictor": FastRCNNPredictor(regions.dim, classes),
            "box_batch_size_per_image": regions.sampled,
            **self._sizes(),
        }
        if self.detector == "faster-rcnn":
            return FasterRCNN(pyramid, **settings)
        return MaskRCNN(
            pyramid,
            mask_roi_pool=MultiScaleRoIAlign(names, 14, 2),
            mask_head=MaskRCNNHeads(self.channels, regions.mask_dims, 1, norm),
            mask_predictor=MaskRCNNPredictor(regions.mask_dims[-1], regions.mask_dims[-1], classes),
            **settings,
        )


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // 8 if channels % 8 == 0 else 1, channels)


class Detector(Stateless, nn.Module):
    """`model(images, targets)` as torchvision's detectors, around `model.host`, one of them.

    images: a list of [3, H_i, W_i] with values in [0, 1]. In training mode targets, {"boxes", "labels", "masks"} of
    each, are needed and the result is the losses; in eval mode it is the detections of each image.
    """

    def __init__(self, config: DetectorConfig, host: nn.Module) -> None:
        super().__init__()
        self.config, self.host = config, host

    def forward(self, images: list[Tensor], targets: Sequence[dict[str, Tensor]] | None = None) -> Any:
        """See the class."""
        return self.host(images, targets)

    @property
    def rows_independent(self) -> bool:
        """False: anchors and boxes that the losses read are sampled over a batch."""
        return False

    def weights_from(self, saved: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
        """The weights of a saved classifier with the same PVT by this model's names, and its caches left empty.

        With them the name of the backbone, the part that starts from a classifier. The weights of a detector are
        returned as they are, with "" for the whole model. `train.init_from` calls it.
        """
        features: Any = self.host.get_submodule(_BACKBONE)
        part = f"host.{_BACKBONE}"
        if any(name.startswith(f"{part}.") for name in saved):
            return saved, ""
        return {f"{part}.{name}": value for name, value in features.classifier_weights(saved).items()}, part
