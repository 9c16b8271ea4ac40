"""Photos in class folders, in ImageNet's layout or with one folder per class."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos import libraries
from mnemos.atomic import check_file
from mnemos.registry import register
from mnemos.types import InputError

from .augment import AugmentConfig
from .files import first_names, repeated
from .image_task import IMAGENET, Colours, ImagePreprocessing, ImageTask, View
from .pictures import ENDINGS, FilePictures, check_image_files, is_image
from .task import SPLITS, DataConfig, HeldOut, Split

_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("val", "validation", "valid"),
    "test": ("test",),
}
COMPARED = 20_000  # photos at most whose contents are compared, to say which are in two splits: a second or two


class Files(NamedTuple):
    """The images at any depth below the class folders of a folder, by class; a label [N] is an index into `classes`."""

    folder: str
    classes: tuple[str, ...]
    paths: list[str]
    labels: NDArray[np.int32]
    left_out: list[str]  # the other files there that are not hidden


class Part(NamedTuple):
    """A split: the files with indices `rows` [n], in that order."""

    files: Files
    rows: NDArray[np.int64]

    def described(self) -> str:
        counts = np.bincount(self.files.labels[self.rows], minlength=len(self.files.classes))
        least, most = int(counts.min()), int(counts.max())
        each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return f"{len(self.rows):,} photos of {len(counts):,} classes, {each} per class"


@register
@dataclass(frozen=True)
class PhotosConfig(DataConfig):
    """Photos in class folders: FOLDER/CLASS/*.jpg, or FOLDER/train/CLASS/*.jpg with val (and test) beside train.

    Classes are the folder names, sorted. A share `held_out` of each class replaces every split without a folder; a
    folder val without test is the test split.
    Photos (files .jpg, .png, .webp, .tif, … see `pictures.ENDINGS`) may have any size and colour; other files are left
    out. They are rotated upright, converted to RGB, scaled (bicubic) and cropped to `size` × `size` pixels, and
    normalised by `mean` and `std` of each colour in [0, 1]: those of ImageNet, or those of a model that `--model`
    trains further. Photos are decoded when they are needed: in advance by `workers` processes, or by this process if
    `workers` is 0. Needs the extra `vision`.
    """

    name: ClassVar[str] = "photos"

    folder: str = "photos"
    size: int = 224
    held_out: float = 0.1
    workers: int = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    mean: tuple[float, ...] = IMAGENET.mean
    std: tuple[float, ...] = IMAGENET.std

    def files(self) -> list[str]:
        folders = {id(part.files): part.files for part in self._parts().values()}  # several splits may share one
        return [path for files in folders.values() for path in files.paths]

    def unscored(self) -> frozenset[str]:
        return frozenset({"mean", "std"})  # as the model wants its pixels

    def build(self) -> ImageTask:
        """The task. The folder is listed, and both ends of each photo are read (`check_image_files`)."""
        parts = self._parts()
        train = parts["train"].files
        if len(train.classes) < 2:
            raise InputError(
                f"{train.folder}: expected at least two class folders with images, found one, {train.classes[0]!r}; "
                "check the path"
            )
        task = self._task(parts)
        about = []
        for split, part in parts.items():
            source = ", a share of each class" if part.files is train else f": {part.files.folder}"
            about.append(
                f"{split:5}  {part.described()}{f': {first_names(train.classes)}' if split == 'train' else source}"
            )
        every = {id(part.files): part.files for part in parts.values()}.values()
        if left_out := [os.path.relpath(path, self.folder) for files in every for path in files.left_out]:
            about.append(f"left out: {first_names(left_out)}")
        if sum(len(part.rows) for part in parts.values()) <= COMPARED:
            about += repeated({split: dict(_contents(part)) for split, part in parts.items()})
        task.about = tuple(about)
        return task

    def build_to_score(self, split: HeldOut, trained: Any = None) -> ImageTask:
        part, whole = read_to_score(
            self.folder, split, trained.names or None if isinstance(trained, ImagePreprocessing) else None
        )
        task = self._task(dict.fromkeys(SPLITS, part))
        what = "all" if whole else f"the {split} split"
        task.about, task.whole = (f"scored: {what}, {part.described()}: {part.files.folder}",), whole
        return task

    def _parts(self) -> dict[Split, Part]:
        self.require("0 < held_out < 0.5")
        return read_layout(self.folder, self.held_out)

    def _task(self, parts: dict[Split, Part]) -> ImageTask:
        self.require("size >= 1", "len(mean) == len(std) == 3", "min(std) > 0")
        folders = {id(part.files): part.files for part in parts.values()}
        check_image_files([path for files in folders.values() for path in files.paths])
        pictures = {
            key: FilePictures(files.paths, files.labels, self.size, self.augment.centre)
            for key, files in folders.items()
        }
        views = {split: View(pictures[id(part.files)], part.rows) for split, part in parts.items()}
        classes, colours = parts["train"].files.classes, Colours(self.mean, self.std)
        return ImageTask(views, classes, self.size, colours, self.augment, self.workers)


def _contents(part: Part) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """The path of each photo, with its size and the hash of its first 64 KiB."""
    for row in part.rows.tolist():
        with open(path := part.files.paths[row], "rb") as file:
            yield path, (os.fstat(file.fileno()).st_size, hashlib.sha256(file.read(2**16)).digest())


def read_layout(folder: str | os.PathLike[str], held_out: float) -> dict[Split, Part]:
    """The disjoint splits "train", "valid" and "test" of a folder in one of two layouts.

    FOLDER/CLASS/…/IMAGE: the validation and the test split each take a share `held_out` of every class, and at least
    one image of every class that has three or more. The hash of an image's name decides, so that images keep their
    splits.
    FOLDER/train/CLASS/…/IMAGE, with folders val (validation, valid) and test beside train in the same form. A split
    without a folder takes a share of every class of train; but a folder val alone, as in ImageNet, is the test split,
    because results are reported on it. A test folder without class folders has no labels and is ignored.
    """
    folder = os.fspath(folder)
    folders = _split_folders(folder)
    if folders and "train" not in folders:
        raise InputError(
            f"{next(iter(folders.values()))}: expected a folder train with class folders beside it, found none; add it"
        )
    files = scan(folders.get("train", folder))
    parts = {split: _whole(scan(folders[split], files.classes)) for split in SPLITS[1:] if split in folders}
    if {*parts} == {"valid"}:
        parts = {"test": parts["valid"]}
    missing = [split for split in SPLITS[1:] if split not in parts]
    for split, rows in zip([*missing, "train"], _shares(files, held_out, len(missing)), strict=True):
        parts[split] = Part(files, rows)
    return {split: parts[split] for split in SPLITS}


def read_to_score(folder: str, split: HeldOut, classes: Sequence[str] | None = None) -> tuple[Part, bool]:
    """The images of a folder that are scored and not trained on: those of its split, or all; and whether it is all.

    A folder of class folders, also one with a folder train alone, has no splits and is scored whole. Without a test
    folder, the validation folder is the test split. classes: the run's; the folder need not have all.
    """
    folders = _split_folders(folder)
    whole = not {"valid", "test"} & {*folders}
    own = folders.get("train", folder) if whole else folders.get(split, folders.get("valid"))
    if own is None:
        raise InputError(
            f"{folder}: expected a folder for the {split} split, found {' and '.join(folders)}; choose another with "
            "--split, or name one of them"
        )
    return _whole(scan(own, classes)), whole


def _whole(files: Files) -> Part:
    return Part(files, np.arange(len(files.paths)))


def scan(folder: str, classes: Sequence[str] | None = None) -> Files:
    """List the images below the class folders of a folder, as torchvision does. None: all its folders are classes."""
    libraries.torchvision()
    from torchvision.datasets.folder import make_dataset

    # --- the classes ---
    own = sorted(_subfolders(folder))
    if not own:
        raise InputError(f"{folder}: expected class folders with images, found none; check the path")
    index = {name: i for i, name in enumerate(classes or own)}
    if unknown := [name for name in own if name not in index]:
        raise InputError(
            f"{os.path.join(folder, unknown[0])}: expected a class of the training data, found {unknown[0]!r}; "
            "remove this folder, or train with the class"
        )

    # --- their images ---
    first_path: dict[tuple[int, int], str] = {}  # of each folder so far: links may lead to one again, in another class
    checked, left_out = "", list[str]()

    def wanted(path: str) -> bool:
        nonlocal checked
        if f"{os.sep}." in path[len(folder) :]:
            return False
        if not is_image(path):
            left_out.append(path)
            return False
        check_file(path)
        if (inside := os.path.dirname(path)) != checked:  # files of a folder follow each other
            checked, about = inside, os.stat(inside)
            if first_path.setdefault((about.st_dev, about.st_ino), inside) != inside:
                raise InputError(
                    f"{inside}: expected each folder once, found it again through a symbolic link; remove the link"
                )
        return True

    pairs = make_dataset(folder, {name: index[name] for name in own}, is_valid_file=wanted, allow_empty=True)
    labels = np.array([label for _, label in pairs], np.int32)
    if empty := sorted({index[name] for name in own} - {*labels.tolist()}):
        raise InputError(
            f"{os.path.join(folder, [*index][empty[0]])}: expected images ({' '.join(ENDINGS)}), found none; add "
            "images or remove the folder"
        )
    return Files(folder, tuple(index), [path for path, _ in pairs], labels, left_out)


def _split_folders(folder: str) -> dict[Split, str]:
    """The folders of splits that hold class folders and no images of their own: train may be a class, the vehicle."""
    below = _subfolders(folder)
    folders: dict[Split, str] = {}
    for split, names in _FOLDERS.items():
        named = [os.path.join(folder, name) for name in names if name in below]
        classed = [path for path in named if _subfolders(path) and not any(map(is_image, os.listdir(path)))]
        if len(classed) > 1:
            raise InputError(f"{folder}: expected one {split} split, found {' and '.join(classed)}; keep one of them")
        if classed:
            folders[split] = classed[0]
        elif named and split == "valid" and "train" in folders:
            raise InputError(f"{named[0]}: expected class folders as in train, found none; add them")
    return folders


def _subfolders(folder: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError as error:
        raise InputError(
            f"{folder}: expected a folder of images, but it cannot be opened ({error.strerror}); name another with "
            "--data.folder"
        ) from None


def _shares(files: Files, share: float, parts: int) -> list[NDArray[np.int64]]:
    """Split every class into `parts` disjoint shares and the rest: their file indices, each part sorted."""
    if not parts:
        return [np.arange(len(files.paths))]
    shares: list[list[NDArray[np.int64]]] = [[] for _ in range(parts + 1)]
    edges = np.searchsorted(files.labels, np.arange(1, len(files.classes)))
    for name, rows in zip(files.classes, np.split(np.arange(len(files.labels)), edges), strict=True):
        inside = len(os.path.join(files.folder, name, ""))
        keys = [hashlib.blake2b(os.fsencode(files.paths[i][inside:]), digest_size=8).digest() for i in rows]
        ranked = rows[sorted(range(len(rows)), key=keys.__getitem__)]
        count = max(1, min(round(share * len(rows)), (len(rows) - 1) // parts)) if len(rows) > parts else 0
        for i, part in enumerate(np.split(ranked, [count * i for i in range(1, parts + 1)])):
            shares[i].append(part)
    if any(not sum(map(len, rows)) for rows in shares):
        raise InputError(
            f"{files.folder}: expected a class with at least {parts + 1} images, found only smaller ones; add images"
        )
    return [np.sort(np.concatenate(rows)) for rows in shares]
