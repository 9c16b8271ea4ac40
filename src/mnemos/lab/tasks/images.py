"""Classification of MNIST and of scikit-learn's digits, as images or as sequences of pixels in row-major order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mnemos.config import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .augment import AugmentConfig
from .batch import Batch
from .idx import download_mnist, find_mnist, read_images
from .image_task import Colours, ImageTask, Split, View
from .pictures import ArrayPictures
from .splits import held_out

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
    augmented.
    `download` first fetches the official files into `path`. A fixed random choice of `valid_size` images of the
    training file is the validation split; the test split is the whole test file.
    """

    name: ClassVar[str] = "mnist"

    path: str = "mnist"
    download: bool = False
    valid_size: int = 5_000
    layout: Layout = "pixels"
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
                "the data set digits needs scikit-learn, which is not installed; run: pip install 'mnemos-torch[data]'"
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
    if int(rows["test"].lengths[0]) != length:
        found = rows["test"].lengths[0]
        raise InputError(
            f"test split: expected images of {length} pixels, as in training, found {found}; check the files"
        )
    return PixelClassification(
        splits["train"][0].shape[1:], **rows, vocab_size=vocab_size, classes=10, max_length=length
    )


def _images(splits: dict[Split, Labelled], colours: Colours, augment: AugmentConfig) -> ImageTask:
    side = splits["train"][0].shape[1]
    for split, (pixels, _) in splits.items():
        if pixels.shape[1:] != (side, side):
            found = " x ".join(map(str, pixels.shape[1:]))
            raise InputError(
                f"{split} split: expected images of {side} x {side} pixels, found {found}; check the files"
            )
    views = {
        split: View.whole(ArrayPictures(pixels[..., None], labels, side, augment.centre))
        for split, (pixels, labels) in splits.items()
    }
    return ImageTask(views, list(map(str, range(10))), side, colours, augment)
