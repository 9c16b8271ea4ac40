"""Read and download the files of CIFAR-10 and CIFAR-100, in three formats.

Binary: records of one label byte (CIFAR-100: two, the second is the fine label) and 3·32·32 bytes, the planes of red,
green and blue. Python: pickles of the same arrays, read without unpickling (`cifar_pickle`).
JPEG: gzipped tar files with SPLIT/CLASS/*.jpg.
"""

import hashlib
import io
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import replacing
from mnemos.types import InputError

from .archives import members
from .cifar_pickle import PickleError, read_pickle
from .files import read_bytes
from .pictures import parse_image

Variant = Literal["cifar10", "cifar100"]
URL = "https://www.cs.toronto.edu/~kriz/"


class Official(NamedTuple):
    """The official file names of a variant. The test file and the file of class names come last."""

    classes: int
    archive: str  # the binary archive; it is the one downloaded, as it holds no pickle
    sha256: str
    binary: tuple[str, ...]
    python_archive: str
    python: tuple[str, ...]


OFFICIAL: dict[Variant, Official] = {
    "cifar10": Official(
        10,
        "cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt"),
        "cifar-10-python.tar.gz",
        (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"),
    ),
    "cifar100": Official(
        100,
        "cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ("train.bin", "test.bin", "fine_label_names.txt"),
        "cifar-100-python.tar.gz",
        ("train", "test", "meta"),
    ),
}


class Images(NamedTuple):
    """(pixels [N, 32, 32, 3], labels [N]) of the training and the test files, and the class names."""

    train: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    test: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    names: tuple[str, ...]


def read_cifar(folder: str | Path, variant: Variant) -> Images:
    """Read the images in a folder: the official archives, binary or Python, packed or unpacked, or two JPEG tars.

    The JPEG tars are the one file with "train" and the one file with "test" in its name; they end in .tar, .tgz or
    .tar.gz. Raises InputError, with the file's name, if no such file exists, or a file is damaged or belongs to the
    other variant.
    """
    folder, about = Path(folder), OFFICIAL[variant]
    if not folder.is_dir():
        raise InputError(
            f"{folder}: expected a folder with {about.archive}, found no folder; correct data.folder, or set "
            "data.download True"
        )
    files = find_cifar(folder, variant)
    for names, archive, parse in (
        (about.binary, about.archive, _parse_binary),
        (about.python, about.python_archive, parse_python),
    ):
        if [path.name for path in files] == list(names):
            contents = {path.name: path.read_bytes() for path in files}
            return _parse_official(contents, str(files[0].parent), variant, parse)
        if [path.name for path in files] == [archive]:
            return _parse_official(_members(files[0], names), str(files[0]), variant, parse)
    return _read_jpegs(files, about)


def find_cifar(folder: str | Path, variant: Variant) -> list[Path]:
    """The files that `read_cifar` reads: unpacked ones, one archive, or two tars of JPEGs, training first."""
    folder, about = Path(folder), OFFICIAL[variant]
    for names, archive in ((about.binary, about.archive), (about.python, about.python_archive)):
        for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
            if all((place / name).is_file() for name in names):
                return [place / name for name in names]
        if (folder / archive).is_file():
            return [folder / archive]
    tars = [p for p in sorted(folder.iterdir()) if p.name.endswith((".tar", ".tgz", ".tar.gz")) and p.is_file()]
    pair = [[p for p in tars if split in p.name] for split in ("train", "test")]
    if any(len(found) != 1 for found in pair):
        raise InputError(
            f"{folder}: expected {about.archive}, {about.python_archive} or their files, or one *train*.tar.gz and one "
            "*test*.tar.gz with class folders, found none of these; correct data.folder, or set data.download True"
        )
    return [pair[0][0], pair[1][0]]


def download_cifar(folder: str | Path, variant: Variant) -> None:
    """Download the official binary archive into `folder` unless it is there; its SHA-256 is checked."""
    folder, about = Path(folder), OFFICIAL[variant]
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / about.archive).exists():
        return
    found = hashlib.sha256()
    try:
        with replacing(folder / about.archive) as temporary:
            with urllib.request.urlopen(URL + about.archive, timeout=60) as answer, open(temporary, "wb") as file:
                while block := answer.read(1 << 20):
                    found.update(block)
                    file.write(block)
            if found.hexdigest() != about.sha256:
                raise InputError(
                    f"{URL}{about.archive}: expected SHA-256 {about.sha256}, found {found.hexdigest()}; nothing was "
                    "stored, try again"
                )
    except (urllib.error.URLError, OSError) as error:
        raise InputError(
            f"{URL}{about.archive}: the download failed ({error}); try again, or put the file into {folder}"
        ) from None


def _members(archive: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The files `names` of an archive, in whatever folder of it they are."""
    found = {Path(name).name: data for name, data in _unpacked(archive, lambda name: Path(name).name in names)}
    for name in names:
        if name not in found:
            raise InputError(f"{archive}: expected it to contain {name}, found no such file; fetch the archive again")
    return found


def _unpacked(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the wanted files of an archive."""
    data = read_bytes(archive)
    if len(data) < 1024 or any(data[-1024:]):  # tarfile reads a truncated archive as a smaller one
        raise InputError(
            f"{archive}: expected a complete tar file, found a truncated one or another format; fetch the file again"
        )
    for member in members(io.BytesIO(data), archive, wanted):
        yield member.name, member.read()


_Parse = Callable[[bytes, str, Variant], tuple[NDArray[np.uint8], NDArray[np.uint8]]]  # pixels and labels


def _parse_official(files: dict[str, bytes], where: str, variant: Variant, parse: _Parse) -> Images:
    about = OFFICIAL[variant]
    *batches, test, names = about.binary if parse is _parse_binary else about.python
    parts = [parse(files[name], f"{where}: {name}", variant) for name in batches]
    train = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    found = _class_names(files[names], parse, f"{where}: {names}", variant)
    if len(found) != about.classes:
        raise InputError(
            f"{where}: {names}: expected {about.classes} class names, found {len(found)}; fetch the file again"
        )
    return Images(train, parse(files[test], f"{where}: {test}", variant), found)


def _parse_binary(data: bytes, where: str, variant: Variant) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    labels = 2 if variant == "cifar100" else 1
    record = labels + 3 * 32 * 32
    if not data or len(data) % record:
        raise InputError(f"{where}: expected records of {record} bytes, found {len(data)} bytes; fetch the file again")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    return _images_and_labels(records[:, labels:], records[:, labels - 1], where, variant)


def parse_python(data: bytes, where: str, variant: Variant) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The images [N, 32, 32, 3] and labels [N] of a Python batch. `where` begins the InputError for another content."""
    value = _dict_of(data, where)
    key = b"fine_labels" if variant == "cifar100" else b"labels"
    pixels, labels = value.get(b"data"), value.get(key)
    if not isinstance(pixels, np.ndarray) or labels is None:
        raise InputError(
            f"{where}: expected data [N, 3072] and N {key.decode()}, found one of them or none; use a file of {variant}"
        )
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != 3 * 32 * 32:
        found = f"{pixels.dtype} of shape {pixels.shape}"
        raise InputError(f"{where}: expected data [N, 3072] of bytes, found {found}; use a file of {variant}")
    return _images_and_labels(pixels, _whole_numbers(labels, len(pixels), where), where, variant)


def _whole_numbers(labels: object, count: int, where: str) -> NDArray[np.int64]:
    """The labels [count] of a list or of an array of integers."""
    if isinstance(labels, np.ndarray) and labels.ndim == 1:
        found = labels.astype(np.int64)
    elif isinstance(labels, list):
        if others := {type(one).__name__ for one in labels} - {"int"}:
            raise InputError(f"{where}: expected labels that are integers, found a {min(others)}; fetch the file again")
        found = np.array(labels, np.int64)
    else:
        raise InputError(
            f"{where}: expected labels as a list of integers, found a {type(labels).__name__}; fetch the file again"
        )
    if len(found) != count:
        raise InputError(f"{where}: expected {count} labels, one per image, found {len(found)}; fetch the file again")
    return found


def _images_and_labels(
    pixels: NDArray[np.uint8], labels: NDArray[np.integer], where: str, variant: Variant
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    classes = OFFICIAL[variant].classes
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        range_found = f"{labels.min()} to {labels.max()}" if len(labels) else "no labels"
        raise InputError(
            f"{where}: expected labels 0 to {classes - 1} of {variant}, found {range_found}; fetch the file again"
        )
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, labels.astype(np.uint8)


def _class_names(data: bytes, parse: object, where: str, variant: Variant) -> tuple[str, ...]:
    if parse is _parse_binary:
        return tuple(data.decode(errors="replace").split())
    key = b"fine_label_names" if variant == "cifar100" else b"label_names"
    names = _dict_of(data, where).get(key)
    if not isinstance(names, list) or not all(isinstance(name, (bytes, str)) for name in names):
        raise InputError(f"{where}: expected a list {key.decode()} of texts, found none; use a file of {variant}")
    return tuple(name.decode(errors="replace") if isinstance(name, bytes) else name for name in names)


def _dict_of(data: bytes, where: str) -> dict[Any, Any]:
    try:
        return read_pickle(data)
    except PickleError as error:
        raise InputError(
            f"{where}: expected a pickle of CIFAR, but it cannot be read ({error}); fetch it again"
        ) from None


def _read_jpegs(pair: list[Path], about: Official) -> Images:
    (train, names), (test, test_names) = (_jpegs(path, about.classes) for path in pair)
    if names != test_names:
        different = sorted(set(names) ^ set(test_names))[0]
        raise InputError(
            f"{pair[1]}: expected the same classes as in {pair[0].name}, found {different!r} in one file only; "
            "check both files"
        )
    return Images(train, test, names)


def _is_picture(name: str) -> bool:
    path = Path(name)
    return not path.name.startswith(".") and path.suffix in (".jpg", ".jpeg", ".png") and len(path.parts) > 1


def _jpegs(archive: Path, classes: int) -> tuple[tuple[NDArray[np.uint8], NDArray[np.uint8]], tuple[str, ...]]:
    """Images and labels of a tar of …/CLASS/*.jpg, sorted by class and file name, and the sorted class names."""
    found: list[tuple[str, NDArray[np.uint8]]] = []
    for member, data in _unpacked(archive, _is_picture):
        path = Path(member)
        pixels = np.array(parse_image(data, f"{archive}: {member}"))
        if pixels.shape != (32, 32, 3):
            raise InputError(
                f"{archive}: {member}: expected 32 x 32 pixels, found {pixels.shape[1::-1]}; use CIFAR's images"
            )
        found.append((f"{path.parent.name}/{path.name}", pixels))
    found.sort(key=lambda one: one[0])
    class_of = [name.partition("/")[0] for name, _ in found]
    names = tuple(sorted(set(class_of)))
    if len(names) != classes:
        raise InputError(f"{archive}: expected {classes} class folders, found {len(names)}; check data.variant")
    labels = np.array([names.index(name) for name in class_of], np.uint8)
    return (np.stack([pixels for _, pixels in found]), labels), names
