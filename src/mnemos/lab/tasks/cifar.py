"""CIFAR-10 and CIFAR-100: photos of 32 × 32 pixels in 10 or 100 classes.

The official release is read by torchvision, which checks its files before it unpickles them. Pictures are in
SPLIT/CLASS/*.jpg, unpacked or in one tar file for each split.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos import libraries
from mnemos.lab.tasks.task import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .augment import AugmentConfig
from .files import archive_members, read_bytes, skipped
from .image_task import Colours, ImageTask, View
from .pictures import ArrayPictures, is_image, parse_image
from .row_order import held_out

Variant = Literal["cifar10", "cifar100"]
Labelled = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # pixels [N, 32, 32, 3], labels [N]
COLOURS: dict[Variant, Colours] = {  # of the training images
    "cifar10": Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@register
@dataclass(frozen=True)
class CIFARConfig(DataConfig):
    """CIFAR-10 or CIFAR-100 from `folder`: the official release, packed or unpacked, or pictures in class folders.

    The release is that for Python, as torchvision reads it; `download` first fetches its archive into `folder`.
    Pictures are in train/CLASS/*.jpg and test/CLASS/*.jpg, or in one tar file with "train" and one with "test" in its
    name. A fixed random choice of `valid_size` training images is the validation split; the test split is the official
    one. Images are decoded once into memory (150 MB), and scaled if `size` is not 32. `workers`: processes that prepare
    batches in advance; useful with the policy timm. Needs the extra `vision`.
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
        folder, release = Path(self.folder), _release(self.variant)
        if (unpacked := folder / release.base_folder).is_dir():
            names = [name for name, _ in (*release.train_list, *release.test_list)]
            return [unpacked / name for name in (*names, release.meta["filename"])]
        if (folder / release.filename).is_file():
            return [folder / release.filename]
        return [
            file for path in _picture_folders(folder) for file in (_pictures_below(path) if path.is_dir() else [path])
        ]

    def build(self) -> ImageTask:
        if self.size < 1:
            raise InputError(f"data.size must be at least 1, found {self.size}")
        images = _read(self.folder, self.variant, self.download)
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


class Images(NamedTuple):
    """The images and labels of the training and the test files, and the class names."""

    train: Labelled
    test: Labelled
    names: tuple[str, ...]


def read_cifar(folder: str | Path, variant: Variant, download: bool = False) -> Images:
    """Read the images in a folder (`CIFARConfig`)."""
    folder, release = Path(folder), _release(variant)
    from torchvision.datasets.utils import check_integrity

    packed = (folder / release.filename).is_file() and not (folder / release.base_folder).is_dir()
    if download or packed or (folder / release.base_folder).is_dir():
        try:
            if packed and not download and not check_integrity(folder / release.filename, release.tgz_md5):
                raise ValueError("its sum is another")  # torchvision would fetch it, unasked
            known, test = (release(folder, train=train, download=download or packed) for train in (True, False))
        except Exception as error:  # of the network, the archive and the checks
            problem = " ".join(str(error).split())
            raise InputError(
                f"{folder}: expected {release.filename} or its files in {release.base_folder}, but torchvision could "
                f"not read them ({problem:.160}); fetch them again, or set data.download True"
            ) from None
        labelled = [(one.data, np.array(one.targets, np.uint8)) for one in (known, test)]
        return Images(labelled[0], labelled[1], tuple(known.classes))
    folders = _picture_folders(folder)
    (train, names), (rest, test_names) = (_labelled_pictures(path, variant) for path in folders)
    if names != test_names:
        different = sorted(set(names) ^ set(test_names))[0]
        raise InputError(
            f"{folders[1]}: expected the same classes as in {folders[0].name}, found {different!r} in one of them; "
            "check both"
        )
    return Images(train, rest, names)


# Runs that are compared open the same files one after the other, and unpacking takes seconds.
_read = lru_cache(maxsize=1)(read_cifar)


def _release(variant: Variant) -> Any:
    """torchvision's class of the official release."""
    libraries.torchvision()
    from torchvision.datasets import CIFAR10, CIFAR100

    return {"cifar10": CIFAR10, "cifar100": CIFAR100}[variant]


def _picture_folders(folder: Path) -> tuple[Path, Path]:
    """The folders train and test of pictures, or the two tar files."""
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return folder / "train", folder / "test"
    tars = sorted(p for p in folder.glob("*") if p.name.endswith((".tar", ".tgz", ".tar.gz")) and p.is_file())
    train, test = ([path for path in tars if split in path.name] for split in ("train", "test"))
    if len(train) == len(test) == 1:
        return train[0], test[0]
    raise InputError(
        f"{folder}: expected cifar-10-python.tar.gz or cifar-100-python.tar.gz, or pictures in train/CLASS and "
        "test/CLASS or in one *train*.tar.gz and one *test*.tar.gz, found none of these; correct data.folder, or set "
        "data.download True"
    )


def _labelled_pictures(path: Path, variant: Variant) -> tuple[Labelled, tuple[str, ...]]:
    """Images and labels of a folder or a tar of …/CLASS/*.jpg, sorted by class and name, and the sorted class names."""
    if path.is_dir():
        files = ((file.relative_to(path).as_posix(), read_bytes(file)) for file in _pictures_below(path))
    else:
        files = ((member.name, member.read()) for member in archive_members(path, is_image))
    pictures: list[tuple[tuple[str, ...], NDArray[np.uint8]]] = []
    for name, data in files:
        pixels = np.array(parse_image(data, f"{path}: {name}"))
        if pixels.shape != (32, 32, 3):
            raise InputError(
                f"{path}: {name}: expected 32 x 32 pixels, found {pixels.shape[1::-1]}; use CIFAR's images"
            )
        pictures.append((Path(name).parts[-2:], pixels))
    pictures.sort(key=lambda one: one[0])
    names = tuple(sorted({parts[0] for parts, _ in pictures}))
    classes = {"cifar10": 10, "cifar100": 100}[variant]
    if len(names) != classes:
        raise InputError(f"{path}: expected {classes} class folders, found {len(names)}; check data.variant")
    labels = np.array([names.index(parts[0]) for parts, _ in pictures], np.uint8)
    return (np.stack([pixels for _, pixels in pictures]), labels), names


def _pictures_below(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*/*")) if is_image(path.name) and not skipped(path)]
