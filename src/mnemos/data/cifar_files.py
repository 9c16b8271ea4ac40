"""The files that CIFAR-10 and CIFAR-100 come in, and where to get them.

Binary: records of one label byte (CIFAR-100: two, the second is the fine one) and 3·32·32 bytes, planes of red, green
and blue. Python: pickles of the same, of which only arrays and plain values are accepted. JPEG: gzipped tars of
SPLIT/CLASS/*.jpg.
"""

import hashlib
import io
import os
import pickle
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .files import read_bytes
from .pictures import parse_image

Variant = Literal["cifar10", "cifar100"]
URL = "https://www.cs.toronto.edu/~kriz/"


class Official(NamedTuple):
    """How a variant's files are called; the test file and the file of class names come last."""

    classes: int
    archive: str  # the binary one, which is what is downloaded: no pickle
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
    """Pixels [N, 32, 32, 3] and labels [N], of training and of testing, and the classes' names."""

    train: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    test: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    names: tuple[str, ...]


def read_cifar(folder: str | Path, variant: Variant) -> Images:
    """The images in a folder: the official archives, binary or Python, packed or unpacked, or a pair of JPEG tars.

    The JPEG tars are the one file with "train" and the one with "test" in its name, ending in .tar, .tgz or .tar.gz.
    Raises InputError, naming the file, where there is none of them or one is damaged or not of the variant.
    """
    folder, about = Path(folder), OFFICIAL[variant]
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a folder with {about.archive}, found none; or set data.download True")
    for names, archive, parse in (
        (about.binary, about.archive, _parse_binary),
        (about.python, about.python_archive, _parse_python),
    ):
        for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
            if all((place / name).is_file() for name in names):
                return _official({name: (place / name).read_bytes() for name in names}, str(place), variant, parse)
        if (folder / archive).is_file():
            return _official(_members(folder / archive, names), str(folder / archive), variant, parse)
    return _read_jpegs(folder, about)


def download_cifar(folder: str | Path, variant: Variant) -> None:
    """Fetch the official binary archive into a folder, if it is not there yet; it is checked by its SHA-256."""
    folder, about = Path(folder), OFFICIAL[variant]
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / about.archive).exists():
        return
    temporary, found = folder / f"{about.archive}.tmp", hashlib.sha256()
    try:
        with urllib.request.urlopen(URL + about.archive, timeout=60) as answer, open(temporary, "wb") as file:
            while block := answer.read(1 << 20):
                found.update(block)
                file.write(block)
        if found.hexdigest() != about.sha256:
            raise InputError(
                f"{URL}{about.archive}: expected SHA-256 {about.sha256}, found {found.hexdigest()}; nothing was stored"
            )
        os.replace(temporary, folder / about.archive)
    except (urllib.error.URLError, OSError) as error:
        raise InputError(f"{URL}{about.archive}: could not be fetched ({error}); put it into {folder}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _members(archive: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The wanted files of an archive, wherever in it they lie."""
    found = {Path(member.name).name: data for member, data in _unpacked(archive) if Path(member.name).name in names}
    for name in names:
        if name not in found:
            raise InputError(f"{archive}: expected {name} in it, found none; fetch the file again")
    return found


def _unpacked(archive: Path) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Every file of an archive."""
    data = read_bytes(archive)
    if len(data) < 1024 or any(data[-1024:]):  # tarfile takes one that is cut short for a smaller one
        raise InputError(f"{archive}: expected a tar, found one cut short or another file; fetch the file again")
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as packed:
            for member in packed:
                file = packed.extractfile(member)
                if file is not None:
                    yield member, file.read()
    except tarfile.TarError as error:
        raise InputError(f"{archive}: damaged, cannot be unpacked ({error}); fetch the file again") from None


def _official(files: dict[str, bytes], where: str, variant: Variant, parse: Any) -> Images:
    about = OFFICIAL[variant]
    *batches, test, names = about.binary if parse is _parse_binary else about.python
    parts = [parse(files[name], f"{where}: {name}", variant) for name in batches]
    train = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    found = _class_names(files[names], parse, f"{where}: {names}", variant)
    if len(found) != about.classes:
        raise InputError(f"{where}: {names}: expected {about.classes} class names, found {len(found)}; fetch it again")
    return Images(train, parse(files[test], f"{where}: {test}", variant), found)


def _parse_binary(data: bytes, where: str, variant: Variant) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    labels = 2 if variant == "cifar100" else 1
    record = labels + 3 * 32 * 32
    if not data or len(data) % record:
        raise InputError(f"{where}: expected records of {record} bytes, found {len(data)} bytes; fetch the file again")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    return _checked(records[:, labels:], records[:, labels - 1], where, variant)


def _parse_python(data: bytes, where: str, variant: Variant) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    value = _unpickled(data, where)
    key = b"fine_labels" if variant == "cifar100" else b"labels"
    pixels = value.get(b"data")
    if key not in value or not isinstance(pixels, np.ndarray) or pixels.shape != (len(value[key]), 3 * 32 * 32):
        raise InputError(f"{where}: expected data [N, 3072] and N {key.decode()}, found others; is it {variant}'s?")
    return _checked(pixels.astype(np.uint8), np.array(value[key]), where, variant)


def _checked(
    pixels: NDArray[np.uint8], labels: NDArray[Any], where: str, variant: Variant
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= OFFICIAL[variant].classes:
        raise InputError(f"{where}: expected labels of {variant}, found none or others; fetch the file again")
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return images, labels.astype(np.uint8)


def _class_names(data: bytes, parse: Any, where: str, variant: Variant) -> tuple[str, ...]:
    if parse is _parse_binary:
        return tuple(data.decode(errors="replace").split())
    value = _unpickled(data, where).get(b"fine_label_names" if variant == "cifar100" else b"label_names", ())
    return tuple(name.decode() if isinstance(name, bytes) else str(name) for name in value)


class _Plain(pickle.Unpickler):
    """Arrays and plain values alone: a pickle can otherwise run anything."""

    def find_class(self, module: str, name: str) -> Any:
        """What CIFAR's pickles name, of NumPy; nothing else."""
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return lambda kind, shape, code: np.ndarray.__new__(np.ndarray, shape, code)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpickled(data: bytes, where: str) -> dict[bytes, Any]:
    try:
        value = _Plain(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(value, dict):
            raise pickle.UnpicklingError("it is no dict")
    except Exception as error:  # a damaged pickle raises whatever it stumbles over
        problem = " ".join(str(error).split())
        raise InputError(f"{where}: expected CIFAR's pickle, cannot read it ({problem}); fetch it again") from None
    return value


def _read_jpegs(folder: Path, about: Official) -> Images:
    tars = [p for p in sorted(folder.iterdir()) if p.name.endswith((".tar", ".tgz", ".tar.gz")) and p.is_file()]
    pair = [[p for p in tars if split in p.name] for split in ("train", "test")]
    if any(len(found) != 1 for found in pair):
        raise InputError(
            f"{folder}: expected {about.archive}, {about.python_archive} or their files, or a *train*.tar.gz and a "
            "*test*.tar.gz of class folders, found none; or set data.download True"
        )
    (train, names), (test, again) = (_jpegs(found[0], about.classes) for found in pair)
    if names != again:
        stranger = sorted(set(names) ^ set(again))[0]
        raise InputError(f"{pair[1][0]}: expected the classes of {pair[0][0].name}, found others ({stranger!r})")
    return Images(train, test, names)


def _jpegs(archive: Path, classes: int) -> tuple[tuple[NDArray[np.uint8], NDArray[np.uint8]], tuple[str, ...]]:
    """The images of a tar of …/CLASS/*.jpg, and its classes in order; theirs are in the order of their names."""
    found: list[tuple[str, NDArray[np.uint8]]] = []
    for member, data in _unpacked(archive):
        path = Path(member.name)
        if path.name.startswith(".") or path.suffix not in (".jpg", ".jpeg", ".png") or len(path.parts) < 2:
            continue
        pixels = np.array(parse_image(data, f"{archive}: {member.name}"))
        if pixels.shape != (32, 32, 3):
            raise InputError(f"{archive}: {member.name}: expected 32 x 32 pixels, found {pixels.shape[1::-1]}")
        found.append((f"{path.parent.name}/{path.name}", pixels))
    found.sort(key=lambda one: one[0])
    of = [name.partition("/")[0] for name, _ in found]
    names = tuple(sorted(set(of)))
    if len(names) != classes:
        raise InputError(f"{archive}: expected {classes} class folders, found {len(names)}; is it another data set?")
    labels = np.array([names.index(name) for name in of], np.uint8)
    return (np.stack([pixels for _, pixels in found]), labels), names
