"""CIFAR-10 and CIFAR-100: 32 × 32 photos of 10 or 100 kinds of things."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from mnemos.config import DataConfig
from mnemos.types import InputError

from .augment import AugmentConfig
from .cifar_files import Variant, download_cifar, read_cifar
from .image_task import Colours, ImageTask, View
from .pictures import ArrayPictures
from .splits import held_out

COLOURS = {  # of the official training sets
    "cifar10": Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@dataclass(frozen=True)
class CIFARConfig(DataConfig):
    """CIFAR-10 or CIFAR-100 from `folder`: the official archives, packed or unpacked, or a pair of tars of JPEGs.

    `download` fetches the official binary archive there first. `valid_size` training images, drawn once and for all,
    are the validation split; the test split is the official one. Images are decoded once, into memory (150 MB), and
    scaled where `size` is not 32. `workers`: processes that make batches ahead of time, for the policy timm.
    Raises InputError, naming the file, where one is missing or damaged.
    """

    name: ClassVar[str] = "cifar"

    folder: str = "cifar"
    variant: Variant = "cifar10"
    download: bool = False
    size: int = 32
    valid_size: int = 5_000
    workers: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def build(self) -> ImageTask:
        """The task: 10 or 100 classes, images [B, 3, size, size]."""
        if self.size < 1:
            raise InputError(f"data.size must be at least 1, found {self.size}")
        if self.download:
            download_cifar(self.folder, self.variant)
        images = _read(self.folder, self.variant)
        valid, train = held_out(len(images.train[1]), (self.valid_size,), self.name)
        known, test = (ArrayPictures(*part, self.size, self.augment.centre) for part in (images.train, images.test))
        return ImageTask(
            {"train": View(known, train), "valid": View(known, valid), "test": View.whole(test)},
            images.names,
            self.size,
            COLOURS[self.variant],
            self.augment,
            self.workers,
        )


# A run opens its task three times, and unpacking takes seconds.
_read = lru_cache(maxsize=1)(read_cifar)
