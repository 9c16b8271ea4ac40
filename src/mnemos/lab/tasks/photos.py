"""Photos in class folders, in ImageNet's layout or with one folder per class."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos import libraries
from mnemos.registry import register
from mnemos.types import InputError

from .augment import AugmentConfig
from .files import first_names, repeated
from .image_task import IMAGENET, Colours, ImagePreprocessing, ImageTask
from .pictures import ENDINGS, FilePictures, is_image
from .task import SPLITS, DataConfig, HeldOut, Split

_FOLDERS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("val", "validation", "valid"),
    "test": ("test",),
}
COMPARED = 20_000  # photos at most whose contents are compared, to say which are in two splits: a second or two


class Photos(NamedTuple):
    """Images below the class folders of a folder, by class; a label [N] is an index into `classes`."""

    folder: str
    classes: tuple[str, ...]
    paths: list[str]
    labels: NDArray[np.int32]
    left_out: list[str]  # the other files there that are not hidden

    def only(self, rows: NDArray[np.int64]) -> "Photos":
        return self._replace(paths=[self.paths[row] for row in rows.tolist()], labels=self.labels[rows])

    def described(self) -> str:
        return f"{len(self.paths):,} photos of {len(self.classes)} classes: {self.folder}"


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
        folders = _split_folders(self.folder)
        train = scan(folders.pop("train", self.folder))
        held_out = [scan(folder, train.classes) for folder in folders.values()]
        return [path for photos in (train, *held_out) for path in photos.paths]

    def unscored(self) -> frozenset[str]:
        return frozenset({"mean", "std"})  # as the model wants its pixels

    def build(self) -> ImageTask:
        self.require("0 < held_out < 0.5")
        splits = read_layout(self.folder, self.held_out)
        train = splits["train"]
        if len(train.classes) < 2:
            raise InputError(
                f"{train.folder}: expected at least two class folders with images, found one, {train.classes[0]!r}; "
                "check the path"
            )
        task = self._task(splits)
        about = [f"{split:5}  {photos.described()}" for split, photos in splits.items()]
        about[0] += f": {first_names(train.classes)}"
        if left_out := dict.fromkeys(path for photos in splits.values() for path in photos.left_out):
            about.append(f"left out: {first_names([os.path.relpath(path, self.folder) for path in left_out])}")
        if sum(len(photos.paths) for photos in splits.values()) <= COMPARED:
            about += repeated({split: {path: _content(path) for path in one.paths} for split, one in splits.items()})
        task.about = tuple(about)
        return task

    def build_to_score(self, split: HeldOut, trained: Any = None) -> ImageTask:
        """A folder without splits is scored whole; its classes are some of the run's."""
        folders = _split_folders(self.folder)
        whole = not {"valid", "test"} & {*folders}
        folder = folders.get("train", self.folder) if whole else folders.get(split, folders.get("valid"))
        if folder is None:
            raise InputError(
                f"{self.folder}: expected a folder for the {split} split, found {' and '.join(folders)}; choose "
                "another with --split, or name one of them"
            )
        photos = scan(folder, trained.names or None if isinstance(trained, ImagePreprocessing) else None)
        task = self._task(dict.fromkeys(SPLITS, photos))
        task.about, task.whole = (f"scored: {'all' if whole else f'the {split} split'}, {photos.described()}",), whole
        return task

    def _task(self, splits: dict[Split, Photos]) -> ImageTask:
        self.require("size >= 1", "len(mean) == len(std) == 3", "min(std) > 0")
        pictures = {
            split: FilePictures(photos.paths, photos.labels, self.size, self.augment.centre)
            for split, photos in splits.items()
        }
        classes, colours = splits["train"].classes, Colours(self.mean, self.std)
        return ImageTask(pictures, classes, self.size, colours, self.augment, self.workers)


def _content(path: str) -> tuple[int, bytes]:
    """The size of a file, and the hash of its first 64 KiB."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.sha256(file.read(2**16)).digest()


def read_layout(folder: str | os.PathLike[str], held_out: float) -> dict[Split, Photos]:
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
    train = scan(folders.pop("train", folder))
    splits = {split: scan(path, train.classes) for split, path in folders.items()}
    if {*splits} == {"valid"}:
        splits = {"test": splits["valid"]}
    missing = [split for split in SPLITS[1:] if split not in splits]
    for split, rows in zip([*missing, "train"], _shares(train, held_out, len(missing)), strict=True):
        splits[split] = train.only(rows)
    return {split: splits[split] for split in SPLITS}


def scan(folder: str, classes: Sequence[str] | None = None) -> Photos:
    """List the images below the class folders of a folder, as torchvision does. None: all its folders are classes."""
    libraries.torchvision()
    from torchvision.datasets.folder import make_dataset

    own = sorted(_subfolders(folder))
    if not own:
        images = os.path.isdir(folder) and any(map(is_image, os.listdir(folder)))
        found = "images and no folder; name the folder above" if images else "none; check the path"
        raise InputError(f"{folder}: expected class folders with images, found {found}")
    index = {name: i for i, name in enumerate(classes or own)}
    if unknown := [name for name in own if name not in index]:
        raise InputError(
            f"{os.path.join(folder, unknown[0])}: expected a class of the training data, found {unknown[0]!r}; "
            "remove this folder, or train with the class"
        )

    left_out: list[str] = []

    def wanted(path: str) -> bool:
        hidden = f"{os.sep}." in path[len(folder) :]
        if not hidden and not is_image(path):
            left_out.append(path)
        return is_image(path) and not hidden

    pairs = make_dataset(folder, {name: index[name] for name in own}, is_valid_file=wanted, allow_empty=True)
    labels = np.array([label for _, label in pairs], np.int32)
    if empty := sorted({index[name] for name in own} - {*labels.tolist()}):
        raise InputError(
            f"{os.path.join(folder, [*index][empty[0]])}: expected images ({' '.join(ENDINGS)}), found none; add "
            "images or remove the folder"
        )
    return Photos(folder, tuple(index), [path for path, _ in pairs], labels, left_out)


def _split_folders(folder: str) -> dict[Split, str]:
    """The folders of splits that hold class folders and no images of their own: train may be a class, the vehicle."""
    below = _subfolders(folder)
    folders: dict[Split, str] = {}
    for split, names in _FOLDERS.items():
        paths = {
            os.path.realpath(path): path for path in (os.path.join(folder, name) for name in names if name in below)
        }
        whole = [path for path in paths.values() if _subfolders(path) and not any(map(is_image, os.listdir(path)))]
        if len(whole) > 1:
            raise InputError(
                f"{folder}: expected one folder for the {split} split, found "
                f"{' and '.join(map(os.path.basename, whole))}; join them, or remove one"
            )
        if whole:
            folders[split] = whole[0]
        elif paths and split == "valid" and "train" in folders:
            raise InputError(f"{next(iter(paths.values()))}: expected class folders as in train, found none; add them")
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


def _shares(photos: Photos, share: float, parts: int) -> list[NDArray[np.int64]]:
    """Split every class into `parts` disjoint shares and the rest: their image indices, each part sorted."""
    if not parts:
        return [np.arange(len(photos.paths))]
    shares: list[list[NDArray[np.int64]]] = [[] for _ in range(parts + 1)]
    edges = np.searchsorted(photos.labels, np.arange(1, len(photos.classes)))
    for name, rows in zip(photos.classes, np.split(np.arange(len(photos.labels)), edges), strict=True):
        inside = len(os.path.join(photos.folder, name, ""))
        keys = [hashlib.blake2b(os.fsencode(photos.paths[i][inside:]), digest_size=8).digest() for i in rows]
        ranked = rows[sorted(range(len(rows)), key=keys.__getitem__)]
        count = max(1, min(round(share * len(rows)), (len(rows) - 1) // parts)) if len(rows) > parts else 0
        for i, part in enumerate(np.split(ranked, [count * i for i in range(1, parts + 1)])):
            shares[i].append(part)
    if any(not sum(map(len, rows)) for rows in shares):
        raise InputError(
            f"{photos.folder}: expected a class with at least {parts + 1} images, found only smaller ones; add images"
        )
    return [np.sort(np.concatenate(rows)) for rows in shares]
