"""Labelled images, in memory or in files, each as a picture of the size asked for or as it is."""

import io
import math
import mmap
import warnings
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .folders import Files

KEPT = 256 * 2**20  # bytes of decoded pictures that are kept, where all of them together are no more
_DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")  # grey, 16 bits


class Pictures(Protocol):
    """N images, to be seen at `size` × `size` pixels of C channels, and their labels [N]."""

    labels: NDArray[Any]
    stored: bool  # whether all are stored at that size

    def __len__(self) -> int: ...

    def fitted(self, index: int) -> NDArray[np.uint8]:
        """The image [size, size, C] as evaluation sees it: scaled, and its centre cut out."""
        ...

    def image(self, index: int) -> Any:
        """The image as PIL has it, whole."""
        ...


class ArrayPictures:
    """Pictures from an array: pixels [N, H, W, C] uint8, labels [N]. `centre`: see `fit`."""

    def __init__(self, pixels: NDArray[np.uint8], labels: NDArray[Any], size: int, centre: float) -> None:
        self.pixels, self.labels, self.size, self.centre = pixels, labels, size, centre
        self.stored = pixels.shape[1:3] == (size, size)

    def __len__(self) -> int:
        return len(self.labels)

    def fitted(self, index: int) -> NDArray[np.uint8]:
        """[size, size, C]; where stored at that size, as it is."""
        return self.pixels[index] if self.stored else fit(self.image(index), self.size, self.centre)

    def image(self, index: int) -> Any:
        """RGB, or L for one channel."""
        pixels = self.pixels[index]
        return pillow().fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


class FilePictures:
    """Pictures from files, decoded when they are asked for.

    What `fitted` has made is kept, where all of it together is no more than `KEPT` bytes: in memory that processes
    forked off this one share.
    """

    stored = False

    def __init__(self, files: Files, size: int, centre: float) -> None:
        self.files, self.labels, self.size, self.centre = files, files.labels, size, centre
        self._kept: NDArray[np.uint8] | None = None
        if len(files) * (3 * size * size + 1) <= KEPT:
            memory = mmap.mmap(-1, len(files) * (3 * size * size + 1))  # takes no room before it is written to
            self._kept = np.frombuffer(memory, np.uint8).reshape(len(files), -1)  # the first byte says: it is there

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": None}  # a process that is not forked reads for itself

    def __len__(self) -> int:
        return len(self.labels)

    def fitted(self, index: int) -> NDArray[np.uint8]:
        """[size, size, 3]."""
        kept = None if self._kept is None else self._kept[index]
        if kept is not None and kept[0]:
            return kept[1:].reshape(self.size, self.size, 3)
        # Twice what the whole is scaled to is as good to scale from as the whole.
        image = read_image(self.files.path(index), 2 * math.floor(self.size / self.centre))
        picture = fit(image, self.size, self.centre)
        if kept is not None:
            kept[1:] = picture.reshape(-1)
            kept[0] = 1  # last, for another process that looks
        return picture

    def image(self, index: int) -> Any:
        """RGB. A JPEG much larger than any crop of it will be is decoded at a half, a quarter or an eighth."""
        return read_image(self.files.path(index), 4 * self.size)


def fit(image: Any, size: int, centre: float) -> NDArray[np.uint8]:
    """The middle of a PIL image as pixels [size, size, C]: `centre` of the shorter side, scaled (bicubic).

    The same as scaling the whole so that its shorter side is ⌊size/centre⌋ and cutting out the centre, as torchvision
    and timm do, but never as large as that whole.
    """
    width, height = image.size
    short = math.floor(size / centre)
    across, down = (short, short * height // width) if width <= height else (short * width // height, short)
    left, top = round((across - size) / 2), round((down - size) / 2)
    x, y = width / across, height / down
    box = left * x, top * y, min((left + size) * x, width), min((top + size) * y, height)
    pixels = np.array(image.resize((size, size), pillow().Resampling.BICUBIC, box=box))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def read_image(path: str | Path, least: int = 0) -> Any:
    """An image file as a PIL image: RGB, upright as its EXIF says, transparent places white.

    `least` > 0: a JPEG may come at a half, a quarter or an eighth, but not with its shorter side below `least`.
    Raises InputError with the file's name where it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise InputError(f"{path}: expected an image, cannot read the file ({error.strerror}); restore it") from None
    return parse_image(data, str(path), least)


def parse_image(data: bytes, name: str, least: int = 0) -> Any:
    """`read_image` of a file's bytes; `name` is for the error."""
    opener = pillow()
    try:
        with warnings.catch_warnings(action="ignore"), opener.open(io.BytesIO(data)) as image:
            if least:
                image.draft(None, (least, least))
            image.load()
            return _colours(_upright(image))
    except Exception as error:  # decoders raise whatever they stumble over
        known = type(error).__name__ != "UnidentifiedImageError"  # whose own words name no file
        problem = " ".join(str(error).split()) or type(error).__name__ if known else "no format that Pillow knows"
        raise InputError(f"{name}: expected an image, cannot be read ({problem}); replace it or remove it") from None


def _upright(image: Any) -> Any:
    from PIL import ImageOps

    try:
        ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # a damaged EXIF block says nothing of the pixels
        return image
    return image


def _colours(image: Any) -> Any:
    opener = pillow()
    if image.mode in _DEEP:  # which Pillow would clip, not scale
        image = opener.fromarray((np.array(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = opener.new("RGBA", image.size, (255, 255, 255, 255))
        white.alpha_composite(image)
        image = white
    return image.convert("RGB")


def pillow() -> Any:
    """The module `PIL.Image`. Raises InputError, with the install command, where it is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise InputError("images are read by Pillow, which is missing; run: pip install 'mnemos[vision]'") from None
    return Image
