"""The centre squares of photos as pictures of an image model: what a detector's backbone is explained on."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.hosts.branch import HostBranch
from mnemos.lab.tasks.augment import normalise
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.pictures import fit, pillow
from mnemos.lab.tasks.task import Split

from .scenes import Scenes

_NOTHING = "no object"
_SIDE = 224  # pixels, for a backbone whose caches do not say for which size they were made
_MULTIPLE = 32  # detectors pad images to multiples of it, and some backbones take no others


class Squares:
    """The parts of an image task that `evaluate.explain` reads: pictures of one size, a class of each, their colours.

    A picture [side, side, 3] is the centre square of a photo, scaled. Its class is that of the photo's largest object.
    colours: (mean, std) of pixels in [0, 1], by which the detector normalises. about: what the pictures are, in words.
    """

    inputs = "images"

    def __init__(self, splits: Mapping[Split, Scenes], side: int, colours: tuple[Any, Any]) -> None:
        self._splits, self._side, self.colours = splits, side, colours
        self.names = [*splits["train"].classes, _NOTHING]
        self.about = (
            f"The pictures are the middle squares of photos, scaled to {side} × {side} pixels, the size for which the "
            "lengths of the caches are chosen; each is named by the largest object of its photo"
        )

    def size(self, split: Split) -> int:
        """The number of photos."""
        return len(self._splits[split])

    def picture(self, split: Split, index: int) -> NDArray[np.uint8]:
        """The square [side, side, 3]."""
        return fit(pillow().fromarray(self._splits[split].picture(index)), self._side, 1.0)

    def batches(self, split: Split, batch_size: int) -> Iterator[Batch]:
        """The squares, normalised [B, 3, side, side], with their classes [B]."""
        for start in range(0, self.size(split), batch_size):
            rows = range(start, min(start + batch_size, self.size(split)))
            pixels = np.stack([self.picture(split, row) for row in rows])
            yield Batch(normalise(pixels, *self.colours), torch.tensor([self._label(split, row) for row in rows]))

    def _label(self, split: Split, row: int) -> int:
        scenes = self._splits[split]
        found = [one for one in scenes.annotations(row) if not one.get("iscrowd", 0)]
        if not found:
            return len(self.names) - 1
        largest = max(found, key=lambda one: float(one.get("area", 0)))
        return list(scenes.categories).index(largest["category_id"])


class Backbone(nn.Module):
    """A detector's backbone, called as an image model: (maps, state)."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, state: None) -> tuple[Any, None]:
        """See the class."""
        return self.backbone(images), state


@torch.no_grad()
def side_of_caches(detector: Any, backbone: nn.Module) -> int:
    """The side in pixels of the square images for which the caches of a detector's backbone were made.

    A cache has the grid of tokens that it was made for. How many tokens an image has is seen in a forward of one at the
    detector's own size, which the backbone takes. detector: one of torchvision's, in eval mode.
    """
    made = [one for one in backbone.modules() if isinstance(one, HostBranch) and one.grid and one.padded is None]
    if not made:
        return _SIDE
    first, counts = made[0], []
    handle = first.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape))
    side = min(detector.transform.min_size[-1], detector.transform.max_size)
    side = -(-side // _MULTIPLE) * _MULTIPLE
    parameter = next(p for p in backbone.parameters() if p.is_floating_point())
    try:
        backbone(parameter.new_zeros(1, 3, side, side))
    finally:
        handle.remove()
    if not counts:
        return _SIDE
    rows, tokens = counts[0][:2]
    height, width = first.grid or (1, 1)
    return max(1, round(side * math.sqrt(height * width / (rows * (tokens - first.prefix)))))
