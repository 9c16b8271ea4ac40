"""Classification of MNIST and of scikit-learn's digits, as images or as sequences of pixels in row-major order.

MNIST is read from IDX files: a magic number of four bytes (0, 0, 8 for unsigned bytes, the number of axes), one
big-endian 32-bit length per axis, and the values in row-major order.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mnemos.errors import install_command
from mnemos.lab.tasks.task import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .augment import AugmentConfig
from .batch import Batch
from .files import download, read_bytes
from .image_task import Colours, ImageTask, Split, View
from .pictures import ArrayPictures
from .row_order import held_out

Layout = Literal["pixels", "image"]
Labelled = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # pixels [N, H, W], labels [N]
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def _no_augmentation() -> AugmentConfig:
    # flip stays False if a user sets a policy only: a mirrored digit is not a digit.
    return AugmentConfig(policy="none", flip=False)


@register
@dataclass(frozen=True)
class MNISTConfig(DataConfig):
    """MNIST, from the folder `path` with its IDX files, gzipped or not.

    `layout`: "pixels", sequences of 784 tokens with 256 values; or "image", [B, 1, 28, 28]. Only "image" can be
    augmented. `size`: a divisor of the side, to which pictures are averaged, square by square; 0: as they are.
    `download` first fetches the official files into `path`. A fixed random choice of `valid_size` images of the
    training file is the validation split; the test split is the whole test file.
    """

    name: ClassVar[str] = "mnist"

    path: str = "mnist"
    download: bool = False
    valid_size: int = 5_000
    layout: Layout = "pixels"
    size: int = 0
    augment: AugmentConfig = field(default_factory=_no_augmentation)

    def files(self) -> tuple[Path, ...]:
        """The four IDX files."""
        return (*find_mnist(self.path, "train"), *find_mnist(self.path, "t10k"))

    def build(self) -> ArrayTask | ImageTask:
        """The task, with 10 classes. Raises InputError for missing or damaged files and settings out of range."""
        if self.download:
            download_mnist(self.path)
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
        valid, train = _split(known, (self.valid_size,), self.name)
        splits: dict[Split, Labelled] = {"train": train, "valid": valid, "test": test}
        if self.layout == "pixels":
            return _sequences(splits, 256, self.augment)
        return _images(splits, Colours((0.1307,), (0.3081,)), self.augment)


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
        """The file of scikit-learn that holds the digits."""
        from sklearn import datasets

        return (Path(datasets.__file__).parent / "data" / "digits.csv.gz",)

    def build(self) -> ArrayTask | ImageTask:
        """The task, with 10 classes. Raises InputError without scikit-learn and for settings out of range."""
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise InputError(
                f"the data set digits needs scikit-learn, which is not installed; run: {install_command('data')}"
            ) from None
        digits = load_digits()
        known = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
        test, valid, train = _split(known, (self.test_size, self.valid_size), self.name)
        splits: dict[Split, Labelled] = {"train": train, "valid": valid, "test": test}
        if self.layout == "pixels":
            return _sequences(splits, 17, self.augment)
        shown = {split: (np.rint(pixels * (255 / 16)).astype(np.uint8), y) for split, (pixels, y) in splits.items()}
        return _images(shown, Colours((0.3053,), (0.3761,)), self.augment)


class PixelClassification(ArrayTask):
    """Classification of sequences of pixels, with access to the pictures they come from."""

    def __init__(self, shape: tuple[int, ...], **fields: Any) -> None:
        super().__init__(**fields)
        self.shape, self.names = shape, list(map(str, range(self.classes)))

    def pictured(self, model: nn.Module) -> tuple[nn.Module, Any]:
        """The model and the task itself."""
        return model, self

    def picture(self, split: Split, index: int) -> NDArray[np.uint8]:
        """Image `index` of a split, uint8 [H, W, 1], its levels scaled to 0 … 255. `batches` has the same order."""
        pixels = self._splits[split].row(index).reshape(*self.shape, 1)
        return np.rint(pixels * (255 / (self.vocab_size - 1))).astype(np.uint8)

    def rows(self, split: Split, index: Sequence[int]) -> Batch:
        """The images with these indices as a batch, as the model reads them."""
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


def _split(known: Labelled, sizes: tuple[int, ...], name: str) -> list[Labelled]:
    pixels, labels = known
    return [(pixels[rows], labels[rows]) for rows in held_out(len(labels), sizes, name)]


def _sequences(splits: dict[Split, Labelled], vocab_size: int, augment: AugmentConfig) -> ArrayTask:
    if augment.policy != "none":
        raise InputError(
            f"data.augment.policy: expected 'none' for data.layout pixels, found {augment.policy!r}; set data.layout "
            "image"
        )
    rows = {split: Rows.fixed(pixels.reshape(len(pixels), -1), labels) for split, (pixels, labels) in splits.items()}
    length = int(rows["train"].lengths[0])
    return PixelClassification(
        splits["train"][0].shape[1:], **rows, vocab_size=vocab_size, classes=10, max_length=length
    )


def _images(splits: dict[Split, Labelled], colours: Colours, augment: AugmentConfig) -> ImageTask:
    side = splits["train"][0].shape[1]
    views = {
        split: View.whole(ArrayPictures(pixels[..., None], labels, side, augment.centre))
        for split, (pixels, labels) in splits.items()
    }
    return ImageTask(views, list(map(str, range(10))), side, colours, augment)


def read_idx(path: str | Path, axes: int) -> NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes with `axes` axes.

    Raises InputError, with the offset, if the file is missing, has another magic number, or is too short or too long.
    """
    data = read_bytes(path)
    start = 4 + 4 * axes
    if len(data) < start:
        raise InputError(f"{path}: expected a header of {start} bytes, found {len(data)} bytes; fetch the file again")
    magic, *shape = struct.unpack(f">{1 + axes}I", data[:start])
    if magic != 0x800 + axes:
        raise InputError(f"{path}: offset 0: expected the magic number {0x800 + axes}, found {magic}; check the file")
    expected, found = start + int(np.prod(shape, dtype=object)), len(data)
    if found != expected:
        raise InputError(f"{path}: expected {expected} bytes, found {found}; fetch the file again")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_images(images: str | Path, labels: str | Path, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images [N, H, W], labels [N] below `classes`. Raises InputError if their numbers differ or a label is wrong."""
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets):
        raise InputError(
            f"{labels}: expected {len(pixels)} labels, one per image of {images}, found {len(targets)}; check both "
            "files"
        )
    wrong = np.flatnonzero(targets >= classes)
    if len(wrong):
        raise InputError(
            f"{labels}: offset {8 + wrong[0]}: expected a label from 0 to {classes - 1}, found {targets[wrong[0]]}; "
            "check the file"
        )
    return pixels, targets


def find_mnist(folder: str | Path, part: str) -> tuple[Path, Path]:
    """The image file and the label file of a part ("train" or "t10k"), gzipped or not.

    The official names are tried first, then names with additions, such as "t10k-first5k-images-idx3-ubyte". Raises
    InputError if one of the two files is missing.
    """
    folder, found = Path(folder), []
    for what, axes in (("images", 3), ("labels", 1)):
        official, near = f"{part}-{what}-idx{axes}-ubyte", f"{part}*-{what}?idx{axes}-ubyte"
        candidates = [folder / official, folder / f"{official}.gz"]
        candidates += sorted(folder.glob(near)) + sorted(folder.glob(f"{near}.gz"))
        existing = [path for path in candidates if path.is_file()]
        if not existing:
            raise InputError(
                f"{candidates[0]}: expected this file, gzipped or not, found none; set data.path to its folder, or "
                "data.download to True"
            )
        found.append(existing[0])
    return found[0], found[1]


def download_mnist(folder: str | Path) -> None:
    """Download those of the four official files that are not yet in `folder`; each is checked by its SHA-256."""
    for name, sha256 in MNIST_SHA256.items():
        download(MNIST_URL + name, Path(folder) / name, sha256)
