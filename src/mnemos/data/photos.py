"""Photos of any kind in class folders: ImageNet's layout, or just a folder a class."""

from dataclasses import dataclass, field
from typing import ClassVar

from mnemos.config import DataConfig
from mnemos.types import InputError

from .augment import AugmentConfig
from .folders import read_layout
from .image_task import IMAGENET, ImageTask, Split, View
from .pictures import FilePictures, pillow


@dataclass(frozen=True)
class PhotosConfig(DataConfig):
    """Photos in class folders: FOLDER/CLASS/*.jpg, or FOLDER/train/CLASS/*.jpg beside val (and test) of the same kind.

    Classes are the folders' names, sorted. What is held out, and how much: see `folders.read_layout`; in short, val
    alone is the test split, and a share `held_out` of each class makes up for each split that is missing.
    Every format that Pillow reads, of every size and colour: turned upright, made RGB, scaled (bicubic) and cut to
    `size` × `size` pixels, smaller ones enlarged. Photos are decoded when they are needed, by `workers` processes
    ahead of time (0: by this one), and normalised by ImageNet's mean and standard deviation. What is decoded for
    evaluation or the light policy is kept where all of it fits in a quarter of a gigabyte.
    Needs the extra `vision`. Raises InputError where folder, sizes or shares are not as they must be.
    """

    name: ClassVar[str] = "photos"

    folder: str = "photos"
    size: int = 224
    held_out: float = 0.1
    workers: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def build(self) -> ImageTask:
        """The task; its folder is looked through, no photo is opened."""
        if self.size < 1:
            raise InputError(f"data.size must be at least 1, found {self.size}")
        pillow()
        parts = read_layout(self.folder, self.held_out)
        opened = {id(part.files): part.files for part in parts.values()}  # several splits may come from one folder
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
