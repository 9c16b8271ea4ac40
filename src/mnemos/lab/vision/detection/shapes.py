"""Generated pictures of shapes with boxes and masks, which a small detector learns in minutes."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import generator

from .drawing import NAMES, Drawn, draw
from .scenes import Annotation, encode

_KEPT = 4096  # pictures of a split that are kept once drawn: 50 MB of pixels at side 64, and their annotations


class ShapeScenes:
    """`count` pictures of shapes, `Scenes` that are drawn when they are read: picture i depends on (seed, use, i)."""

    has_masks = True

    def __init__(self, count: int, side: int, most: int, seed: int, use: int) -> None:
        self.classes: Sequence[str] = NAMES
        self.categories: Sequence[int] = tuple(range(1, len(NAMES) + 1))
        self.sizes = np.full((count, 2), side, np.int64)
        self._side, self._most, self._seed, self._use = side, most, seed, use
        self._read = lru_cache(_KEPT)(self._make)

    def __len__(self) -> int:
        return len(self.sizes)

    def image_id(self, index: int) -> int:
        """The number of the picture, from 1."""
        return index + 1

    def picture(self, index: int) -> NDArray[np.uint8]:
        """The picture [side, side, 3]."""
        return self._read(index)[0]

    def annotations(self, index: int) -> Sequence[Annotation]:
        """One entry per shape: its box and area are those of what is visible."""
        return self._read(index)[1]

    def _make(self, index: int) -> tuple[NDArray[np.uint8], list[Annotation]]:
        drawn = draw(generator(self._seed, self._use, index), self._side, self._most)
        return drawn.pixels, [_annotation(drawn, number) for number in range(len(drawn.kinds))]


def _annotation(drawn: Drawn, number: int) -> Annotation:
    mask = drawn.masks[number]
    rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
    top, left = int(rows[0]), int(columns[0])
    return {
        "category_id": int(drawn.kinds[number]) + 1,
        "bbox": [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top],
        "area": int(np.count_nonzero(mask)),
        "iscrowd": 0,
        "segmentation": encode(mask),
    }
