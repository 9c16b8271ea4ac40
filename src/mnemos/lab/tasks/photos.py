"""Photos in class folders, in ImageNet's layout or with one folder per class."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from mnemos.lab.tasks.task import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .augment import AugmentConfig
from .files import first_names, repeated
from .folders import Part, Paths, read_layout, read_to_score
from .image_task import IMAGENET, ImageTask, Split, View
from .pictures import FilePictures, check_image_files, pillow

COMPARED = 20_000  # photos at most whose contents are compared, to say which are in two splits: a second or two


@register
@dataclass(frozen=True)
class PhotosConfig(DataConfig):
    """Photos in class folders: FOLDER/CLASS/*.jpg, or FOLDER/train/CLASS/*.jpg with val (and test) beside train.

    Classes are the folder names, sorted. A share `held_out` of each class replaces every split that has no folder; a
    folder val without test is the test split. See `folders.read_layout` for the details.
    Photos may have any size, colour and format that Pillow reads. They are rotated upright, converted to RGB, scaled
    (bicubic; small ones are enlarged) and cropped to `size` × `size` pixels, and normalised by ImageNet's mean and
    standard deviation. Photos are decoded when they are needed: in advance by `workers` processes, or by this process
    if `workers` is 0. Decoded photos for evaluation and for the light policy are kept if all of them fit in 256 MB.
    Needs the extra `vision`. Raises InputError for a wrong folder layout and for settings out of range.
    """

    name: ClassVar[str] = "photos"

    folder: str = "photos"
    size: int = 224
    held_out: float = 0.1
    workers: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def files(self) -> Paths:
        """Every photo of the three splits."""
        parts = read_layout(self.folder, self.held_out)
        return Paths(list({id(part.files): part.files for part in parts.values()}.values()))

    def build(self) -> ImageTask:
        """The task. The folder is listed, and the beginning and the end of each photo are read (`check_image_files`).

        Raises InputError for a file that is no image or is truncated, before a run trains on the others.
        """
        parts = read_layout(self.folder, self.held_out)
        task = self._task(parts)
        task.about = tuple(_about(parts))
        return task

    def build_to_score(self, split: Literal["valid", "test"], trained: Any = None) -> ImageTask:
        """The task that scores other photos than a run was trained on, in every split (`folders.read_to_score`)."""
        part, whole = read_to_score(self.folder, split)
        task = self._task({"train": part, "valid": part, "test": part})
        what = "all" if whole else f"the {split} split"
        task.about = (f"scored: {what}, {_describe(part)}: {part.files.folder}",)
        task.whole = whole
        return task

    def _task(self, parts: dict[Split, Part]) -> ImageTask:
        if self.size < 1:
            raise InputError(f"data.size must be at least 1, found {self.size}")
        pillow()
        opened = {id(part.files): part.files for part in parts.values()}  # several splits may share one folder
        check_image_files(Paths(list(opened.values())))
        pictures = {key: FilePictures(files, self.size, self.augment.centre) for key, files in opened.items()}
        splits: dict[Split, View] = {split: View(pictures[id(part.files)], part.rows) for split, part in parts.items()}
        return ImageTask(
            splits,
            parts["train"].files.classes,
            self.size,
            IMAGENET,
            self.augment,
            self.workers,
        )


def _about(parts: dict[Split, Part]) -> Iterator[str]:
    """Lines that say how many photos and classes each split has, and where it comes from."""
    train = parts["train"].files
    order: tuple[Split, ...] = ("train", "valid", "test")
    for split in order:
        part = parts[split]
        if split == "train":
            source = f": {first_names(train.classes)}"
        else:
            source = ", a share of each class" if part.files is train else f": {part.files.folder}"
        yield f"{split:5}  {_describe(part)}{source}"
    if sum(len(part.rows) for part in parts.values()) <= COMPARED:
        yield from repeated({split: dict(_contents(parts[split])) for split in order})


def _contents(part: Part) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """The path of each photo, with its size and the hash of its first 64 KiB."""
    for row in part.rows.tolist():
        path = part.files.path(row)
        with open(path, "rb") as opened:
            size, head = os.fstat(opened.fileno()).st_size, opened.read(2**16)
        yield path, (size, hashlib.sha256(head).digest())


def _describe(part: Part) -> str:
    """How many photos and classes, with the sizes of the smallest and the largest class."""
    counts = np.bincount(part.files.labels[part.rows], minlength=len(part.files.classes))
    least, most = int(counts.min()), int(counts.max())
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{len(part.rows):,} photos of {len(counts):,} classes, {each} per class"
