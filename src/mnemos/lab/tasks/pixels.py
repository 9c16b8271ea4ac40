"""Images as sequences of bytes, in the order of rows, pixels and colours, for models that generate them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.config import DataConfig
from mnemos.registry import register
from mnemos.types import InputError, JSONObject

from .batch import Batch
from .buckets import Order
from .generated_images import write_pictures
from .image_task import ImageTask
from .images import MNISTConfig
from .task import Sampling
from .token_task import LanguageTask, sampling_options

START = 0  # the token before a picture's first byte


def _mnist() -> MNISTConfig:
    return MNISTConfig(layout="image")


@register
@dataclass(frozen=True)
class PixelsConfig(DataConfig):
    """The images of another data set as sequences of bytes x; the model predicts x[1:] from x[:-1].

    `images` is that data set: mnist or digits with layout image, cifar, or photos (`--data.images.folder`, `.size`).
    Its labels and its augmentation are not used. A picture [H, W, C] is read row by row, and the C colours of a pixel
    one after the other. The first byte is given, so there are H·W·C − 1 predictions per picture: 783 for MNIST, 3,071
    for CIFAR. With `start` the first byte is predicted too, from a start token: H·W·C predictions, 784 for MNIST.
    The start token is byte 0, as in text data. It is known by its position, so the vocabulary keeps its 256 tokens,
    which likelihoods over 256 levels require.
    """

    name: ClassVar[str] = "pixels"

    images: DataConfig = field(default_factory=_mnist)
    start: bool = False

    def files(self) -> Sequence[str | Path] | None:
        """The files of the images."""
        return self.images.files()

    def build(self) -> "PixelTask":
        """The task, with 256 tokens. Raises InputError if `images` is not a data set of images."""
        return self._task(self.images.build())

    def build_to_score(self, split: Literal["valid", "test"], trained: Any = None) -> "PixelTask":
        """The task with the images that are scored in each split."""
        return self._task(self.images.build_to_score(split, trained))

    def _task(self, task: object) -> "PixelTask":
        if not isinstance(task, ImageTask):
            fix = "set data.images.layout image" if hasattr(self.images, "layout") else "use mnist, cifar or photos"
            raise InputError(
                f"data.images: expected a data set of images, found {self.images.name!r}, which has none; {fix}"
            )
        made = PixelTask(task, self.start)
        made.about, made.whole = task.about, task.whole
        return made


class PixelTask(LanguageTask):
    """A language `Task` with one picture per row: inputs and targets [B, n − 1] for n = H·W·C bytes.

    With a start token they are [B, n]. Raises InputError for pictures of fewer than two bytes.
    """

    vocab_size = 256

    def __init__(self, images: ImageTask, start: bool = False) -> None:
        self._images = images
        self.start = start
        self.shape = images.picture("train", 0).shape  # H, W, C
        self.max_length = int(np.prod(self.shape)) - (not start)
        if self.max_length < 1:
            raise InputError(
                f"data.images: expected pictures of at least 2 bytes, found {' x '.join(map(str, self.shape))}; "
                "raise the size"
            )
        self._order = Order(images.size("train"))

    def images(self, split: Literal["train", "valid", "test"]) -> int:
        """The number of pictures in a split."""
        return self._images.size(split)

    def bytes(self, split: Literal["train", "valid", "test"], index: int) -> NDArray[np.uint8]:
        """Picture `index` of a split as n bytes, uint8 [n]. `pictures` is the inverse."""
        return self._images.picture(split, index).reshape(-1)

    def pictures(self, tokens: Tensor) -> NDArray[np.uint8]:
        """Pictures [B, H, W, C] uint8 from sequences of bytes [B, n]."""
        return tokens.cpu().numpy().astype(np.uint8).reshape(-1, *self.shape)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Training batch `index`, in the endless order that `seed` determines."""
        return self._batch("train", self._order.batch(index, batch_size, seed))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Batches that hold every picture of a split once."""
        for rows in np.split(np.arange(n := self.images(split)), range(batch_size, n, batch_size)):
            yield self._batch(split, rows)

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """The number of predicted bytes in a split."""
        return self.images(split) * self.max_length

    def _batch(self, split: Literal["train", "valid", "test"], rows: NDArray[np.int64]) -> Batch:
        pixels = torch.from_numpy(np.stack([self.bytes(split, row) for row in rows.tolist()]).astype(np.int64))
        pixels = self.begun(pixels)
        return Batch(pixels[:, :-1], pixels[:, 1:])

    def begun(self, tokens: Tensor) -> Tensor:
        """The model's inputs that continue the first bytes [B, m] of pictures; [B, 1 + m] with a start token."""
        return F.pad(tokens, (1, 0), value=START) if self.start else tokens

    def artifacts(self, model: nn.Module, folder: Path, split: Literal["valid", "test"]) -> JSONObject:
        """Write generated images and completions of half images: samples.safetensors and samples.json."""
        write_pictures(model, self, folder)
        return {}

    def sample_outputs(self, model: nn.Module, sampling: Sampling, folder: Path) -> bool:
        """Generate images and complete half images of the test split, in `folder`."""
        if sampling.prompt is not None:
            raise InputError(
                "--prompt: expected none, because a model of images continues half images, found "
                f"{sampling.prompt!r}; leave it out"
            )
        start = time.perf_counter()
        count = 24 if sampling.count is None else sampling.count
        folder.mkdir(exist_ok=True)
        found = write_pictures(model, self, folder, count, min(count, 8), sampling.seed, **sampling_options(sampling))
        completed = len(found["completions"].flatten(0, 1)) if "completions" in found else 0
        size = " x ".join(map(str, self.shape))
        seconds = time.perf_counter() - start
        print(f"{count} images of {size} bytes and {completed} completions of half images in {seconds:.1f} s")
        return True

    def close(self) -> None:
        """End the worker processes of the image task."""
        self._images.close()
