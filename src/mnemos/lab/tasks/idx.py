"""Read and download MNIST's IDX files.

An IDX file holds a magic number of four bytes (0, 0, 8 for unsigned bytes, the number of axes), one big-endian 32-bit
length per axis, and the values in row-major order.
"""

import hashlib
import struct
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import write_bytes
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
    """Download those of the four official files that are not yet in `folder`; each is checked by its SHA-256.

    Raises InputError, and stores nothing, if a download fails or the hash differs.
    """
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
                f"{MNIST_URL}{name}: the download failed ({error}); try again, or put the file into {folder}"
            ) from None
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise InputError(
                f"{MNIST_URL}{name}: expected SHA-256 {expected}, found {found}; nothing was stored, try again"
            )
        write_bytes(folder / name, data)
