"""Generated pictures of shapes with boxes and masks, which a small detector learns in minutes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import TEST, TRAIN, VALID, generator
from mnemos.lab.tasks.task import SPLITS, DataConfig
from mnemos.registry import register

from .results import FIGURES, LARGE, SMALL
from .scenes import Annotation, Scenes, coco_masks, encode
from .task import DetectionTask

_KEPT = 4096  # pictures of a split that are kept once drawn: 50 MB of pixels at side 64, and their annotations
NAMES = ("circle", "triangle", "rectangle", "star")
SMALLEST, LARGEST = 0.07, 0.25  # radii of shapes, as a share of the side
_TRIES = 20  # positions that are tried for a shape
_VISIBLE = 0.5  # the least share of every shape that later shapes leave visible
_CONTRAST = 60.0  # the least distance of a shape's colour from the background's, of 255 per channel


@register
@dataclass(frozen=True)
class ShapesConfig(DataConfig):
    """Generated pictures of circles, triangles, rectangles and stars that hide each other, with boxes and masks.

    Pictures are drawn when they are read; behind the shapes are lines, rings and crosses, which are no objects.
    """

    name: ClassVar[str] = "shapes"

    side: int = 128  # pixels
    most: int = 6  # shapes in a picture; one at least
    train: int = 4000  # pictures
    valid: int = 200
    test: int = 500
    seed: int = 0
    masks: bool = True  # whether masks are trained and scored
    flip: bool = True  # mirror half of the training pictures

    def files(self) -> tuple[()]:
        return ()

    def build(self) -> DetectionTask:
        """The task, with four classes. Raises InputError for settings out of range."""
        self.require("side >= 32", "most >= 1", "train >= 1", "valid >= 1", "test >= 1")
        counts = zip(SPLITS, (self.train, self.valid, self.test), (TRAIN, VALID, TEST), strict=True)
        splits = {split: ShapeScenes(count, self.side, self.most, self.seed, use) for split, count, use in counts}
        # The sizes that occur; of the smallest ones there may be none in a few large pictures.
        largest = math.pi * (LARGEST * self.side) ** 2
        absent = {"medium": largest < SMALL, "large": largest < LARGE}
        figures = [figure for figure in FIGURES if not absent.get(figure.split()[-1], False)]
        return DetectionTask(splits, self.masks, self.flip, figures)


class ShapeScenes(Scenes):
    """`count` pictures of shapes, drawn when they are read: picture i depends on (seed, use, i)."""

    has_masks = True
    classes = NAMES
    categories = tuple(range(1, len(NAMES) + 1))

    def __init__(self, count: int, side: int, most: int, seed: int, use: int) -> None:
        self.sizes = np.full((count, 2), side, np.int64)
        self._side, self._most, self._seed, self._use = side, most, seed, use
        self._read = lru_cache(_KEPT)(self._make)

    def picture(self, index: int) -> NDArray[np.uint8]:
        return self._read(index)[0]

    def annotations(self, index: int) -> Sequence[Annotation]:
        """One entry per shape: its box and area are those of what is visible."""
        return self._read(index)[1]

    def _make(self, index: int) -> tuple[NDArray[np.uint8], list[Annotation]]:
        drawn = draw(generator(self._seed, self._use, index), self._side, self._most)
        entries: list[Annotation] = []
        for shape, mask in zip(drawn.shapes.tolist(), drawn.masks, strict=True):
            lengths = encode(mask)
            box, area = coco_masks().toBbox(lengths).tolist(), int(coco_masks().area(lengths))
            entries.append({"category_id": shape + 1, "bbox": box, "area": area, "iscrowd": 0, "segmentation": lengths})
        return drawn.pixels, entries


class Drawing(NamedTuple):
    """A picture and its shapes."""

    pixels: NDArray[np.uint8]  # [side, side, 3]
    shapes: NDArray[np.int64]  # [N], in `NAMES`
    masks: NDArray[np.bool_]  # [N, side, side], of what is visible


def draw(random: np.random.Generator, side: int, most: int) -> Drawing:
    """A picture of 1 to `most` shapes in front of lines, rings and crosses, with noise over all.

    A shape hides what was drawn before it, but at least half of every shape stays visible; a shape that finds no such
    position in 20 tries is left out. Cost: about 40 side² operations per shape.
    """
    # --- background: a gradient, and what is no object ---
    grid = np.mgrid[:side, :side].astype(np.float32) + 0.5  # pixel centres as (y, x)
    colour = random.uniform(40, 215, 3).astype(np.float32)
    slope = random.uniform(-40, 40, (3, 2)).astype(np.float32)
    canvas = colour + np.einsum("ca,ayx->yxc", slope, grid / side - 0.5)
    for _ in range(random.integers(0, 5)):
        canvas[_distractor(random, grid, side)] = random.uniform(0, 255, 3)

    # --- shapes, from the back to the front ---
    shapes: list[int] = []
    whole: list[int] = []
    masks: list[NDArray[np.bool_]] = []
    for _ in range(random.integers(1, most + 1)):
        shape = int(random.integers(len(NAMES)))
        for _ in range(_TRIES):
            mask = _shape(random, grid, side, shape)
            hidden = [np.count_nonzero(old & ~mask) < _VISIBLE * n for old, n in zip(masks, whole, strict=True)]
            if not any(hidden):
                break
        else:
            continue
        masks = [old & ~mask for old in masks] + [mask]
        shapes.append(shape)
        whole.append(int(np.count_nonzero(mask)))
        behind = canvas[mask].mean(0)
        fill = random.uniform(0, 255, 3)
        while np.abs(fill - behind).max() < _CONTRAST:
            fill = random.uniform(0, 255, 3)
        canvas[mask] = fill

    noise = random.normal(0, random.uniform(2, 12), canvas.shape)
    pixels = (canvas + noise).clip(0, 255).astype(np.uint8)
    return Drawing(pixels, np.array(shapes, np.int64), np.stack(masks))


def _shape(random: np.random.Generator, grid: NDArray[np.float32], side: int, shape: int) -> NDArray[np.bool_]:
    """The mask of a shape of a random size, position and rotation, all of it within the picture."""
    radius = side * float(np.exp(random.uniform(np.log(SMALLEST), np.log(LARGEST))))
    centre = random.uniform(radius, side - radius, 2)
    turn = random.uniform(0, 2 * np.pi)
    if NAMES[shape] == "circle":
        return np.hypot(*(grid - centre[:, None, None])) <= radius
    if NAMES[shape] == "triangle":
        angles = turn + np.array([0, 1, 2]) * (2 * np.pi / 3) + random.uniform(-0.3, 0.3, 3)
        return _inside(grid, centre, angles, np.full(3, radius))
    if NAMES[shape] == "rectangle":
        half = random.uniform(0.35, 0.8)  # half the angle between two corners: how long the rectangle is
        return _inside(grid, centre, turn + np.array([-half, half, np.pi - half, np.pi + half]), np.full(4, radius))
    radii = np.tile([radius, 0.45 * radius], 5)
    return _inside(grid, centre, turn + np.arange(10) * (np.pi / 5), radii)


def _inside(
    grid: NDArray[np.float32], centre: NDArray[np.floating], angles: NDArray[np.floating], radii: NDArray[np.floating]
) -> NDArray[np.bool_]:
    """The pixels whose centre is in a polygon (even-odd rule). angles, radii: of its corners around the centre."""
    y, x = grid
    corners = centre[:, None] + radii * np.stack([np.sin(angles), np.cos(angles)])
    inside = np.zeros(y.shape, np.bool_)
    for (y1, x1), (y2, x2) in zip(corners.T, np.roll(corners, -1, 1).T, strict=True):
        crosses = (y1 <= y) != (y2 <= y)
        inside ^= crosses & (x < x1 + (y - y1) * ((x2 - x1) / (y2 - y1 if y2 != y1 else 1.0)))
    return inside


def _distractor(random: np.random.Generator, grid: NDArray[np.float32], side: int) -> NDArray[np.bool_]:
    """The mask of a line across the picture, of a ring, or of a cross."""
    centre = random.uniform(0, side, 2)[:, None, None]
    turn, thick = random.uniform(0, np.pi), side * random.uniform(0.008, 0.02)
    along, across = np.sin(turn), np.cos(turn)
    y, x = grid - centre
    first, second = np.abs(y * across - x * along), np.abs(y * along + x * across)
    what = random.integers(3)
    if what == 0:
        return first <= thick
    radius = side * random.uniform(0.06, 0.15)
    if what == 1:
        return np.abs(np.hypot(y, x) - radius) <= thick
    return ((first <= thick) & (second <= radius)) | ((second <= thick) & (first <= radius))
