"""The IDX files that MNIST comes in, and where to get them.

A file is a big-endian magic number (0, 0, 8 for bytes, the number of axes), one 32-bit length an axis, then the
bytes, row by row.
"""

import hashlib
import os
import struct
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .files import read_bytes

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def read_idx(path: str | Path, axes: int) -> NDArray[np.uint8]:
    """The array of an IDX file of bytes with the given number of axes.

    Raises InputError, with the offset, for a file that is missing, has another magic number, or is too short or long.
    """
    data = read_bytes(path)
    start = 4 + 4 * axes
    if len(data) < start:
        raise InputError(f"{path}: expected a header of {start} bytes, found the end at offset {len(data)}; cut short?")
    magic, *shape = struct.unpack(f">{1 + axes}I", data[:start])
    if magic != 0x800 + axes:
        raise InputError(f"{path}: offset 0: expected the magic number {0x800 + axes}, found {magic}; another file?")
    expected, found = start + int(np.prod(shape, dtype=object)), len(data)
    if found != expected:
        raise InputError(f"{path}: expected the end at offset {expected}, found it at {found}; fetch the file again")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_images(images: str | Path, labels: str | Path, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images [N, H, W] and their labels [N], each below `classes`. Raises InputError where they do not fit."""
    pixels, classed = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(classed):
        raise InputError(f"{labels}: expected {len(pixels)} labels, one an image of {images}, found {len(classed)}")
    wrong = np.flatnonzero(classed >= classes)
    if len(wrong):
        raise InputError(
            f"{labels}: offset {8 + wrong[0]}: expected a label from 0 to {classes - 1}, found {classed[wrong[0]]}"
        )
    return pixels, classed


def find_mnist(folder: str | Path, part: str) -> tuple[Path, Path]:
    """The image and the label file of a part ("train" or "t10k"), packed or not.

    The official names come first; otherwise any name of their kind will do, such as "t10k-first5k-images-idx3-ubyte".
    """
    folder, found = Path(folder), []
    for what, axes in (("images", 3), ("labels", 1)):
        official, near = f"{part}-{what}-idx{axes}-ubyte", f"{part}*-{what}?idx{axes}-ubyte"
        candidates = [folder / official, folder / f"{official}.gz"]
        candidates += sorted(folder.glob(near)) + sorted(folder.glob(f"{near}.gz"))
        existing = [path for path in candidates if path.is_file()]
        if not existing:
            raise InputError(
                f"{candidates[0]}: expected this file, or it gzipped, found none; name its folder, or set download True"
            )
        found.append(existing[0])
    return found[0], found[1]


def download_mnist(folder: str | Path) -> None:
    """Fetch the four official files into a folder, those that are not there yet; each is checked by its SHA-256."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, expected in MNIST_SHA256.items():
        if (folder / name).exists():
            continue
        try:
            with urllib.request.urlopen(MNIST_URL + name, timeout=60) as answer:
                data = answer.read()
        except (urllib.error.URLError, OSError) as error:
            raise InputError(
                f"{MNIST_URL}{name}: could not be fetched ({error}); put it into {folder} yourself"
            ) from None
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise InputError(f"{MNIST_URL}{name}: expected SHA-256 {expected}, found {found}; nothing was stored")
        temporary = folder / f"{name}.tmp"
        temporary.write_bytes(data)
        os.replace(temporary, folder / name)
