"""List the images of data sets in class folders, in their usual layouts, as compact lists of files."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .files import skipped

ENDINGS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
Split = Literal["train", "valid", "test"]
_VALID = ("val", "validation", "valid")


@dataclass(frozen=True, eq=False)
class Files:
    """N files in class folders: concatenated names, starts [N + 1], labels [N]. About 12 bytes per file plus its name.

    Files are sorted by class, then by name.
    """

    folder: str
    classes: tuple[str, ...]  # the class folders' names; a label is an index into them
    names: bytes
    starts: NDArray[np.int64]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> bytes:
        """The path of file `index` relative to its class folder."""
        return self.names[self.starts[index] : self.starts[index + 1]]

    def path(self, index: int) -> str:
        """The full path of file `index`."""
        return os.path.join(self.folder, self.classes[self.labels[index]], os.fsdecode(self.name(index)))


class Paths(Sequence[str]):
    """The paths of all files of some folders, made when they are needed: millions of them would take gigabytes."""

    def __init__(self, folders: Sequence[Files]) -> None:
        self._folders = folders
        self._starts = np.concatenate([[0], np.cumsum([len(files) for files in folders])])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._folders[place].path(index - int(self._starts[place]))


@dataclass(frozen=True, eq=False)
class Part:
    """A split: the files with indices `rows` [n], in that order."""

    files: Files
    rows: NDArray[np.int64]


def read_layout(folder: str | Path, held_out: float) -> dict[Split, Part]:
    """The disjoint splits "train", "valid" and "test" of a folder in one of two layouts.

    Layout 1, FOLDER/CLASS/…/IMAGE: the validation and the test split each take a share `held_out` of every class, and
    at least one image of every class that has three or more.
    Layout 2, FOLDER/train/CLASS/…/IMAGE, with validation and test folders beside train in the same form. The validation
    folder is named val, validation or valid. The splits depend on the folders that exist:
    - validation and test: they are the two splits;
    - validation only, as in ImageNet: it is the test split, because results are reported on it, and the validation
      split is a share `held_out` of every class of train;
    - test only: the validation split is a share `held_out` of every class of train;
    - neither: both splits are shares of train, as in layout 1.
    A test folder without class folders, such as ImageNet's, has no labels and is ignored.
    The hash of an image's name decides whether it is held out, so an image keeps its split when others are added or
    removed. Hidden files and folders, and files whose endings are not in `ENDINGS`, are ignored; named pipes, sockets
    and devices are skipped with a warning.
    Raises InputError, with the path, for any other layout.
    """
    if not 0 < held_out < 0.5:
        raise InputError(f"data.held_out must be above 0 and below 0.5, found {held_out}")
    folder = os.fspath(folder)
    below = _subfolders(folder)
    train = os.path.join(folder, "train")
    evaluated = [name for name in (*_VALID, "test") if name in below and _holds_folders(os.path.join(folder, name))]
    if "train" not in below or not _holds_folders(train):  # "train" may be a class: the vehicle
        if evaluated:
            where = os.path.join(folder, evaluated[0])
            raise InputError(f"{where}: expected a folder train with class folders beside it, found none; add it")
        files = scan(folder)
        valid, test, rest = _held_out(files, held_out, 2)
        return {"train": Part(files, rest), "valid": Part(files, valid), "test": Part(files, test)}
    if len(named := [name for name in _VALID if name in below]) > 1:
        raise InputError(f"{folder}: expected one validation folder, found {' and '.join(named)}; keep one of them")
    files = scan(train)
    for name in named:
        if name not in evaluated:
            raise InputError(f"{os.path.join(folder, name)}: expected class folders as in train, found none; add them")
    others = {name: scan(os.path.join(folder, name), files.classes) for name in evaluated}
    if not others:
        valid, test, rest = _held_out(files, held_out, 2)
        return {"train": Part(files, rest), "valid": Part(files, valid), "test": Part(files, test)}
    *first, last = (Part(found, np.arange(len(found))) for found in others.values())
    if first:
        return {"train": Part(files, np.arange(len(files))), "valid": first[0], "test": last}
    valid, rest = _held_out(files, held_out, 1)
    return {"train": Part(files, rest), "valid": Part(files, valid), "test": last}


def read_to_score(folder: str | Path, split: Literal["valid", "test"]) -> tuple[Part, bool]:
    """The images of a folder that are scored and not trained on: those of its split, or all; and whether it is all.

    A folder of class folders, also one with a folder train alone, has no splits and is scored whole. Otherwise the
    split has a folder of its own as in `read_layout`; without a test folder, the validation folder is the test split.
    Raises InputError if the folder has another split only, and for any other layout.
    """
    folder = os.fspath(folder)
    below = _subfolders(folder)
    given = {name: os.path.join(folder, name) for name in ("train", *_VALID, "test") if name in below}
    given = {name: path for name, path in given.items() if _holds_folders(path)}
    wanted = ("test", *_VALID) if split == "test" else _VALID
    whole = not {*given} & {*_VALID, "test"}
    if whole:
        files = scan(given.get("train", folder))
    else:
        if not (own := [given[name] for name in wanted if name in given]):
            raise InputError(
                f"{folder}: expected a folder for the {split} split, found {' and '.join(given)}; choose another with "
                "--split, or name one of them"
            )
        files = scan(own[0])
    return Part(files, np.arange(len(files))), whole


def scan(folder: str, classes: tuple[str, ...] | None = None) -> Files:
    """List the images at any depth below the class folders of `folder`. Without `classes`, all folders are classes.

    Cost: every directory entry is read once; 14 million files need about 0.5 GB of memory. Raises InputError if there
    are fewer than two class folders, if one has no images, or if one is not in `classes`.
    """
    found = tuple(sorted(_subfolders(folder)))
    if classes is None:
        classes = found
        if len(found) < 2:
            what = f"one, {found[0]!r}" if found else "none"
            raise InputError(f"{folder}: expected at least two class folders with images, found {what}; check the path")
    elif unknown := [name for name in found if name not in set(classes)]:
        raise InputError(
            f"{os.path.join(folder, unknown[0])}: expected a class that train has, found {unknown[0]!r}; "
            "remove this folder, or add the class to train"
        )
    names, lengths, counts = bytearray(), [], []
    indices = {name: i for i, name in enumerate(classes)}
    for name in found:
        inside = sorted(_images(os.path.join(folder, name), b"", set()))
        if not inside:
            raise InputError(
                f"{os.path.join(folder, name)}: expected images ({' '.join(ENDINGS)}), found none; add images or "
                "remove the folder"
            )
        names += b"".join(inside)
        lengths.append(np.fromiter(map(len, inside), np.int64, len(inside)))
        counts.append(len(inside))
    starts = np.concatenate([[0], *lengths]).cumsum()
    labels = np.repeat(np.array([indices[name] for name in found], np.int32), counts)
    return Files(folder, classes, bytes(names), starts, labels)


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
    except OSError as error:
        raise _cannot_open(folder, error) from None


def _cannot_open(folder: str, error: OSError) -> InputError:
    return InputError(
        f"{folder}: expected a folder of images, but it cannot be opened ({error.strerror}); name the folder with "
        "--data.folder (photos-pixels: --data.images.folder)"
    )


def _holds_folders(folder: str) -> bool:
    """Whether a folder holds class folders: it has subfolders and no images of its own."""
    return bool(_subfolders(folder)) and not any(_is_image(name) for name in os.listdir(folder))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(ENDINGS)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        raise InputError(
            f"{entry.path}: expected a file or a folder, found a symbolic link that leads to itself; remove it"
        ) from None


def _images(folder: str, prefix: bytes, seen: set[tuple[int, int]]) -> Iterator[bytes]:
    """The images at any depth below a folder, as paths relative to it.

    seen: the folders so far. Links to folders are followed; a few of them can lead to more paths than can be listed.
    """
    try:
        about = os.stat(folder)
        if (about.st_dev, about.st_ino) in seen:
            raise InputError(
                f"{folder}: expected each folder once, found it again through a symbolic link; remove the link"
            )
        seen.add((about.st_dev, about.st_ino))
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.name.lower().endswith(ENDINGS):
                    if not entry.is_file(follow_symlinks=False) and skipped(entry.path):
                        continue
                    yield prefix + os.fsencode(entry.name)
                elif _is_folder(entry):
                    yield from _images(entry.path, prefix + os.fsencode(entry.name) + b"/", seen)
    except OSError as error:
        raise _cannot_open(folder, error) from None


def _held_out(files: Files, share: float, parts: int) -> list[NDArray[np.int64]]:
    """Split every class into `parts` disjoint shares and the rest: their file indices, each part sorted."""
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
        raise InputError(
            f"{files.folder}: expected a class with at least {parts + 1} images, found only smaller ones; add images"
        )
    return found
