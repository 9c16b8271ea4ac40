"""Detectors of torchvision on backbones of timm, Hugging Face or this library, with or without gated caches.

`FeaturePyramid` makes a backbone of theirs from any other; `leave_out_padding` lets caches summarise images without the
padding of their batch; `DetectorConfig` is Mask R-CNN, Faster R-CNN or RetinaNet on a PVT, as a registered model.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from mnemos.config import ModelConfig
from mnemos.hosts.attach import cache, list_sites
from mnemos.hosts.branch import HostBranch
from mnemos.hosts.hooks import follow_grid, keep_handle
from mnemos.hosts.inputs import Grid
from mnemos.lab.hosted.model import Stateless
from mnemos.lab.vision.classifiers import PVTConfig
from mnemos.libraries import torchvision
from mnemos.memory.gated_cache import GRC, caches, recomputing
from mnemos.models.shared import check_sizes
from mnemos.registry import register
from mnemos.types import InputError

_ASPECTS = (0.5, 1.0, 2.0)
_BACKBONE = "backbone.backbone"  # in the pyramid, in the detector


@dataclass(frozen=True)
class RegionConfig:
    """The second stage of R-CNN detectors; the defaults are torchvision's."""

    proposals: int = 1000  # boxes that it reads in evaluation, twice as many before the sampling of training
    sampled: int = 512  # of these, the boxes that a training loss reads
    dim: int = 1024  # width of the two layers that classify a box
    mask_dims: tuple[int, ...] = (256, 256, 256, 256)  # widths of the convolutions of the mask branch


@register
@dataclass(frozen=True)
class DetectorConfig(ModelConfig):
    """Detectors of torchvision on a PVT: Mask R-CNN (boxes and masks), Faster R-CNN and RetinaNet (boxes).

    group_norm (Wu and He 2018) is for training without a pretrained backbone: RetinaNet's heads begin with weights of
    0.01, through four layers of which almost nothing comes if they are narrow. RetinaNet's two coarsest levels and the
    region proposals have no normalisation. False, as in the paper, is torchvision's default.
    """

    name: ClassVar[str] = "detector"
    inputs: ClassVar[str] = "photos"

    backbone: PVTConfig = field(default_factory=PVTConfig)  # image: the size by which its caches' lengths are chosen
    detector: Literal["mask-rcnn", "faster-rcnn", "retinanet"] = "mask-rcnn"
    classes: int = 80  # of objects, without the background
    channels: int = 256  # width of the feature pyramid
    sides: tuple[int, ...] = (800,)  # of the scaled picture, the shorter one: any in training, the last in evaluation
    longest: int = 1333  # the longer side at most
    anchor: int = 32  # side of the smallest anchor boxes, twice as large at each coarser level
    finest: int = 1  # the first map that RetinaNet reads: 1 as published, 0 for small objects; the others read all
    group_norm: bool = False  # in the pyramid, RetinaNet's heads and the mask branch, of 8 channels a group
    regions: RegionConfig = field(default_factory=RegionConfig)

    def build(self) -> "Detector":
        """The detector. Raises InputError for sizes out of range or that do not fit together."""
        check_sizes(self, classes=1, channels=1, longest=1, anchor=1)
        stages, single = len(self.backbone.depths), self.detector == "retinanet"  # in a single stage, without regions
        if single and not 0 <= self.finest < stages:
            raise InputError(
                f"detector: finest: expected 0 to {stages - 1}, of the {stages} stages of the backbone, found "
                f"{self.finest}; change it"
            )

        # --- backbone ---
        features = self.backbone.features()
        if isinstance(self.backbone.cache, GRC):
            side = self.backbone.image
            cache(features, self.backbone.cache, example=torch.zeros(1, self.backbone.channels, side, side))
        elif self.backbone.cache is not None:
            raise InputError("detector: backbone.cache: expected a gated cache (GRC) or none, found another; change it")

        # --- feature pyramid and anchors ---
        library, norm = torchvision().models.detection, _group_norm if self.group_norm else None
        levels = tuple(range(self.finest, stages)) if single else ()
        pyramid = FeaturePyramid(features, self.channels, levels, "convolutions" if single else "pool", norm)
        scales = [self.anchor * 2**i for i in range(pyramid.maps)]
        sizes = tuple(tuple(round(scale * 2 ** (i / 3)) for i in range(3 if single else 1)) for scale in scales)
        anchors = library.anchor_utils.AnchorGenerator(sizes, (_ASPECTS,) * pyramid.maps)
        classes = self.classes + 1
        settings: dict[str, Any] = {"min_size": self.sides, "max_size": self.longest}

        # --- detector; in another order these lines would draw other weights from the same seed ---
        if single:
            head = library.retinanet.RetinaNetHead(self.channels, 3 * len(_ASPECTS), classes, norm)
            settings |= {"anchor_generator": anchors, "head": head, "detections_per_img": 100}
            host = library.RetinaNet(pyramid, classes, **settings)
        else:
            regions, align = self.regions, torchvision().ops.MultiScaleRoIAlign
            names = [str(i) for i in range(pyramid.maps - 1)]
            settings |= {
                "rpn_anchor_generator": anchors,
                "rpn_pre_nms_top_n_train": 2 * regions.proposals,
                "rpn_pre_nms_top_n_test": regions.proposals,
                "rpn_post_nms_top_n_train": 2 * regions.proposals,
                "rpn_post_nms_top_n_test": regions.proposals,
                "box_roi_pool": align(names, 7, 2),
                "box_head": library.faster_rcnn.TwoMLPHead(self.channels * 49, regions.dim),
                "box_predictor": library.faster_rcnn.FastRCNNPredictor(regions.dim, classes),
                "box_batch_size_per_image": regions.sampled,
            }
            if self.detector == "mask-rcnn":
                widths, masks = regions.mask_dims, library.mask_rcnn
                settings["mask_roi_pool"] = align(names, 14, 2)
                settings["mask_head"] = masks.MaskRCNNHeads(self.channels, widths, 1, norm)
                settings["mask_predictor"] = masks.MaskRCNNPredictor(widths[-1], widths[-1], classes)
            host = (library.MaskRCNN if self.detector == "mask-rcnn" else library.FasterRCNN)(pyramid, **settings)
        if caches(features):
            leave_out_padding(host)
        return Detector(self, host)


class Detector(Stateless, nn.Module):
    """`model(images, targets)` as torchvision's detectors, around `model.host`, one of them.

    images: a list of [3, H_i, W_i] with values in [0, 1]. In training mode targets, {"boxes", "labels", "masks"} of
    each, are needed and the result is the losses; in eval mode it is the detections of each image.
    """

    def __init__(self, config: DetectorConfig, host: nn.Module) -> None:
        super().__init__()
        self.config, self.host = config, host

    def forward(self, images: list[Tensor], targets: Sequence[dict[str, Tensor]] | None = None) -> Any:
        return self.host(images, targets)

    @property
    def rows_independent(self) -> bool:
        return False  # anchors and boxes that the losses read are sampled over a batch

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


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(channels // 8 if channels % 8 == 0 else 1, channels)


class FeaturePyramid(nn.Module):
    """Feature maps of a backbone merged from coarse to fine (Lin et al. 2017): {"0": [B, channels, H/4, W/4], …}.

        detector = torchvision.models.detection.MaskRCNN(FeaturePyramid(backbone), num_classes=91)

    backbone: a model of timm with features_only=True, a backbone of Hugging Face (`AutoBackbone`), `PVTFeatures`, or
    any module that returns a list of maps [B, C, H, W] and has their widths as `channels`. A backbone whose maps are
    [B, H, W, C], as timm's Swin, says so by `output_fmt` "NHWC".
    levels: the maps that are used, such as (1, 2, 3) for RetinaNet; (): all. coarser: what comes after the coarsest
    level: "pool", one map of every second pixel (Mask R-CNN), or "convolutions", two maps by strided convolutions
    (RetinaNet). norm: makes the normalisation after each convolution of the pyramid, for a number of channels.
    Raises InputError for a backbone whose maps it does not know, and for maps of other widths than it says.
    """

    def __init__(
        self,
        backbone: nn.Module,
        channels: int = 256,
        levels: tuple[int, ...] = (),
        coarser: Literal["pool", "convolutions"] = "pool",
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        info, widths = getattr(backbone, "feature_info", None), getattr(backbone, "channels", None)
        if info is not None and hasattr(info, "channels"):  # timm, features_only=True
            widths = info.channels()
        if not (isinstance(widths, list | tuple) and widths and all(isinstance(n, int) for n in widths)):
            raise InputError(
                f"expected a backbone that returns feature maps and has their widths (timm: features_only=True; "
                f"Hugging Face: AutoBackbone; others: a list `channels`), found {type(backbone).__name__}; make it one"
            )
        chosen = levels or tuple(range(len(widths)))
        if not all(0 <= level < len(widths) for level in chosen):
            raise InputError(
                f"levels: expected 0 to {len(widths) - 1}, the backbone's maps, found {levels}; change them"
            )
        self.backbone, self.widths, self.levels, self.out_channels = backbone, [*widths], chosen, channels
        order = getattr(backbone, "output_fmt", "NCHW")  # of timm: a text, or an enum of texts
        self.channels_last = bool(getattr(order, "value", order) == "NHWC")
        library = torchvision().ops.feature_pyramid_network
        after = library.LastLevelMaxPool() if coarser == "pool" else library.LastLevelP6P7(channels, channels)
        self.merge = library.FeaturePyramidNetwork([widths[i] for i in chosen], channels, after, norm)
        self.maps = len(chosen) + (1 if coarser == "pool" else 2)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """The maps by name, the finest first. images [B, 3, H, W]."""
        outputs = self.backbone(images)
        maps: Sequence[Tensor] = getattr(outputs, "feature_maps", outputs)
        if not isinstance(maps, list | tuple) or len(maps) != len(self.widths):
            found = f"{len(maps)} maps" if isinstance(maps, list | tuple) else type(maps).__name__
            raise InputError(f"expected a list of {len(self.widths)} maps of the backbone, found {found}; return these")
        for x, width in zip(maps, self.widths, strict=True):
            # The sizes do not show the order: a map of as many rows as channels fits both.
            if x.shape[-1 if self.channels_last else 1] != width:
                order = "[B, H, W, C]" if self.channels_last else "[B, C, H, W]"
                raise InputError(
                    f"expected maps {order} of the widths {self.widths}, found a map {list(x.shape)} for {width}; "
                    'correct `channels`, and set the backbone\'s output_fmt to "NHWC" if its maps are [B, H, W, C]'
                )
        if self.channels_last:
            maps = [x.permute(0, 3, 1, 2).contiguous() for x in maps]
        merged: OrderedDict[str, Tensor] = self.merge(OrderedDict((str(i), maps[n]) for i, n in enumerate(self.levels)))
        return merged


def leave_out_padding(detector: nn.Module) -> nn.Module:
    """Let each cache below a detector of torchvision summarise every image without its padding; returns the detector.

    A detector pads the images of a batch to one size. Its caches then resample the tokens of each image alone, so that
    the tokens of an image have the same weight in any batch. A call of the backbone alone summarises whole images. Call
    it after `mnemos.cache`; `mnemos.uncache` undoes it. Cost: one resampling per image instead of one per batch.
    Raises InputError for a module without torchvision's `transform`, without caches, or with an attention whose calls
    do not show the grid of their tokens.
    """
    transform: Any = getattr(detector, "transform", None)
    sites = [one for one in list_sites(detector) if isinstance(getattr(one.module, "grc", None), HostBranch)]
    if not isinstance(transform, nn.Module) or not sites:
        raise InputError(
            f"expected a whole detector of torchvision, with its transform and gated caches, found "
            f"{type(detector).__name__} with {len(sites)} caches; call mnemos.cache() on its backbone first"
        )
    part = ValidPart()
    for one in sites:
        branch: Any = one.module.grc
        if not branch.needs_grid:
            follow_grid(one, branch)
        if branch.own_grid is None and branch.grids is None:
            raise InputError(
                f"{one.name}: expected an attention whose calls show the grid of their tokens, found "
                f"{type(one.module).__name__}; leave the padding in, or train with images of one size"
            )
        branch.valid_part = part
    transform.valid_part = part  # type: ignore[assignment]
    keep_handle(transform, transform.register_forward_hook(_begin_call))
    keep_handle(detector, detector.register_forward_hook(_end_call, always_call=True))
    return detector


# Plain functions that find what they need in their module, so that copies of a detector have their own.
def _begin_call(transform: Any, args: tuple, output: Any) -> None:
    transform.valid_part.note(output[0].image_sizes, tuple(output[0].tensors.shape[-2:]))


def _end_call(detector: Any, args: tuple, output: Any) -> None:
    detector.transform.valid_part.ended = True


class ValidPart:
    """The sizes of the images of the present call, between what pads them and the caches that summarise them.

    Images are in the upper left corner. The sizes hold until the call ends: what calls the backbone alone has other
    images.
    """

    def __init__(self) -> None:
        self.note((), (1, 1))
        self.ended = True

    def note(self, images: Sequence[Grid], padded: Grid) -> None:
        """A call begins with images of these (height, width), padded to one size."""
        self._images, self._padded, self.ended = images, padded, False

    def at(self, grid: Grid) -> Sequence[Grid] | None:
        """The (height, width) of each image in tokens of a grid, with parts of tokens; None: no image is padded."""
        # A repeated forward (activation checkpointing) has the sizes of the last call, which has ended.
        if (self.ended and not recomputing()) or all(tuple(size) == self._padded for size in self._images):
            return None
        (rows, columns), (height, width) = grid, self._padded
        return [(max(1, -(-h * rows // height)), max(1, -(-w * columns // width))) for h, w in self._images]

    @staticmethod
    def mask(sizes: Sequence[Grid], grid: Grid, device: torch.device) -> Tensor:
        """Which tokens of the grid are of the image: [B, H·W] bool."""
        limits = torch.tensor(sizes, device=device)
        rows = torch.arange(grid[0], device=device) < limits[:, :1]
        columns = torch.arange(grid[1], device=device) < limits[:, 1:]
        return (rows[:, :, None] & columns[:, None]).flatten(1)
