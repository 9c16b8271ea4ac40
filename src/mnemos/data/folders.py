"""Folders of class folders, in the layouts that photos come in, as compact lists of files."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

ENDINGS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
Split = Literal["train", "valid", "test"]
_VALID = ("val", "validation", "valid")


@dataclass(frozen=True, eq=False)
class Files:
    """N files in class folders, about 12 bytes each and their names: names joined, starts [N + 1], labels [N].

    They are in the order of their classes, and of their names within one.
    """

    folder: str
    classes: tuple[str, ...]  # the folders' names; a label is a place among them
    names: bytes
    starts: NDArray[np.int64]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> bytes:
        """Below its class folder."""
        return self.names[self.starts[index] : self.starts[index + 1]]

    def path(self, index: int) -> str:
        """Where a file lies."""
        return os.path.join(self.folder, self.classes[self.labels[index]], os.fsdecode(self.name(index)))


@dataclass(frozen=True, eq=False)
class Part:
    """A split: some of the files, in their order."""

    files: Files
    rows: NDArray[np.int64]


def read_layout(folder: str | Path, held_out: float) -> dict[Split, Part]:
    """The splits "train", "valid" and "test" of a folder, disjoint, in one of two layouts.

    FOLDER/CLASS/…/IMAGE: of each class a share `held_out` is the validation split and as much the test split, at least
    one each where the class has three images or more.
    FOLDER/train/CLASS/…/IMAGE, and beside train the folders val (or validation, or valid) and test, or one of them.
    Both: each is what it says. val alone, as ImageNet has it: it is the test split, as results are reported on it.
    Where there is no other validation split, a share `held_out` of each class of train is. A test folder that holds
    images without class folders, as ImageNet's, has no labels and is left alone; of train alone both are made.
    Which images of a class are held out is decided by the hashes of their names, so an image keeps its split when
    others come or go. Hidden files and folders, and files without an ending of `ENDINGS`, are no images.
    Raises InputError for anything else, with what is wrong and where.
    """
    if not 0 < held_out < 0.5:
        raise InputError(f"data.held_out must be above 0 and below 0.5, found {held_out}")
    folder = os.fspath(folder)
    below = _subfolders(folder)
    train = os.path.join(folder, "train")
    evaluated = [name for name in (*_VALID, "test") if name in below and _holds_folders(os.path.join(folder, name))]
    if "train" not in below or not _holds_folders(train):  # "train" may be a class, of vehicles
        if evaluated:
            where = os.path.join(folder, evaluated[0])
            raise InputError(f"{where}: expected a folder train beside it, with its class folders, found none")
        files = scan(folder)
        valid, test, rest = _held_out(files, held_out, 2)
        return {"train": Part(files, rest), "valid": Part(files, valid), "test": Part(files, test)}
    if len(named := [name for name in _VALID if name in below]) > 1:
        raise InputError(f"{folder}: expected one validation folder, found {' and '.join(named)}; remove one")
    files = scan(train)
    for name in named:
        if name not in evaluated:
            raise InputError(f"{os.path.join(folder, name)}: expected class folders as in train, found none; make them")
    others = {name: scan(os.path.join(folder, name), files.classes) for name in evaluated}
    if not others:
        valid, test, rest = _held_out(files, held_out, 2)
        return {"train": Part(files, rest), "valid": Part(files, valid), "test": Part(files, test)}
    *first, last = (Part(found, np.arange(len(found))) for found in others.values())
    if first:
        return {"train": Part(files, np.arange(len(files))), "valid": first[0], "test": last}
    valid, rest = _held_out(files, held_out, 1)
    return {"train": Part(files, rest), "valid": Part(files, valid), "test": last}


def scan(folder: str, classes: tuple[str, ...] | None = None) -> Files:
    """The images of a folder's class folders, searched through; classes are sorted by name, or those given.

    Cost: a look at every entry; 14 million files need about half a gigabyte. Raises InputError where there are no
    class folders, one alone, one without images, or one that is not among those given.
    """
    found = tuple(sorted(_subfolders(folder)))
    if classes is None:
        classes = found
        if len(found) < 2:
            what = f"one, {found[0]!r}" if found else "none"
            raise InputError(f"{folder}: expected class folders, two or more, with images in them, found {what}")
    elif strangers := [name for name in found if name not in set(classes)]:
        raise InputError(
            f"{os.path.join(folder, strangers[0])}: expected a class that train has, found {strangers[0]!r}; "
            "remove it or add it there"
        )
    names, lengths, counts = bytearray(), [], []
    places = {name: i for i, name in enumerate(classes)}
    for name in found:
        inside = sorted(_images(os.path.join(folder, name), b""))
        if not inside:
            raise InputError(
                f"{os.path.join(folder, name)}: expected images ({' '.join(ENDINGS)}), found none; fill or remove it"
            )
        names += b"".join(inside)
        lengths.append(np.fromiter(map(len, inside), np.int64, len(inside)))
        counts.append(len(inside))
    starts = np.concatenate([[0], *lengths]).cumsum()
    labels = np.repeat(np.array([places[name] for name in found], np.int32), counts)
    return Files(folder, classes, bytes(names), starts, labels)


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise _unopened(folder, error) from None


def _unopened(folder: str, error: OSError) -> InputError:
    return InputError(f"{folder}: expected a folder of images, cannot open it ({error.strerror}); name another folder")


def _holds_folders(folder: str) -> bool:
    """Whether a folder is one of class folders: with folders in it and no images beside them."""
    return bool(_subfolders(folder)) and not any(_is_image(name) for name in os.listdir(folder))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(ENDINGS)


def _images(folder: str, prefix: bytes) -> Iterator[bytes]:
    """The images below a folder, at any depth, named from there."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.name.lower().endswith(ENDINGS):
                    yield prefix + os.fsencode(entry.name)
                elif entry.is_dir():
                    yield from _images(entry.path, prefix + os.fsencode(entry.name) + b"/")
    except OSError as error:
        raise _unopened(folder, error) from None


def _held_out(files: Files, share: float, parts: int) -> list[NDArray[np.int64]]:
    """`parts` disjoint shares of every class, then the rest: rows, each in order."""
    taken: list[list[NDArray[np.int64]]] = [[] for _ in range(parts + 1)]
    edges = np.searchsorted(files.labels, np.arange(len(files.classes) + 1))
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        keys = [hashlib.blake2b(files.name(i), digest_size=8).digest() for i in range(first, end)]
        ranked = np.array(sorted(range(end - first), key=keys.__getitem__), np.int64) + first
        held = max(1, min(round(share * len(ranked)), (len(ranked) - 1) // parts))
        held = held if len(ranked) > parts else 0
        for i in range(parts):
            taken[i].append(ranked[i * held : (i + 1) * held])
        taken[parts].append(ranked[parts * held :])
    found = [np.sort(np.concatenate(rows)) for rows in taken]
    if not all(len(rows) for rows in found):
        raise InputError(f"{files.folder}: expected a class of at least {parts + 1} images, found none; add images")
    return found
