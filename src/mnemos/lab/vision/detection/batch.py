"""Batches of pictures with their objects, padded to one size and one number of objects."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.generators import AUGMENT, generator
from mnemos.lab.tasks.prefetch import BatchNumber
from mnemos.lab.tasks.row_order import Order

from .scenes import Objects, Scenes, objects


class DetectionBatch(NamedTuple):
    """B pictures and their N objects at most.

    pictures: [B, 3, H, W] uint8, each in the upper left corner, zeros around it. sizes: [B, 2] int64, (height, width)
    of each. boxes: [B, N, 4] float32, (x1, y1, x2, y2) in pixels. labels: [B, N] int64 from 1; 0 where there is no
    object. masks: [B, N, H, ⌈W/8⌉] uint8, or None: a bit per pixel, the first pixel in the highest bit. Masks of bytes
    would be most of a batch. rows: [B], the pictures' numbers in the held-out splits.
    """

    pictures: Tensor
    sizes: Tensor
    boxes: Tensor
    labels: Tensor
    masks: Tensor | None
    rows: Tensor

    def images(self, dtype: torch.dtype) -> list[Tensor]:
        """The pictures [3, H_i, W_i] with values in [0, 1], as torchvision's detectors take them."""
        spans = zip(self.pictures, self.sizes.tolist(), strict=True)
        return [picture[:, :height, :width].to(dtype) / 255 for picture, (height, width) in spans]

    def targets(self) -> list[dict[str, Tensor]]:
        """{"boxes", "labels", "masks"} of each picture, as torchvision's detectors take them."""
        found = []
        for i, (height, width) in enumerate(self.sizes.tolist()):
            some = self.labels[i] > 0
            one = {"boxes": self.boxes[i, some].float(), "labels": self.labels[i, some]}
            if self.masks is not None:
                one["masks"] = _unpack(self.masks[i, some, :height])[..., :width]
            found.append(one)
        return found


def collate(pictures: Sequence[NDArray[np.uint8]], objects: Sequence[Objects], rows: Sequence[int]) -> DetectionBatch:
    """The batch of pictures [H_i, W_i, 3]. Cost: copies, of B·N·H·W/8 bytes for masks."""
    sizes = np.array([picture.shape[:2] for picture in pictures], np.int64)
    (height, width), most = sizes.max(0).tolist(), max(1, *(len(one.labels) for one in objects))
    count = len(pictures)
    pixels = np.zeros((count, 3, height, width), np.uint8)
    boxes, labels = np.zeros((count, most, 4), np.float32), np.zeros((count, most), np.int64)
    masked = objects[0].masks is not None
    masks = np.zeros((count, most, height, -(-width // 8)), np.uint8) if masked else None
    for i, (picture, one) in enumerate(zip(pictures, objects, strict=True)):
        h, w = picture.shape[:2]
        pixels[i, :, :h, :w] = picture.transpose(2, 0, 1)
        boxes[i, : len(one.labels)], labels[i, : len(one.labels)] = one.boxes, one.labels
        if masks is not None:
            assert one.masks is not None  # all objects of a split have masks, or none has
            masks[i, : len(one.labels), :h, : -(-w // 8)] = np.packbits(one.masks, axis=-1)
    return DetectionBatch(
        torch.from_numpy(pixels),
        torch.from_numpy(sizes),
        torch.from_numpy(boxes),
        torch.from_numpy(labels),
        None if masks is None else torch.from_numpy(masks),
        torch.tensor(list(rows)),
    )


def _unpack(masks: Tensor) -> Tensor:
    """Masks [..., W/8] of bits as [..., W] uint8 of 0 and 1."""
    bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=masks.device)
    return ((masks[..., None] >> bits) & 1).flatten(-2)


def mirror(picture: NDArray[np.uint8], objects: Objects) -> tuple[NDArray[np.uint8], Objects]:
    """A picture and its objects mirrored from left to right."""
    width = picture.shape[1]
    boxes = objects.boxes.copy()
    boxes[:, [0, 2]] = width - objects.boxes[:, [2, 0]]
    masks = None if objects.masks is None else objects.masks[:, :, ::-1]
    return picture[:, ::-1], Objects(boxes, objects.labels, masks)


class Key(NamedTuple):
    """What determines a batch: rows of a split, what to add for their numbers, and (seed, index) of mirrors or None."""

    rows: NDArray[np.int64]
    before: int
    mirrors: tuple[int, int] | None


def keys_from(order: Order, asked: BatchNumber) -> Iterator[Key]:
    """The keys of a training batch and of all later ones."""
    index, batch_size, seed = asked
    return (Key(order.batch(i, batch_size, seed), 0, (seed, i)) for i in itertools.count(index))


class BatchMaker:
    """Makes batches of the pictures of a split, as a pure function of a key."""

    def __init__(self, scenes: Scenes, masks: bool, flip: bool) -> None:
        self._scenes, self._masks = scenes, masks
        self._share = 0.5 if flip else 0.0  # of training pictures, which is mirrored

    def __call__(self, key: Key) -> DetectionBatch:
        """The batch. Raises InputError for a picture that cannot be read."""
        rows = key.rows.tolist()
        read = [(self._scenes.picture(row), objects(self._scenes, row, self._masks)) for row in rows]
        if key.mirrors is not None:
            seed, index = key.mirrors
            mirrored = generator(seed, AUGMENT, index).random(len(rows)) < self._share
            read = [mirror(*one) if turn else one for one, turn in zip(read, mirrored.tolist(), strict=True)]
        pictures, found = zip(*read, strict=True)
        return collate(pictures, found, [row + key.before for row in rows])
