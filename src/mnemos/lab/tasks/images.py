"""MNIST, scikit-learn's digits and CIFAR, as images, or the first two as sequences of pixels in row-major order."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mnemos import libraries
from mnemos.lab.errors import FIXES
from mnemos.registry import register
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .augment import AugmentConfig
from .files import archive_members, read_bytes
from .image_task import Colours, ImageTask
from .pictures import ArrayPictures, Pictures, is_image, parse_image
from .row_order import held_out
from .task import SPLITS, DataConfig, Split

Layout = Literal["pixels", "image"]
Variant = Literal["cifar10", "cifar100"]
Labelled = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # pixels [N, H, W] or [N, H, W, 3], labels [N]
COLOURS: dict[Variant, Colours] = {  # of the training images
    "cifar10": Colours((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Colours((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def _no_augmentation() -> AugmentConfig:
    # flip stays False if a user sets a policy only: a mirrored digit is not a digit.
    return AugmentConfig(policy="none", flip=False)


# --- digits: MNIST and scikit-learn's ---


@register
@dataclass(frozen=True)
class MNISTConfig(DataConfig):
    """MNIST, from the folder `path` with its IDX files, gzipped or not.

    `layout`: "pixels", sequences of 784 tokens with 256 values; or "image", [B, 1, 28, 28], which alone can be
    augmented. `size`: a divisor of the side, to which pictures are averaged, square by square; 0: as they are.
    `download` first fetches the official files. A fixed random choice of `valid_size` training images is the validation
    split.
    """

    name: ClassVar[str] = "mnist"

    path: str = "mnist"
    download: bool = False
    valid_size: int = 5_000
    layout: Layout = "pixels"
    size: int = 0
    augment: AugmentConfig = field(default_factory=_no_augmentation)

    def files(self) -> tuple[Path, ...]:
        return (*find_mnist(self.path, "train"), *find_mnist(self.path, "t10k"))

    def build(self) -> ArrayTask | ImageTask:
        if self.download:
            libraries.torchvision()
            from torchvision.datasets import MNIST

            with _of_torchvision(f"{self.path}: the download failed", "try again, or put the four files there"):
                MNIST(self.path, download=True)  # into PATH/MNIST/raw unless the files are there
        known = read_images(*find_mnist(self.path, "train"))
        test = read_images(*find_mnist(self.path, "t10k"))
        if self.size:
            known, test = ((_averaged(pixels, self.size), labels) for pixels, labels in (known, test))
        valid, train = held_out(len(known[1]), (self.valid_size,), self.name)
        splits = [(known[0][rows], known[1][rows]) for rows in (train, valid)]
        return _digits_task(self, [*splits, test], 256, Colours((0.1307,), (0.3081,)))


@register
@dataclass(frozen=True)
class DigitsConfig(DataConfig):
    """Scikit-learn's 1,797 handwritten digits of 8×8 pixels with 17 levels. Needs the extra `data`, and no download.

    `layout`: "pixels", sequences of 64 tokens; or "image", [B, 1, 8, 8], which alone can be augmented.
    """

    name: ClassVar[str] = "digits"

    valid_size: int = 180
    test_size: int = 360
    layout: Layout = "pixels"
    augment: AugmentConfig = field(default_factory=_no_augmentation)

    def files(self) -> tuple[Path, ...]:
        from sklearn import datasets

        return (Path(datasets.__file__).parent / "data" / "digits.csv.gz",)

    def build(self) -> ArrayTask | ImageTask:
        libraries.sklearn()
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
        test, valid, train = held_out(len(labels), (self.test_size, self.valid_size), self.name)
        splits = [(pixels[rows], labels[rows]) for rows in (train, valid, test)]
        return _digits_task(self, splits, 17, Colours((0.3053,), (0.3761,)))


class PixelClassification(ArrayTask):
    """Classification of sequences of pixels, with access to the pictures they come from."""

    pictured = True

    def __init__(self, shape: tuple[int, ...], splits: Mapping[Split, Rows], levels: int) -> None:
        super().__init__(splits, levels, classes=10, max_length=math.prod(shape))
        self.shape, self.names = shape, list(map(str, range(10)))

    def picture(self, split: Split, index: int) -> NDArray[np.uint8]:
        """Image `index` of a split, uint8 [H, W, 1], its levels scaled to 0 … 255. `batches` has the same order."""
        return _scaled(self._splits[split].row(index).reshape(*self.shape, 1), self.vocab_size)


def _digits_task(
    config: MNISTConfig | DigitsConfig, splits: Sequence[Labelled], levels: int, colours: Colours
) -> ArrayTask | ImageTask:
    shape = splits[0][0].shape[1:]
    if config.layout == "image":
        centre, averaged = config.augment.centre, getattr(config, "size", 0) > 0
        pictures: dict[Split, Pictures] = {
            split: ArrayPictures(_scaled(pixels, levels)[..., None], labels, shape[0], centre, averaged)
            for split, (pixels, labels) in zip(SPLITS, splits, strict=True)
        }
        return ImageTask(pictures, list(map(str, range(10))), shape[0], colours, config.augment)
    if config.augment.policy != "none":
        raise InputError(
            f"data.augment.policy: expected 'none' for data.layout pixels, found {config.augment.policy!r}; set "
            "data.layout image"
        )
    rows = [Rows.ragged(x.reshape(-1), np.full(len(x), math.prod(shape)), labels) for x, labels in splits]
    return PixelClassification(shape, dict(zip(SPLITS, rows, strict=True)), levels)


def _scaled(pixels: NDArray[np.integer], levels: int) -> NDArray[np.uint8]:
    # Not through floats where they are these already: MNIST's would take 400 MB.
    return pixels.astype(np.uint8) if levels == 256 else np.rint(pixels * (255 / (levels - 1))).astype(np.uint8)


def _averaged(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    height, width = pixels.shape[1:]
    if side < 1 or height != width or height % side:
        raise InputError(
            f"data.size: expected a divisor of the side of square pictures, found {side} for {height} x {width}; "
            "change it, or use 0 for the pictures as they are"
        )
    squares = pixels.reshape(-1, side, height // side, side, width // side)
    return np.rint(squares.mean((2, 4), dtype=np.float32)).astype(np.uint8)


def read_images(images: Path, labels: Path) -> Labelled:
    """Images [N, H, W] of digits and their labels [N], from two IDX files."""
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if not pixels.size or len(pixels) != len(targets) or targets.max() > 9:
        raise InputError(
            f"{labels}: expected a label from 0 to 9 for each image of {images}, found {len(targets)} up to "
            f"{targets.max(initial=0)} for images {[*pixels.shape]}; check both files"
        )
    return pixels, targets


def read_idx(path: str | Path, axes: int) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes with `axes` axes."""
    data, start = read_bytes(path), 4 + 4 * axes
    magic, *shape = np.frombuffer(data[:start].ljust(start, b"\0"), ">u4").tolist()
    if magic != 0x800 + axes or len(data) != start + math.prod(shape):
        raise InputError(
            f"{path}: expected an IDX file, whose first number is {0x800 + axes}, found the number {magic} and "
            f"{len(data)} bytes for the shape {shape}; fetch the file again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def find_mnist(folder: str | Path, part: str) -> tuple[Path, Path]:
    """The image file and the label file of a part ("train" or "t10k"), gzipped or not, in the folder or its MNIST/raw.

    Of names with additions, such as "t10k-first5k-images-idx3-ubyte", the shortest is taken.
    """
    paths = []
    for what in ("images?idx3", "labels?idx1"):
        patterns = [f"{part}-*{what}-ubyte{ending}" for ending in ("", ".gz")]
        folders = Path(folder), Path(folder, "MNIST", "raw")
        matches = [path for below in folders for pattern in patterns for path in sorted(below.glob(pattern))]
        if not matches:
            raise InputError(
                f"{Path(folder, f'{part}-{what}-ubyte'.replace('?', '-'))}: expected this file, gzipped or not, found "
                "none; set data.path to its folder, or data.download to True"
            )
        paths.append(min(matches, key=lambda path: len(path.name)))
    return paths[0], paths[1]


# --- CIFAR ---


@register
@dataclass(frozen=True)
class CIFARConfig(DataConfig):
    """CIFAR-10 or CIFAR-100 from `folder`: the official release, unpacked, or pictures in class folders.

    `download` first fetches the release for Python into `folder`, unless its archive is there, and unpacks it. Pictures
    are in train/CLASS/*.jpg and test/CLASS/*.jpg, or in one tar file with "train" and one with "test" in its name. A
    fixed random choice of `valid_size` training images is the validation split. Images are held in memory (300 MB), and
    scaled if `size` is not 32. `workers`: processes that prepare batches in advance; useful with the policy timm. Needs
    the extra `vision`.
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
        return [file for path in _picture_folders(folder) for file in _pictures_below(path) or [path]]

    def build(self) -> ImageTask:
        self.require("size >= 1")
        (pixels, labels), test, names = _read_cifar(self.folder, self.variant, self.download)
        valid, train = held_out(len(labels), (self.valid_size,), self.name)
        splits = [*((pixels[rows], labels[rows]) for rows in (train, valid)), test]
        pictures: dict[Split, Pictures] = {
            split: ArrayPictures(*part, self.size, self.augment.centre)
            for split, part in zip(SPLITS, splits, strict=True)
        }
        return ImageTask(pictures, names, self.size, COLOURS[self.variant], self.augment, self.workers)


def read_cifar(
    folder: str | Path, variant: Variant, download: bool = False
) -> tuple[Labelled, Labelled, tuple[str, ...]]:
    """The training images, the test images and the names of classes in a folder (`CIFARConfig`)."""
    folder, release = Path(folder), _release(variant)
    if not download and not (folder / release.base_folder).is_dir():
        folders = _picture_folders(folder)
        (train_images, names), (test_images, others) = (_labelled_pictures(path, variant) for path in folders)
        if different := sorted({*names} ^ {*others}):
            raise InputError(
                f"{folders[1]}: expected the same classes as in {folders[0].name}, found {different[0]!r} in one of "
                "them; check both"
            )
        return train_images, test_images, names
    expected = f"{release.filename} or its files in {release.base_folder}, but torchvision could not read them"
    with _of_torchvision(f"{folder}: expected {expected}", "fetch them again, or set data.download True"):
        known, test = (release(folder, train=train, download=download) for train in (True, False))
    parts = [(one.data, np.array(one.targets, np.uint8)) for one in (known, test)]
    return parts[0], parts[1], tuple(known.classes)


# Runs that are compared open the same files one after the other, and unpacking takes seconds.
_read_cifar = lru_cache(maxsize=1)(read_cifar)


@contextmanager
def _of_torchvision(expected: str, fix: str) -> Iterator[None]:
    """Inside, an error of the network, an archive or its checks is an InputError; the disk's own errors pass."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FIXES:
            raise
        raise InputError(f"{expected} ({' '.join(str(error).split()):.160}); {fix}") from None


def _release(variant: Variant) -> Any:
    libraries.torchvision()
    from torchvision.datasets import CIFAR10, CIFAR100

    return {"cifar10": CIFAR10, "cifar100": CIFAR100}[variant]


def _picture_folders(folder: Path) -> tuple[Path, Path]:
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return folder / "train", folder / "test"
    tars = sorted(p for p in folder.glob("*") if p.name.endswith((".tar", ".tgz", ".tar.gz")) and p.is_file())
    train, test = ([path for path in tars if split in path.name] for split in ("train", "test"))
    if len(train) == len(test) == 1:
        return train[0], test[0]
    raise InputError(
        f"{folder}: expected cifar-10-python.tar.gz or cifar-100-python.tar.gz, unpacked, or pictures in train/CLASS "
        "and test/CLASS or in one *train*.tar.gz and one *test*.tar.gz, found none of these; correct data.folder, or "
        "set data.download True, which also unpacks an archive"
    )


def _pictures_below(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*/*")) if is_image(path.name)]


def _labelled_pictures(path: Path, variant: Variant) -> tuple[Labelled, tuple[str, ...]]:
    """Images and labels of a folder or a tar of …/CLASS/*.jpg, sorted by class and name, and the sorted class names."""
    files: Iterator[tuple[str, bytes]]
    if path.is_dir():
        files = ((file.relative_to(path).as_posix(), read_bytes(file)) for file in _pictures_below(path))
    else:
        files = archive_members(path, is_image)
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
