"""Classification of MNIST and of scikit-learn's digits, as images or as sequences of pixels in row-major order.

MNIST is read from IDX files: a magic number of four bytes (0, 0, 8 for unsigned bytes, the number of axes), one
big-endian 32-bit length per axis, and the values in row-major order.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mnemos import libraries
from mnemos.errors import install_command
from mnemos.lab.tasks.task import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .augment import AugmentConfig
from .batch import Batch
from .files import read_bytes
from .image_task import Colours, ImageTask, Split, View
from .pictures import ArrayPictures
from .row_order import held_out

Layout = Literal["pixels", "image"]
Labelled = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # pixels [N, H, W], labels [N]


def _no_augmentation() -> AugmentConfig:
    # flip stays False if a user sets a policy only: a mirrored digit is not a digit.
    return AugmentConfig(policy="none", flip=False)


@register
@dataclass(frozen=True)
class MNISTConfig(DataConfig):
    """MNIST, from the folder `path` with its IDX files, gzipped or not.

    `layout`: "pixels", sequences of 784 tokens with 256 values; or "image", [B, 1, 28, 28]. Only "image" can be
    augmented. `size`: a divisor of the side, to which pictures are averaged, square by square; 0: as they are.
    `download` first fetches the official files into `path`, by torchvision. A fixed random choice of `valid_size`
    images of the training file is the validation split; the test split is the whole test file.
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
            _download(self.path)
        known = read_images(*find_mnist(self.path, "train"), classes=10)
        test = read_images(*find_mnist(self.path, "t10k"), classes=10)
        sizes = known[0].shape[1:], test[0].shape[1:]
        if sizes[0] != sizes[1] or (self.layout == "image" and sizes[0][0] != sizes[0][1]):
            train_size, test_size = (f"{height} x {width}" for height, width in sizes)
            raise InputError(
                f"{self.path}: expected images of one size in both files, square for data.layout image, found "
                f"{train_size} pixels in training and {test_size} in the test; check the files"
            )
        if self.size:
            known, test = ((_averaged(pixels, self.size), labels) for pixels, labels in (known, test))
        valid, train = (_rows(known, rows) for rows in held_out(len(known[1]), (self.valid_size,), self.name))
        return _task(self, {"train": train, "valid": valid, "test": test}, 256, Colours((0.1307,), (0.3081,)))


@register
@dataclass(frozen=True)
class DigitsConfig(DataConfig):
    """Scikit-learn's 1,797 handwritten digits of 8×8 pixels with 17 levels. They need no download.

    `layout`: "pixels", sequences of 64 tokens with 17 values; or "image", [B, 1, 8, 8]. Only "image" can be
    augmented.
    The splits are fixed, random and disjoint. Needs the extra `data`.
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
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise InputError(
                f"the data set digits needs scikit-learn, which is not installed; run: {install_command('data')}"
            ) from None
        digits = load_digits()
        known = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
        parts = held_out(len(known[1]), (self.test_size, self.valid_size), self.name)
        test, valid, train = (_rows(known, rows) for rows in parts)
        return _task(self, {"train": train, "valid": valid, "test": test}, 17, Colours((0.3053,), (0.3761,)))


class PixelClassification(ArrayTask):
    """Classification of sequences of pixels, with access to the pictures they come from."""

    def __init__(self, shape: tuple[int, ...], **fields: Any) -> None:
        super().__init__(**fields)
        self.shape, self.names = shape, list(map(str, range(self.classes)))

    def pictured(self, model: nn.Module) -> tuple[nn.Module, Any]:
        return model, self

    def picture(self, split: Split, index: int) -> NDArray[np.uint8]:
        """Image `index` of a split, uint8 [H, W, 1], its levels scaled to 0 … 255. `batches` has the same order."""
        pixels = self._splits[split].row(index).reshape(*self.shape, 1)
        return np.rint(pixels * (255 / (self.vocab_size - 1))).astype(np.uint8)

    def rows(self, split: Split, index: Sequence[int]) -> Batch:
        return self._splits[split].batch(np.asarray(index))


def _averaged(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Pictures [N, side, side] whose pixels are means of squares, rounded."""
    height, width = pixels.shape[1:]
    if side < 1 or height != width or height % side:
        raise InputError(
            f"data.size: expected a divisor of the side of square pictures, found {side} for {height} x {width}; "
            "change it, or use 0 for the pictures as they are"
        )
    squares = pixels.reshape(-1, side, height // side, side, width // side)
    return np.rint(squares.mean((2, 4), dtype=np.float32)).astype(np.uint8)


def _rows(images: Labelled, rows: NDArray[np.int64]) -> Labelled:
    return images[0][rows], images[1][rows]


def _task(
    config: MNISTConfig | DigitsConfig, splits: dict[Split, Labelled], levels: int, colours: Colours
) -> ArrayTask | ImageTask:
    """The task of three splits in the layout of the configuration. levels: of a pixel; images scale them to 0 … 255."""
    shape = splits["train"][0].shape[1:]
    if config.layout == "image":
        views: dict[Split, View] = {}
        for split, (pixels, labels) in splits.items():
            scaled = pixels if levels == 256 else np.rint(pixels * (255 / (levels - 1))).astype(np.uint8)
            views[split] = View.whole(ArrayPictures(scaled[..., None], labels, shape[0], config.augment.centre))
        return ImageTask(views, list(map(str, range(10))), shape[0], colours, config.augment)
    if config.augment.policy != "none":
        raise InputError(
            f"data.augment.policy: expected 'none' for data.layout pixels, found {config.augment.policy!r}; set "
            "data.layout image"
        )
    rows = {split: Rows.fixed(pixels.reshape(len(pixels), -1), labels) for split, (pixels, labels) in splits.items()}
    return PixelClassification(shape, **rows, vocab_size=levels, classes=10, max_length=math.prod(shape))


def read_idx(path: str | Path, axes: int) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes with `axes` axes."""
    data = read_bytes(path)
    start = 4 + 4 * axes
    magic, *shape = struct.unpack(f">{1 + axes}I", data[:start].ljust(start, b"\0"))
    if magic != 0x800 + axes or len(data) != (expected := start + math.prod(shape)):
        found = f"the number {magic}" if magic != 0x800 + axes else f"{len(data)} bytes instead of {expected}"
        raise InputError(
            f"{path}: expected an IDX file, whose first number is {0x800 + axes}, found {found}; fetch the file again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_images(images: str | Path, labels: str | Path, classes: int) -> Labelled:
    """Images [N, H, W] and labels [N] below `classes`."""
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets) or targets.max(initial=0) >= classes:
        raise InputError(
            f"{labels}: expected {len(pixels)} labels from 0 to {classes - 1}, one per image of {images}, found "
            f"{len(targets)} up to {targets.max(initial=0)}; check both files"
        )
    return pixels, targets


def find_mnist(folder: str | Path, part: str) -> tuple[Path, Path]:
    """The image file and the label file of a part ("train" or "t10k"), gzipped or not.

    In the folder, or in MNIST/raw of it, where torchvision puts them. The official names are tried first, then names
    with additions, such as "t10k-first5k-images-idx3-ubyte".
    """
    found = []
    for what, axes in (("images", 3), ("labels", 1)):
        names = f"{part}-{what}-idx{axes}-ubyte", f"{part}*-{what}?idx{axes}-ubyte"
        paths = (
            path
            for place in (Path(folder), Path(folder, "MNIST", "raw"))
            for name in names
            for pattern in (name, f"{name}.gz")
            for path in sorted(place.glob(pattern))
        )
        if (first := next(paths, None)) is None:
            raise InputError(
                f"{Path(folder, names[0])}: expected this file, gzipped or not, found none; set data.path to its "
                "folder, or data.download to True"
            )
        found.append(first)
    return found[0], found[1]


def _download(folder: str) -> None:
    """Fetch the files into FOLDER/MNIST/raw unless they are there; torchvision checks them."""
    libraries.torchvision()
    from torchvision.datasets import MNIST

    try:
        MNIST(folder, download=True)
    except Exception as error:  # of the network and of the checks
        raise InputError(
            f"{folder}: the download failed ({' '.join(str(error).split()):.160}); try again, or put the four files "
            "into this folder"
        ) from None
