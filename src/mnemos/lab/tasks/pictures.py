"""Labelled images in memory or in files, scaled to a given size or in their own size."""

import contextlib
import io
import math
import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mnemos import libraries
from mnemos.errors import one_line
from mnemos.types import InputError

from .files import read_bytes

if TYPE_CHECKING:
    from PIL import Image

ENDINGS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
CACHED = 256 * 2**20  # bytes: decoded pictures stay in memory if all of them need no more
_BITS, _ZERO, _FORMAT = 258, 262, 339  # a TIFF's tags: bits of a value, what zero is, whether values have a sign


class Pictures:
    """N images and their labels [N], for a model that reads `size` × `size` pixels. For `centre` see `fit`."""

    stored = False  # whether all images are stored at that size
    averaged = False  # whether they were brought to it by the means of squares

    def __init__(self, labels: NDArray[np.integer], size: int, centre: float) -> None:
        self.labels, self.size, self.centre = labels, size, centre

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> "Image.Image":
        """The whole image, or a smaller one that is larger than any crop needs."""
        raise NotImplementedError

    def fitted(self, index: int) -> NDArray[np.uint8]:
        """The image [size, size, C] for evaluation: scaled and cropped to its centre."""
        return fit(self.image(index), self.size, self.centre)


class ArrayPictures(Pictures):
    """Pictures from pixels [N, H, W, C] uint8."""

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        labels: NDArray[np.integer],
        size: int,
        centre: float,
        averaged: bool = False,
    ) -> None:
        super().__init__(labels, size, centre)
        self.pixels, self.stored, self.averaged = pixels, pixels.shape[1:3] == (size, size), averaged

    def fitted(self, index: int) -> NDArray[np.uint8]:
        return self.pixels[index] if self.stored else super().fitted(index)

    def image(self, index: int) -> "Image.Image":
        pixels = self.pixels[index]
        return pillow().fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


class FilePictures(Pictures):
    """Pictures from files, decoded when they are needed, and kept if `CACHED` bytes hold all results of `fitted`.

    Forked processes share what is kept: each worker would else decode, and hold, all pictures for itself, and those of
    an evaluation anew each time.
    """

    def __init__(self, paths: Sequence[str], labels: NDArray[np.integer], size: int, centre: float) -> None:
        super().__init__(labels, size, centre)
        self.paths = paths
        self._kept: NDArray[np.uint8] | None = None
        row = 3 * size * size + 1  # the first byte: whether the row is filled
        if len(paths) * row <= CACHED:
            memory = mmap.mmap(-1, len(paths) * row)  # uses no memory before it is written to
            self._kept = np.frombuffer(memory, np.uint8).reshape(len(paths), row)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": None}  # a process that is not forked decodes for itself

    def fitted(self, index: int) -> NDArray[np.uint8]:
        row = None if self._kept is None else self._kept[index]
        if row is not None and row[0]:
            return row[1:].reshape(self.size, self.size, 3)
        picture = read_fitted(self.paths[index], self.size, self.centre)
        if row is not None:
            row[1:] = picture.reshape(-1)
            row[0] = 1  # written last, because other processes read it
        return picture

    def image(self, index: int) -> "Image.Image":
        return read_image(self.paths[index], 4 * self.size)


def read_fitted(
    path: str | Path, size: int, centre: float, grey: bool = False, averaged: bool = False
) -> NDArray[np.uint8]:
    """An image file as `fit` makes it. Scaling from twice the target size is as good as from the full size."""
    image = read_image(path, 2 * math.floor(size / centre))
    return fit(image.convert("L") if grey else image, size, centre, averaged)


def fit(image: "Image.Image", size: int, centre: float, averaged: bool = False) -> NDArray[np.uint8]:
    """The central square of a PIL image, a share `centre` of the shorter side, scaled to [size, size, C].

    averaged: by means of squares; else bicubic, equal to torchvision and timm, which scale the shorter side to
    ⌊size/centre⌋ and then crop the centre. The large scaled image is not computed.
    """
    width, height = image.size
    short = math.floor(size / centre)
    across, down = (short, short * height // width) if width <= height else (short * width // height, short)
    left, top = round((across - size) / 2), round((down - size) / 2)
    x, y = width / across, height / down
    box = left * x, top * y, min((left + size) * x, width), min((top + size) * y, height)
    way = pillow().Resampling.BOX if averaged else pillow().Resampling.BICUBIC
    pixels = np.array(image.resize((size, size), way, box=box))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image, and not hidden."""
    return not os.path.basename(name).startswith(".") and name.lower().endswith(ENDINGS)


def read_image(path: str | Path, least: int = 0, upright: bool = True) -> "Image.Image":
    """Read an image file as a PIL image: RGB, transparent pixels on white; upright: rotated as its EXIF data say.

    With `least` > 0, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, its shorter side at least `least`.
    """
    return parse_image(read_bytes(path), str(path), least, upright)


def parse_image(data: bytes, name: str, least: int = 0, upright: bool = True) -> "Image.Image":
    """Like `read_image`, from a file's bytes; errors begin with `name`."""
    opener = pillow()
    from PIL import ImageOps

    try:
        with warnings.catch_warnings(action="ignore"), opener.open(io.BytesIO(data)) as image:
            if least:
                image.draft(None, (least, least))
            image.load()
            if upright:
                with contextlib.suppress(Exception):  # the pixels can be valid although the EXIF data are damaged
                    ImageOps.exif_transpose(image, in_place=True)
            return _as_rgb(image)
    except Exception as error:  # decoders can raise any exception
        raise InputError(
            f"{name}: expected an image, but it cannot be decoded ({_problem(error)}); replace or remove it"
        ) from None


def _as_rgb(image: "Image.Image") -> "Image.Image":
    opener = pillow()
    if image.mode == "F" or image.mode.startswith("I"):  # more than 8 bits, which Pillow would clip and not scale
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        plain = (16,), 1, (1,)  # 16 bits from black to white, without a sign
        if image.mode == "F" or (tags.get(_BITS, (16,)), tags.get(_ZERO, 1), tags.get(_FORMAT, (1,))) != plain:
            raise ValueError("values of which it is not known what black and white are; write 8 or 16 bits")
        image = opener.fromarray((np.array(image).astype(np.int32) // 257).astype(np.uint8))
    if image.has_transparency_data:
        white = opener.new("RGBA", image.size, (255, 255, 255, 255))
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")


def pillow() -> ModuleType:
    """The module `PIL.Image`. Raises InputError, with the install command, without Pillow."""
    libraries.pillow()
    from PIL import Image

    return Image


def _problem(error: Exception) -> str:
    """What is wrong with an image file, from a decoder's exception, without the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if type(error).__name__ == "UnidentifiedImageError":  # its own message does not name the file
        return "no format that Pillow knows"
    return one_line(error)
