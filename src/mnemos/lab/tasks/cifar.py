"""CIFAR-10 and CIFAR-100: photos of 32 × 32 pixels in 10 or 100 classes."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from mnemos.config import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .augment import AugmentConfig
from .cifar_files import Variant, download_cifar, find_cifar, read_cifar
from .image_task import Colours, ImageTask, View
from .pictures import ArrayPictures
from .splits import held_out

COLOURS = {  # mean and standard deviation of the official training sets
    "cifar10": Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@register
@dataclass(frozen=True)
class CIFARConfig(DataConfig):
    """CIFAR-10 or CIFAR-100 from `folder`: the official archives, packed or unpacked, or two tar files of JPEGs.

    `download` first fetches the official binary archive into `folder`. A fixed random choice of `valid_size` training
    images is the validation split; the test split is the official one. Images are decoded once into memory (150 MB),
    and scaled if `size` is not 32. `workers`: processes that prepare batches in advance; useful with the policy timm.
    Raises InputError, with the file's name, if a file is missing or damaged.
    """

    name: ClassVar[str] = "cifar"

    folder: str = "cifar"
    variant: Variant = "cifar10"
    download: bool = False
    size: int = 32
    valid_size: int = 5_000
    workers: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def files(self) -> list[Path]:
        """The files that are read: the official files, their archive, or the two tar files."""
        return find_cifar(self.folder, self.variant)

    def build(self) -> ImageTask:
        """The task: 10 or 100 classes, images [B, 3, size, size]."""
        if self.size < 1:
            raise InputError(f"data.size must be at least 1, found {self.size}")
        if self.download:
            download_cifar(self.folder, self.variant)
        images = _read(self.folder, self.variant)
        valid, train = held_out(len(images.train[1]), (self.valid_size,), self.name)
        train_pictures, test_pictures = (
            ArrayPictures(*part, self.size, self.augment.centre) for part in (images.train, images.test)
        )
        return ImageTask(
            {
                "train": View(train_pictures, train),
                "valid": View(train_pictures, valid),
                "test": View.whole(test_pictures),
            },
            images.names,
            self.size,
            COLOURS[self.variant],
            self.augment,
            self.workers,
        )


# Runs that are compared open the same files one after the other, and unpacking takes seconds.
_read = lru_cache(maxsize=1)(read_cifar)
