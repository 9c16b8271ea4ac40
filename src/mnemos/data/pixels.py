"""Images to be written byte by byte: every picture as one sequence of brightnesses, row by row, colour by colour."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mnemos.config import DataConfig
from mnemos.types import InputError

from .batch import Batch, Metric, TokenTask
from .buckets import Order
from .image_task import ImageTask
from .images import MNISTConfig

START = 0  # the token that stands before a picture's first byte


def _mnist() -> MNISTConfig:
    return MNISTConfig(layout="image")


@dataclass(frozen=True)
class PixelsConfig(DataConfig):
    """The images of another task as sequences of bytes, x[:-1] to predict x[1:]: MNIST, CIFAR, photos of any folder.

    `images` is that task: mnist or digits with layout image, cifar, or photos (`--data.images.folder`, `.size`). Its
    labels are not used, nor its augmentation: pictures are taken as evaluation sees them. A picture [H, W, C] is read
    row by row, and every pixel's C sub-pixels after each other: H·W·C − 1 predictions, 783 for MNIST and 3,071 for
    CIFAR. The first byte is given, not predicted; with `start` it is predicted too, from a start token: H·W·C
    predictions, 784 for MNIST. That token is byte 0, black, as it is in text: the vocabulary stays 256, which mixtures
    count on, and what stands first has nothing before it and cannot be mistaken for a pixel.
    """

    name: ClassVar[str] = "pixels"

    images: DataConfig = field(default_factory=_mnist)
    start: bool = False

    def build(self) -> "PixelTask":
        """The task: vocabulary 256."""
        task = self.images.build()
        if not isinstance(task, ImageTask):
            fix = "use data.images.layout image" if hasattr(self.images, "layout") else "take mnist, cifar or photos"
            raise InputError(f"data.images: expected a task of images, found {self.images.name!r} without; {fix}")
        return PixelTask(task, self.start)


class PixelTask(TokenTask):
    """A language `Task` whose every row is a picture: inputs and targets [B, n − 1] for n = H·W·C bytes.

    With a start token in front, inputs and targets are [B, n].
    """

    kind: Literal["language"] = "language"
    metric: Metric = "loss"
    vocab_size = 256
    classes = 0
    carries_state = False
    majority = None

    def __init__(self, images: ImageTask, start: bool = False) -> None:
        self._images = images
        self.start = start
        self.shape = images.picture("train", 0).shape  # H, W, C
        self.max_length = int(np.prod(self.shape)) - (not start)
        if self.max_length < 1:
            raise InputError(f"expected pictures of two bytes or more, found {' x '.join(map(str, self.shape))}")
        self._order = Order(images.size("train"))

    def images(self, split: Literal["train", "valid", "test"]) -> int:
        """Pictures of a split."""
        return self._images.size(split)

    def bytes(self, split: Literal["train", "valid", "test"], index: int) -> NDArray[np.uint8]:
        """Picture `index` of a split as its n bytes; `pictures` is the way back."""
        return self._images.picture(split, index).reshape(-1)

    def pictures(self, tokens: Tensor) -> NDArray[np.uint8]:
        """Sequences of bytes [B, n] as pictures [B, H, W, C]."""
        return tokens.cpu().numpy().astype(np.uint8).reshape(-1, *self.shape)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Batch `index` of the endless training order that `seed` gives."""
        return self._batch("train", self._order.batch(index, batch_size, seed))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Every picture of a split once."""
        for rows in np.split(np.arange(n := self.images(split)), range(batch_size, n, batch_size)):
            yield self._batch(split, rows)

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """Bytes of a split that are predicted."""
        return self.images(split) * self.max_length

    def _batch(self, split: Literal["train", "valid", "test"], rows: NDArray[np.int64]) -> Batch:
        pixels = torch.from_numpy(np.stack([self.bytes(split, row) for row in rows.tolist()]).astype(np.int64))
        pixels = self.begun(pixels)
        return Batch(pixels[:, :-1], pixels[:, 1:])

    def begun(self, tokens: Tensor) -> Tensor:
        """What a model is given to go on from the first bytes [B, m] of pictures: with a start token, [B, 1 + m]."""
        return F.pad(tokens, (1, 0), value=START) if self.start else tokens

    def close(self) -> None:
        """Nothing works ahead for pictures that are not augmented."""
        self._images.close()
