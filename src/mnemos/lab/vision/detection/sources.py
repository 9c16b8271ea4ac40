"""The configurations of detection data: generated shapes, COCO's format, and VOC's."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from mnemos.config import DataConfig
from mnemos.generators import TEST, TRAIN, VALID
from mnemos.lab.tasks.row_order import held_out
from mnemos.lab.tasks.task import Split
from mnemos.registry import register
from mnemos.types import InputError

from .average_precision import FIGURES, LARGE, SMALL
from .files import FileScenes, find_list, find_split, read_coco, read_voc
from .scenes import Part, Scenes
from .shapes import LARGEST, ShapeScenes
from .task import DetectionTask


@register
@dataclass(frozen=True)
class ShapesConfig(DataConfig):
    """Generated pictures of circles, triangles, rectangles and stars that hide each other, with boxes and masks.

    A picture has `side` × `side` pixels and 1 to `most` shapes in front of lines, rings and crosses, which are not to
    be found. `train`, `valid` and `test` are the numbers of pictures; all are drawn from `seed` when they are read.
    masks: whether masks are trained and scored. flip: mirror half of the training pictures.
    """

    name: ClassVar[str] = "shapes"

    side: int = 128
    most: int = 6
    train: int = 4000
    valid: int = 200
    test: int = 500
    seed: int = 0
    masks: bool = True
    flip: bool = True

    def files(self) -> tuple[()]:
        """None: all pictures are drawn."""
        return ()

    def build(self) -> DetectionTask:
        """The task, with four classes. Raises InputError for settings out of range."""
        for name, least in (("side", 32), ("most", 1), ("train", 1), ("valid", 1), ("test", 1)):
            if getattr(self, name) < least:
                raise InputError(f"data.{name}: expected at least {least}, found {getattr(self, name)}; raise it")
        uses: dict[Split, tuple[int, int]] = {
            "train": (self.train, TRAIN),
            "valid": (self.valid, VALID),
            "test": (self.test, TEST),
        }
        splits: dict[Split, Scenes] = {
            split: ShapeScenes(count, self.side, self.most, self.seed, use) for split, (count, use) in uses.items()
        }
        # The sizes that occur; of the smallest ones there may be none in a few large pictures.
        largest = math.pi * (LARGEST * self.side) ** 2
        absent = {"medium": largest < SMALL, "large": largest < LARGE}
        figures = [figure for figure in FIGURES if not absent.get(figure.split()[-1], False)]
        return DetectionTask(splits, self.masks, self.flip, figures)


@register
@dataclass(frozen=True)
class COCOConfig(DataConfig):
    """Photos with annotations in COCO's format: COCO 2017 itself, or any folder of that format.

    `folder` has annotations/instances_SPLIT.json and the photos in SPLIT (or annotations/SPLIT.json,
    SPLIT/_annotations.coco.json, SPLIT.json; photos also in images/SPLIT or images). train, test: the names of the
    splits; "": train2017 and val2017, or their usual other names. The test split is COCO's validation split, whose
    annotations are public. A test split with the name of the training split scores photos that are trained on.
    `valid_size` training photos, chosen at random, are the validation split; 0: it is the test split, as is usual for
    COCO, and then nothing may be chosen by it. masks, flip: see `ShapesConfig`. workers: processes that read and decode
    photos and masks in advance; 0: the training process does.
    """

    name: ClassVar[str] = "coco"

    folder: str = "coco"
    train: str = ""
    test: str = ""
    valid_size: int = 0
    masks: bool = True
    flip: bool = True
    workers: int = 0

    def files(self) -> tuple[Path, ...]:
        """The two annotation files. Their photos are not hashed."""
        return tuple(
            find_split(self.folder, split, train)[0] for split, train in ((self.train, True), (self.test, False))
        )

    def build(self) -> DetectionTask:
        """The task. Cost: annotations in memory; the first and last bytes of up to 20,000 photos are read.

        Raises InputError for a folder of another layout, wrong annotations, and missing or truncated photos.
        """
        train = read_coco(*find_split(self.folder, self.train, training=True))
        known = dict(zip(train.categories, train.classes, strict=True))
        same = self.test != "" and self.test == self.train
        test = train if same else read_coco(*find_split(self.folder, self.test, training=False), known)
        return _opened(train, test, self.valid_size, self.masks, self.flip, self.workers)


@register
@dataclass(frozen=True)
class VOCConfig(DataConfig):
    """Photos with boxes in the format of PASCAL VOC: the folder of one year, such as VOC2012.

    train, test: the names of lists in ImageSets/Main. `valid_size`, flip, workers: see `COCOConfig`. There
    are no masks.
    """

    name: ClassVar[str] = "voc"

    folder: str = "VOC2012"
    train: str = "train"
    test: str = "val"
    valid_size: int = 0
    flip: bool = True
    workers: int = 0

    def files(self) -> tuple[Path, ...]:
        """The lists of the splits. Annotations and photos are not hashed."""
        return find_list(self.folder, self.train), find_list(self.folder, self.test)

    def build(self) -> DetectionTask:
        """The task. Raises InputError for a folder of another layout, and for wrong or missing files."""
        train = read_voc(self.folder, self.train)
        known = dict(zip(train.categories, train.classes, strict=True))
        test = read_voc(self.folder, self.test, known)
        return _opened(train, test, self.valid_size, False, self.flip, self.workers)


def _opened(
    train: FileScenes, test: FileScenes, valid_size: int, masks: bool, flip: bool, workers: int
) -> DetectionTask:
    """The task of two splits of files, and a line about each."""
    splits: dict[Split, Scenes] = {"train": train, "valid": test, "test": test}
    if not 0 <= valid_size < len(train):
        raise InputError(
            f"data.valid_size: expected 0 to {len(train) - 1:,}, fewer than the training photos, found {valid_size}; "
            "change it"
        )
    if valid_size:
        valid, rest = held_out(len(train), (valid_size,), "data.valid_size")
        splits |= {"valid": Part(train, valid), "train": Part(train, rest)}
    rows = range(len(splits["train"]))
    for split, scenes in (("valid", splits["valid"]), ("test", test)):
        every = [one for row in range(len(scenes)) for one in scenes.annotations(row)]
        if all(one["iscrowd"] for one in every):
            fix = "raise data.valid_size" if split == "valid" and valid_size else "name an annotated split as data.test"
            found = "none"
            if every:
                found = "groups (iscrowd 1) or difficult objects alone"
                fix = "set iscrowd, or VOC's difficult, to 0 where an annotation is one plain object"
            raise InputError(f"{split} split: expected an annotated object, to score detections, found {found}; {fix}")
    shown = [row for row in rows if any(not one["iscrowd"] for one in splits["train"].annotations(row))]
    empty = len(rows) - len(shown)
    splits["train"] = Part(splits["train"], np.array(shown, np.int64))
    task = DetectionTask(splits, masks, flip, _figures(splits["valid"], splits["test"]), workers)
    task.about = tuple(_about(train, test, valid_size, empty))
    return task


def _figures(*held: Scenes) -> list[str]:
    """The figures of sizes of which every held-out split has an object."""
    found = set(FIGURES)
    for scenes in held:
        areas = [one["area"] for row in range(len(scenes)) for one in scenes.annotations(row) if not one["iscrowd"]]
        for size, (low, high) in {"small": (0, SMALL), "medium": (SMALL, LARGE), "large": (LARGE, math.inf)}.items():
            if not any(low <= area <= high for area in areas):
                found -= {f"AP {size}", f"AR {size}"}
    return [figure for figure in FIGURES if figure in found]


def _about(train: FileScenes, test: FileScenes, valid_size: int, empty: int) -> Iterator[str]:
    left = f"; {empty:,} without an object are not trained on" if empty else ""
    yield f"train  {train.said()}{left}"
    chosen = f"{valid_size:,} of the training photos, chosen at random"
    held = chosen if valid_size else "the test split, so nothing may be chosen by it"
    yield f"valid  {held}"
    yield f"test   {test.said()}"
