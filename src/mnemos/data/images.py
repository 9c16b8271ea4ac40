"""Images as sequences of pixels, read row by row, to be classified: MNIST and scikit-learn's digits."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.config import DataConfig
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .idx import download_mnist, find_mnist, read_images
from .randomness import SPLIT, generator


@dataclass(frozen=True)
class MNISTConfig(DataConfig):
    """MNIST, one token a pixel, from the folder `path` with its IDX files, gzipped or not.

    `download` fetches the official files there first. `valid_size` images of the training file, drawn once and for
    all, are the validation split; the test split is the whole of the test file.
    """

    name: ClassVar[str] = "mnist"

    path: str = "mnist"
    download: bool = False
    valid_size: int = 5_000

    def build(self) -> ArrayTask:
        """The task: 784 tokens of 256 values, 10 classes."""
        if self.download:
            download_mnist(self.path)
        pixels, labels = read_images(*find_mnist(self.path, "train"), classes=10)
        test_pixels, test_labels = read_images(*find_mnist(self.path, "t10k"), classes=10)
        valid, train = _split(pixels, labels, (self.valid_size,), self.name)
        return _task(train, valid, Rows.fixed(_flat(test_pixels), test_labels), vocab_size=256)


@dataclass(frozen=True)
class DigitsConfig(DataConfig):
    """Scikit-learn's 1,797 handwritten digits of 8×8 pixels with 17 levels, which need no download.

    The splits are drawn once and for all, and do not overlap. Needs the extra `data`.
    """

    name: ClassVar[str] = "digits"

    valid_size: int = 180
    test_size: int = 360

    def build(self) -> ArrayTask:
        """The task: 64 tokens of 17 values, 10 classes."""
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise InputError(
                "the digits come with scikit-learn, which is missing: pip install 'mnemos[data]'"
            ) from None
        digits = load_digits()
        pixels, labels = digits.images.astype(np.uint8), digits.target.astype(np.uint8)
        test, valid, train = _split(pixels, labels, (self.test_size, self.valid_size), self.name)
        return _task(train, valid, test, vocab_size=17)


def _flat(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels.reshape(len(pixels), -1)


def _split(pixels: NDArray[np.uint8], labels: NDArray[np.uint8], sizes: tuple[int, ...], name: str) -> list[Rows]:
    """Disjoint random parts of the given sizes, then the rest; the same on every run."""
    if min(sizes) < 1 or sum(sizes) >= len(labels):
        raise InputError(
            f"{name}: expected held-out sizes of at least 1 that leave some of the {len(labels)} images to train on, "
            f"found {', '.join(map(str, sizes))}"
        )
    order = generator(0, SPLIT).permutation(len(labels))
    parts = np.split(order, np.cumsum(sizes))
    return [Rows.fixed(_flat(pixels[np.sort(part)]), labels[np.sort(part)]) for part in parts]


def _task(train: Rows, valid: Rows, test: Rows, vocab_size: int) -> ArrayTask:
    length = int(train.lengths[0])
    if int(test.lengths[0]) != length:
        raise InputError(f"expected test images of {length} pixels like those of training, found {test.lengths[0]}")
    return ArrayTask(train, valid, test, vocab_size=vocab_size, classes=10, max_length=length)
