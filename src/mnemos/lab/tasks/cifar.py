"""CIFAR-10 and CIFAR-100: photos of 32 × 32 pixels in 10 or 100 classes.

The binary release has records of one label byte (CIFAR-100: two, the second is the fine label) and 3·32·32 bytes, the
planes of red, green and blue. Pictures are in SPLIT/CLASS/*.jpg, unpacked or in one tar file for each split. The
release in pickles is not read, because a pickle is a program.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.lab.tasks.task import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .augment import AugmentConfig
from .files import archive_members, download, read_bytes, skipped
from .image_task import Colours, ImageTask, View
from .pictures import ArrayPictures, parse_image
from .row_order import held_out

Variant = Literal["cifar10", "cifar100"]
Labelled = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # pixels [N, 32, 32, 3], labels [N]
URL = "https://www.cs.toronto.edu/~kriz/"


class Official(NamedTuple):
    """What is official of a variant: the binary release and its files, and what marks the release in pickles.

    The test file and the file of class names are the last ones. colours: those of the training images.
    """

    classes: int
    colours: Colours
    archive: str
    sha256: str
    files: tuple[str, ...]
    pickles: tuple[str, ...]


OFFICIAL: dict[Variant, Official] = {
    "cifar10": Official(
        10,
        Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt"),
        ("cifar-10-python.tar.gz", "batches.meta"),
    ),
    "cifar100": Official(
        100,
        Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        "cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ("train.bin", "test.bin", "fine_label_names.txt"),
        ("cifar-100-python.tar.gz", "meta"),
    ),
}


@register
@dataclass(frozen=True)
class CIFARConfig(DataConfig):
    """CIFAR-10 or CIFAR-100 from `folder`: the binary release, packed or unpacked, or pictures in class folders.

    `download` first fetches the official binary archive into `folder`. Pictures are in train/CLASS/*.jpg and
    test/CLASS/*.jpg, or in one tar file with "train" and one with "test" in its name. A fixed random choice of
    `valid_size` training images is the validation split; the test split is the official one. Images are decoded once
    into memory (150 MB), and scaled if `size` is not 32. `workers`: processes that prepare batches in advance; useful
    with the policy timm.
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
        """The files that are read: the binary release, its archive, or the pictures and their tar files."""
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
            OFFICIAL[self.variant].colours,
            self.augment,
            self.workers,
        )


def download_cifar(folder: str | Path, variant: Variant) -> None:
    """Download the official binary archive into `folder` unless it is there; its SHA-256 is checked."""
    about = OFFICIAL[variant]
    download(URL + about.archive, Path(folder) / about.archive, about.sha256)


def find_cifar(folder: str | Path, variant: Variant) -> list[Path]:
    """The files that `read_cifar` reads: those of the binary release, its archive, or pictures or their tar files."""
    if release := _release(Path(folder), OFFICIAL[variant]):
        return release
    places = _picture_places(Path(folder), OFFICIAL[variant])
    return [file for place in places for file in (_pictures_below(place) if place.is_dir() else [place])]


class Images(NamedTuple):
    """The images and labels of the training and the test files, and the class names."""

    train: Labelled
    test: Labelled
    names: tuple[str, ...]


def read_cifar(folder: str | Path, variant: Variant) -> Images:
    """Read the images in a folder (`CIFARConfig`).

    Raises InputError, with the file's name, if the files do not exist or are pickles, or if one is damaged or belongs
    to the other variant.
    """
    folder, about = Path(folder), OFFICIAL[variant]
    if not (release := _release(folder, about)):
        return _read_pictures(_picture_places(folder, about), about.classes)
    if len(release) == 1:
        where, contents = release[0], _members(release[0], about.files)
    else:
        where, contents = release[0].parent, {path.name: read_bytes(path) for path in release}
    *batches, test, meta = about.files
    parts = [_parse_records(contents[name], f"{where}: {name}", variant) for name in batches]
    names = tuple(contents[meta].decode(errors="replace").split())
    if len(names) != about.classes:
        raise InputError(
            f"{where}: {meta}: expected {about.classes} class names, found {len(names)}; fetch the file again"
        )
    train = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    return Images(train, _parse_records(contents[test], f"{where}: {test}", variant), names)


# Runs that are compared open the same files one after the other, and unpacking takes seconds.
_read = lru_cache(maxsize=1)(read_cifar)


def _release(folder: Path, about: Official) -> list[Path]:
    """The files of the binary release, in the folder or in one inside it, or the archive; [] without them."""
    if not folder.is_dir():
        raise InputError(
            f"{folder}: expected a folder with {about.archive}, found no folder; correct data.folder, or set "
            "data.download True"
        )
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        if all((place / name).is_file() for name in about.files):
            return [place / name for name in about.files]
    return [folder / about.archive] if (folder / about.archive).is_file() else []


def _picture_places(folder: Path, about: Official) -> list[Path]:
    """The folders train and test of pictures, or the two tar files."""
    pair = [folder / "train", folder / "test"]
    if all(path.is_dir() for path in pair):
        return pair
    tars = [p for p in sorted(folder.iterdir()) if p.name.endswith((".tar", ".tgz", ".tar.gz")) and p.is_file()]
    packed = [[p for p in tars if split in p.name] for split in ("train", "test")]
    if all(len(found) == 1 for found in packed):
        return [packed[0][0], packed[1][0]]
    pickles = [path for name in about.pickles for path in (folder / name, *folder.glob(f"*/{name}")) if path.is_file()]
    if pickles:
        raise InputError(
            f"{pickles[0]}: expected the binary release, found the one in pickles, which are programs and are not "
            f"read; fetch {about.archive} from {URL}, or set data.download True"
        )
    raise InputError(
        f"{folder}: expected {about.archive} or its files, or pictures in train/CLASS and test/CLASS or in one "
        "*train*.tar.gz and one *test*.tar.gz, found none of these; correct data.folder, or set data.download True"
    )


def _members(archive: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The files `names` of an archive, in whatever folder of it they are."""
    wanted = archive_members(archive, lambda name: Path(name).name in names)
    found = {Path(member.name).name: member.read() for member in wanted}
    for name in names:
        if name not in found:
            raise InputError(f"{archive}: expected it to contain {name}, found no such file; fetch the archive again")
    return found


def _parse_records(data: bytes, where: str, variant: Variant) -> Labelled:
    """The images and labels of a file of the binary release."""
    labels, classes = 2 if variant == "cifar100" else 1, OFFICIAL[variant].classes
    record = labels + 3 * 32 * 32
    if not data or len(data) % record:
        raise InputError(f"{where}: expected records of {record} bytes, found {len(data)} bytes; fetch the file again")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    found = records[:, labels - 1]
    if found.max() >= classes:
        raise InputError(
            f"{where}: expected labels 0 to {classes - 1} of {variant}, found {found.min()} to {found.max()}; fetch "
            "the file again"
        )
    return np.ascontiguousarray(records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), found.copy()


def _read_pictures(places: list[Path], classes: int) -> Images:
    (train, names), (test, test_names) = (_labelled_pictures(place, classes) for place in places)
    if names != test_names:
        different = sorted(set(names) ^ set(test_names))[0]
        raise InputError(
            f"{places[1]}: expected the same classes as in {places[0].name}, found {different!r} in one of them only; "
            "check both"
        )
    return Images(train, test, names)


def _labelled_pictures(place: Path, classes: int) -> tuple[Labelled, tuple[str, ...]]:
    """Images and labels of a folder or a tar of …/CLASS/*.jpg, sorted by class and name, and the sorted class names."""
    files: Iterator[tuple[str, bytes]]
    if place.is_dir():
        files = ((path.relative_to(place).as_posix(), read_bytes(path)) for path in _pictures_below(place))
    else:
        files = ((member.name, member.read()) for member in archive_members(place, _is_picture))
    found: list[tuple[str, NDArray[np.uint8]]] = []
    for name, data in files:
        pixels = np.array(parse_image(data, f"{place}: {name}"))
        if pixels.shape != (32, 32, 3):
            raise InputError(
                f"{place}: {name}: expected 32 x 32 pixels, found {pixels.shape[1::-1]}; use CIFAR's images"
            )
        found.append(("/".join(Path(name).parts[-2:]), pixels))
    found.sort(key=lambda one: one[0])
    class_of = [name.partition("/")[0] for name, _ in found]
    names = tuple(sorted(set(class_of)))
    if len(names) != classes:
        raise InputError(f"{place}: expected {classes} class folders, found {len(names)}; check data.variant")
    labels = np.array([names.index(name) for name in class_of], np.uint8)
    return (np.stack([pixels for _, pixels in found]), labels), names


def _pictures_below(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.glob("*/*")) if _is_picture(f"{path.parent.name}/{path.name}"))
    return [path for path in found if not skipped(path)]


def _is_picture(name: str) -> bool:
    path = Path(name)
    return not path.name.startswith(".") and path.suffix in (".jpg", ".jpeg", ".png") and len(path.parts) > 1
