"""The one form of detection data, whatever files they come from: pictures with annotations in COCO's format.

`Scenes` are these, `objects` what a detector is trained to find in one, and `BatchMaker` makes batches of them.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.generators import AUGMENT, generator
from mnemos.lab.tasks.row_order import BatchKey
from mnemos.libraries import pycocotools

Annotation = dict[str, Any]  # an entry of COCO's "annotations"


class Scenes:
    """Base of N pictures with the objects that they show."""

    classes: Sequence[str]  # the names of the labels 1, 2, …; label 0 is the background
    categories: Sequence[int]  # for each class, the id by which annotations and result files name it
    has_masks: bool  # whether every object has a segmentation
    sizes: NDArray[np.int64]  # [N, 2], (height, width) of each picture

    def __len__(self) -> int:
        return len(self.sizes)

    def image_id(self, index: int) -> int:
        """The id by which annotations and result files name the picture."""
        return index + 1

    def picture(self, index: int) -> NDArray[np.uint8]:
        raise NotImplementedError

    def annotations(self, index: int) -> Sequence[Annotation]:
        """The picture's entries of COCO's format: bbox (x, y, width, height), category_id, area, iscrowd and id.

        With masks also segmentation: polygons, or run lengths as text or as a list.
        """
        raise NotImplementedError

    def plain(self, index: int) -> list[Annotation]:
        """The entries that are one object each, and no group."""
        return [one for one in self.annotations(index) if not one["iscrowd"]]


class Objects(NamedTuple):
    """The objects of a picture for training."""

    boxes: NDArray[np.float32]  # [N, 4] as (x1, y1, x2, y2) in pixels
    labels: NDArray[np.int64]  # [N] from 1
    masks: NDArray[np.bool_] | None  # [N, H, W]


def objects(scenes: Scenes, index: int, masks: bool = True) -> Objects:
    """The objects of a picture that a detector is trained to find: no groups (`iscrowd`), no boxes without an area.

    Boxes are cut at the picture's edge. masks: also those, where the data have them. Cost: N·H·W for masks.
    """
    height, width = scenes.sizes[index].tolist()
    entries = scenes.plain(index)
    x, y, w, h = np.array([one["bbox"] for one in entries], np.float64).reshape(-1, 4).T
    corners = np.stack([x.clip(0), y.clip(0), (x + w).clip(max=width), (y + h).clip(max=height)], 1).astype(np.float32)
    has_area = np.flatnonzero((corners[:, 2:] > corners[:, :2]).all(1))
    entries = [entries[row] for row in has_area.tolist()]
    labels = np.array([scenes.categories.index(one["category_id"]) + 1 for one in entries], np.int64)
    if not masks or not scenes.has_masks:
        return Objects(corners[has_area], labels, None)
    inside = np.zeros((len(entries), height, width), np.bool_)
    for mask, one in zip(inside, entries, strict=True):
        mask[:] = decode(run_lengths(one["segmentation"], height, width))
    return Objects(corners[has_area], labels, inside)


def ground_truth(pictures: Iterable[tuple[int, Scenes, int]]) -> dict[str, list[Annotation]]:
    """Pictures as the content of a COCO annotation file. pictures: (id in the file, scenes, index), at least one."""
    images: list[Annotation] = []
    entries: list[Annotation] = []
    for number, scenes, index in pictures:
        height, width = scenes.sizes[index].tolist()
        images.append({"id": number, "height": height, "width": width})
        for one in scenes.annotations(index):
            # Ids of their own, from 1: the evaluation takes an id of 0 for no match.
            entries.append({**one, "id": len(entries) + 1, "image_id": number})
    categories = [{"id": i, "name": name} for i, name in zip(scenes.categories, scenes.classes, strict=True)]
    return {"images": images, "annotations": entries, "categories": categories}


# ---- masks ----


def coco_masks() -> Any:
    """The module of run lengths."""
    pycocotools()  # or how to install it
    from pycocotools import mask

    return mask


def run_lengths(segmentation: Any, height: int, width: int) -> Annotation:
    """A segmentation of COCO's format, polygons or run lengths in either form, as compressed run lengths."""
    masks = coco_masks()
    if isinstance(segmentation, list):
        return masks.merge(masks.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return masks.frPyObjects(segmentation, height, width)
    return segmentation


def decode(lengths: Annotation) -> NDArray[np.bool_]:
    """The mask [H, W] of compressed run lengths."""
    return np.asarray(coco_masks().decode(lengths), np.bool_)


def encode(mask: NDArray[np.bool_]) -> Annotation:
    """A mask [H, W] as compressed run lengths {"size", "counts"} with counts as text, which JSON can hold."""
    lengths = coco_masks().encode(np.asfortranarray(mask, np.uint8))
    return {"size": [int(n) for n in lengths["size"]], "counts": lengths["counts"].decode()}


# ---- batches ----


class DetectionBatch(NamedTuple):
    """B pictures and their N objects at most."""

    pictures: Tensor  # [B, 3, H, W] uint8, each in the upper left corner, zeros around it
    sizes: Tensor  # [B, 2] int64, (height, width) of each
    boxes: Tensor  # [B, N, 4] float32, (x1, y1, x2, y2) in pixels
    labels: Tensor  # [B, N] int64 from 1; 0 where there is no object
    # [B, N, H, ⌈W/8⌉] uint8: a bit per pixel, the first one in the highest bit. Bytes would be most of a batch.
    masks: Tensor | None
    rows: Tensor  # [B], the pictures' numbers in the held-out splits

    def images(self, dtype: torch.dtype) -> list[Tensor]:
        """The pictures [3, H_i, W_i] with values in [0, 1], as torchvision's detectors take them."""
        spans = zip(self.pictures, self.sizes.tolist(), strict=True)
        return [picture[:, :height, :width].to(dtype) / 255 for picture, (height, width) in spans]

    def targets(self) -> list[dict[str, Tensor]]:
        """{"boxes", "labels", "masks"} of each picture, as torchvision's detectors take them."""
        targets = []
        for i, (height, width) in enumerate(self.sizes.tolist()):
            some = self.labels[i] > 0
            one = {"boxes": self.boxes[i, some].float(), "labels": self.labels[i, some]}
            if self.masks is not None:
                bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=self.masks.device)
                pixels = ((self.masks[i, some, :height, :, None] >> bits) & 1).flatten(-2)
                one["masks"] = pixels[..., :width]
            targets.append(one)
        return targets


def collate(pictures: Sequence[NDArray[np.uint8]], objects: Sequence[Objects], rows: Sequence[int]) -> DetectionBatch:
    """The batch of pictures [H_i, W_i, 3]. Cost: copies, of B·N·H·W/8 bytes for masks."""
    sizes = np.array([picture.shape[:2] for picture in pictures], np.int64)
    (height, width), most = sizes.max(0).tolist(), max(1, *(len(one.labels) for one in objects))
    count = len(pictures)
    pixels = torch.zeros(count, 3, height, width, dtype=torch.uint8)
    boxes, labels = torch.zeros(count, most, 4), torch.zeros(count, most, dtype=torch.int64)
    masks = None
    if objects[0].masks is not None:  # all objects of a split have masks, or none has
        masks = torch.zeros(count, most, height, -(-width // 8), dtype=torch.uint8)
    for i, (picture, one) in enumerate(zip(pictures, objects, strict=True)):
        (h, w), n = picture.shape[:2], len(one.labels)
        pixels.numpy()[i, :, :h, :w] = picture.transpose(2, 0, 1)
        boxes.numpy()[i, :n], labels.numpy()[i, :n] = one.boxes, one.labels
        if masks is not None and one.masks is not None:
            masks.numpy()[i, :n, :h, : -(-w // 8)] = np.packbits(one.masks, axis=-1)
    return DetectionBatch(pixels, torch.from_numpy(sizes), boxes, labels, masks, torch.tensor(list(rows)))


def mirror(picture: NDArray[np.uint8], objects: Objects) -> tuple[NDArray[np.uint8], Objects]:
    """A picture and its objects mirrored from left to right."""
    boxes = objects.boxes.copy()
    boxes[:, [0, 2]] = picture.shape[1] - objects.boxes[:, [2, 0]]
    masks = None if objects.masks is None else objects.masks[:, :, ::-1]
    return picture[:, ::-1], Objects(boxes, objects.labels, masks)


class BatchMaker:
    """Makes batches of the pictures of a split, as a pure function of a key; worker processes have copies of it.

    flip: half of the training pictures are mirrored. first: the number of the split's first picture.
    """

    def __init__(self, scenes: Scenes, masks: bool, flip: bool, first: int) -> None:
        self._scenes, self._masks, self._flip, self._first = scenes, masks, flip, first

    def __call__(self, key: BatchKey) -> DetectionBatch:
        """The batch. Raises InputError for a picture that cannot be read."""
        rows, mirrors = key.rows.tolist(), key.augmentation
        shown = [(self._scenes.picture(row), objects(self._scenes, row, self._masks)) for row in rows]
        if mirrors is not None and self._flip:
            seed, index = mirrors
            turned = generator(seed, AUGMENT, index).random(len(rows)) < 0.5
            shown = [mirror(*one) if turn else one for one, turn in zip(shown, turned.tolist(), strict=True)]
        pictures, targets = zip(*shown, strict=True)
        return collate(pictures, targets, [row + self._first for row in rows])
