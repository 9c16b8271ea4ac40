"""A feature pyramid over the maps of any backbone, in the form that torchvision's detectors take."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mnemos.libraries import torchvision
from mnemos.types import InputError

Coarser = Literal["pool", "convolutions"]
Levels = tuple[int, ...]


class FeaturePyramid(nn.Module):
    """Feature maps of a backbone merged from coarse to fine (Lin et al. 2017): {"0": [B, channels, H/4, W/4], …}.

        backbone = timm.create_model("pvt_v2_b0", features_only=True)
        mnemos.cache(backbone, mnemos.GRC(length="paper"), example=torch.zeros(1, 3, 224, 224))
        detector = torchvision.models.detection.MaskRCNN(FeaturePyramid(backbone), num_classes=91)

    backbone: a model of timm with features_only=True, a backbone of Hugging Face (`AutoBackbone`), `PVTFeatures`, or
    any module that returns a list of maps [B, C, H, W] and has their widths as `channels`. A backbone whose maps are
    [B, H, W, C], as timm's Swin, says so by `output_fmt` "NHWC". Maps of one size, as a ViT has them, or a single one,
    become a simple pyramid of the last one (Li et al. 2022): times 4, 2, 1 and 1/2.
    levels: the maps that are used, such as (1, 2, 3) for RetinaNet; (): all. coarser: what comes after the coarsest
    level: "pool", one map of every second pixel (Mask R-CNN), or "convolutions", two maps by strided convolutions
    (RetinaNet). norm: makes the normalisation after each convolution of the pyramid, for a number of channels; None:
    there is none. Raises InputError for a backbone whose maps it does not know.
    """

    def __init__(
        self,
        backbone: nn.Module,
        channels: int = 256,
        levels: Levels = (),
        coarser: Coarser = "pool",
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        torchvision()
        from torchvision.ops import feature_pyramid_network as library

        widths, alike = _described(backbone)
        self.channels_last = _channels_last(backbone)
        self.backbone_widths = list(widths)
        self.simple = _SimplePyramid(widths[-1]) if alike else None
        if self.simple is not None:
            widths = [widths[-1]] * _SimplePyramid.maps
        chosen = levels or tuple(range(len(widths)))
        if not all(0 <= level < len(widths) for level in chosen):
            raise InputError(
                f"levels: expected 0 to {len(widths) - 1}, the backbone's maps, found {levels}; change them"
            )
        self.backbone, self.levels, self.out_channels = backbone, chosen, channels
        after = library.LastLevelMaxPool() if coarser == "pool" else library.LastLevelP6P7(channels, channels)
        self.merge = library.FeaturePyramidNetwork([widths[i] for i in chosen], channels, after, norm)
        self.maps = len(chosen) + (1 if coarser == "pool" else 2)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """The maps by name, the finest first. images [B, 3, H, W].

        Raises InputError if the backbone's maps have other widths than it says.
        """
        found = self.backbone(images)
        maps: Sequence[Tensor] = getattr(found, "feature_maps", found)
        if self.simple is not None:
            if not (torch.jit.is_tracing() or torch.compiler.is_compiling()):  # sizes are no numbers there
                _check_one_size(maps, self.channels_last)
            maps = self.simple(self._channels_first(maps[-1], self.backbone_widths[-1]))
        else:
            maps = [self._channels_first(x, width) for x, width in zip(maps, self.backbone_widths, strict=True)]
        merged: OrderedDict[str, Tensor] = self.merge(OrderedDict((str(i), maps[n]) for i, n in enumerate(self.levels)))
        return merged

    def _channels_first(self, x: Tensor, width: int) -> Tensor:
        """A map as [B, C, H, W]. The sizes do not show the order: a map of as many rows as channels fits both."""
        found = x.shape[-1 if self.channels_last else 1]
        if found != width:
            order = "[B, H, W, C]" if self.channels_last else "[B, C, H, W]"
            raise InputError(
                f"expected maps {order} of the widths {self.backbone_widths}, found a map {list(x.shape)} for "
                f'{width}; correct `channels`, and set the backbone\'s output_fmt to "NHWC" if its maps are '
                "[B, H, W, C]"
            )
        return x.permute(0, 3, 1, 2).contiguous() if self.channels_last else x


class _SimplePyramid(nn.Module):
    """Four maps of one: twice and once transposed convolutions, the map itself, and every second pixel."""

    maps = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.twice = nn.Sequential(
            nn.ConvTranspose2d(width, width, 2, 2), nn.GELU(), nn.ConvTranspose2d(width, width, 2, 2)
        )
        self.once = nn.ConvTranspose2d(width, width, 2, 2)
        self.coarser = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Maps of four sizes, the finest first."""
        return [self.twice(x), self.once(x), x, self.coarser(x)]


def _described(backbone: Any) -> tuple[list[int], bool]:
    """(widths of the maps, whether they are all of one size)."""
    info = getattr(backbone, "feature_info", None)
    if info is not None and hasattr(info, "channels"):  # timm, features_only=True
        return list(info.channels()), len(set(info.reduction())) == 1
    widths = getattr(backbone, "channels", None)
    if not isinstance(widths, list | tuple) or not widths or not all(isinstance(n, int) for n in widths):
        raise InputError(
            f"expected a backbone that returns feature maps and has their widths (timm: features_only=True; Hugging "
            f"Face: AutoBackbone; others: a list `channels`), found {type(backbone).__name__}; make it one"
        )
    return list(widths), len(set(widths)) == 1  # stages of a pyramid get wider


def _check_one_size(maps: Sequence[Tensor], channels_last: bool) -> None:
    """Raise InputError unless maps of equal widths have one size, as a ViT's: all but the last are not used."""
    sizes = {tuple(x.shape[1:3] if channels_last else x.shape[2:]) for x in maps}
    if len(sizes) > 1:
        raise InputError(
            f"expected maps of one size of a backbone whose `channels` are all equal, found {sorted(sizes)}; let its "
            "maps have different widths, such as by 1 × 1 convolutions, or return the last map alone"
        )


def _channels_last(backbone: Any) -> bool:
    """Whether the maps are [B, H, W, C], as the models of timm say by `output_fmt` (a text, or an enum of texts)."""
    order = getattr(backbone, "output_fmt", "NCHW")
    return bool(getattr(order, "value", order) == "NHWC")
