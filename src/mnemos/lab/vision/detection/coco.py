"""Photos with annotations in COCO's format: the files of a split, what they say, checked and counted; their task."""

import copy
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import read_bytes
from mnemos.lab.tasks.pictures import read_image
from mnemos.lab.tasks.row_order import held_out
from mnemos.lab.tasks.task import DataConfig, Split
from mnemos.registry import register
from mnemos.types import InputError

from .results import FIGURES, LARGE, SMALL
from .scenes import Annotation, Scenes, coco_masks, decode, run_lengths
from .task import DetectionTask

_LEAST = 0.01  # pixels: narrower boxes, such as an edge's rounding error, vanish when they are mirrored or scaled
_FAR = 100_000  # pixels from the origin: the library takes minutes, or never ends, to draw polygons that go further
_LAYOUTS = (  # of a split's annotations, and of its photos
    ("annotations/instances_{}.json", "{}"),
    ("annotations/{}.json", "{}"),
    ("{}/_annotations.coco.json", "{}"),  # as Roboflow exports it
    ("{}.json", "{}"),
)
_TRAIN, _TEST = ("train2017", "train2014", "train"), ("val2017", "val2014", "valid", "val", "test")


@register
@dataclass(frozen=True)
class COCOConfig(DataConfig):
    """Photos with annotations in COCO's format: COCO 2017 itself, or any folder of that format.

    `folder` has annotations/instances_SPLIT.json and the photos in SPLIT (or annotations/SPLIT.json,
    SPLIT/_annotations.coco.json, SPLIT.json; photos also in images/SPLIT or images). The test split is COCO's
    validation split, whose annotations are public; one with the name of the training split scores photos that are
    trained on. `valid_size` training photos, chosen at random, are the validation split; 0: it is the test split, as is
    usual for COCO, and then nothing may be chosen by it.
    """

    name: ClassVar[str] = "coco"

    folder: str = "coco"
    train: str = ""  # the name of the split; "": train2017, or its usual other names
    test: str = ""  # likewise: val2017
    valid_size: int = 0
    masks: bool = True  # whether masks are trained and scored
    flip: bool = True  # mirror half of the training pictures
    workers: int = 0  # processes that read and decode photos and masks in advance; 0: the training process does

    @property
    def valid_is_test(self) -> bool:
        return not self.valid_size

    def files(self) -> tuple[Path, ...]:
        return find_split(self.folder, self.train, True)[0], find_split(self.folder, self.test, False)[0]

    def build(self) -> DetectionTask:
        """The task. Raises InputError for a folder of another layout, wrong annotations and missing photos."""
        # --- the splits ---
        whole = read_coco(*find_split(self.folder, self.train, training=True))
        test = whole
        if not self.test or self.test != self.train:
            known = dict(zip(whole.categories, whole.classes, strict=True))
            test = read_coco(*find_split(self.folder, self.test, training=False), known)
        if not 0 <= self.valid_size < len(whole):
            raise InputError(
                f"data.valid_size: expected 0 to {len(whole) - 1:,}, fewer than the training photos, found "
                f"{self.valid_size}; change it"
            )
        valid, rows = test, np.arange(len(whole))
        if self.valid_size:
            chosen, rows = held_out(len(whole), (self.valid_size,), "data.valid_size")
            valid = whole.only(chosen)
        for split, scenes in (("valid", valid), ("test", test)):
            if not scenes.areas():
                problem = "none; raise data.valid_size, or name an annotated split as data.test"
                if any(scenes.annotations(row) for row in range(len(scenes))):
                    problem = "groups (iscrowd 1) alone; set iscrowd to 0 where one is a plain object"
                raise InputError(f"{split} split: expected an annotated object, to score detections, found {problem}")
        useful = [row for row in rows.tolist() if whole.plain(row)]
        splits: dict[Split, Scenes] = {"train": whole.only(np.array(useful, np.int64)), "valid": valid, "test": test}

        # --- the figures of sizes of which every held-out split has an object ---
        absent = set()
        for size, (low, high) in {"small": (0, SMALL), "medium": (SMALL, LARGE), "large": (LARGE, math.inf)}.items():
            if not all(any(low <= area <= high for area in scenes.areas()) for scenes in (valid, test)):
                absent |= {f"AP {size}", f"AR {size}"}
        figures = [figure for figure in FIGURES if figure not in absent]

        # --- what is printed before training ---
        task = DetectionTask(splits, self.masks, self.flip, figures, self.workers)
        left_out = len(rows) - len(useful)
        more = f"; {left_out:,} without an object are not trained on" if left_out else ""
        origin = "the test split, so nothing may be chosen by it"
        if self.valid_size:
            origin = f"{self.valid_size:,} of the training photos, chosen at random"
        task.about = f"train  {whole.describe()}{more}", f"valid  {origin}", f"test   {test.describe()}"
        return task


def find_split(folder: str | Path, split: str, training: bool) -> tuple[Path, tuple[Path, ...]]:
    """(annotation file, folders where its photos may be) of a split; "": the first with one of COCO's usual names."""
    folder = Path(folder)
    names = (split,) if split else (_TRAIN if training else _TEST)
    for name in names:
        for pattern, photos in _LAYOUTS:
            file = folder / pattern.format(name)
            if file.is_file():
                folders = folder / photos.format(name), folder / "images" / name, folder / "images", folder
                return file, tuple(one for one in folders if one.is_dir())
    raise InputError(
        f"{folder}: expected annotations in COCO's format, such as annotations/instances_{names[0]}.json, found none; "
        f"name the folder with data.folder, and the split with {'data.train' if training else 'data.test'}"
    )


def read_coco(file: Path, folders: tuple[Path, ...], categories: dict[int, str] | None = None) -> "FileScenes":
    """The pictures of an annotation file. Cost: the whole file in memory.

    folders: all pictures are read from the first one that has the file of the first picture. categories: {id: name} of
    a training split, whose labels another split must share; by default the file's own, by id.
    Annotations whose box has no area within the picture, or whose segmentation encloses nothing, are left out. One
    without "area" gets that of its segmentation, or else of its box.
    Raises InputError for a file of another format, for an id that has another name in `categories`, for annotations of
    unknown categories or pictures or without numbers, and for missing pictures.
    """
    try:
        content = json.loads(read_bytes(file))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: expected annotations as JSON, but they cannot be read ({error}); check it") from None
    for name in ("images", "annotations", "categories"):
        entries = content.get(name) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise InputError(
                f"{file}: expected COCO's lists images, annotations and categories, found no list {name!r}; "
                "name a file of instances"
            )

    # --- categories ---
    own: dict[int, str] = {}
    for one in content["categories"]:
        number, name = _integer(one, "id", file), str(_value(one, "name", file))
        if own.setdefault(number, name) != name:
            raise InputError(
                f"{file}: expected one category of each id, found {own[number]!r} and {name!r} of id {number}; number "
                "them anew"
            )
        if categories is not None and categories.get(number, name) != name:
            raise InputError(
                f"{file}: expected category {number} to be {categories[number]!r}, as in the training split, found "
                f"{name!r}; number the categories of both files alike"
            )
    if categories is None:
        categories = dict(sorted(own.items()))

    # --- pictures ---
    # Tools that ran on Windows separate folders by backslashes.
    names = [str(_value(image, "file_name", file)).replace("\\", "/") for image in content["images"]]
    if not names:
        raise InputError(f"{file}: expected at least one picture, found none; check the annotations")
    photos = next((one for one in folders if (one / names[0]).is_file()), folders[0])
    listed: dict[int, ListedPicture] = {}
    for image, name in zip(content["images"], names, strict=True):
        number, height, width = (_integer(image, key, file) for key in ("id", "height", "width"))
        if number in listed:
            raise InputError(f"{file}: expected one picture of each id, found two of id {number}; number them anew")
        if min(height, width) < 1:
            raise InputError(
                f"{file}: expected a height and width of at least 1, found {height} and {width} of {name}; correct them"
            )
        listed[number] = ListedPicture(photos / name, number, height, width)
    if missing := [one.path for one in listed.values() if not one.path.is_file()]:
        more = f", and {len(missing) - 1:,} more" if missing[1:] else ""
        raise InputError(
            f"{file}: expected every picture that it names, found no {missing[0]}{more}; add them or name their folder"
        )

    # --- annotations ---
    skipped, ids = Counter[str](), tuple(categories)
    for entry in content["annotations"]:
        number = _integer(entry, "image_id", file)
        if number not in listed:
            raise InputError(
                f"{file}: expected annotations of its pictures, found annotation {entry.get('id', '?')} of an unknown "
                f"picture {number}; add the picture or remove the annotation"
            )
        one = listed[number]
        name = f"{file}: annotation {entry.get('id', '?')} of {one.path.name}"
        if entry.get("category_id") not in ids:
            known = ", ".join(map(str, ids[:10])) or "the file's list, which is empty"
            raise InputError(
                f"{name}: expected a category of {known}{', …' if ids[10:] else ''}, found "
                f"{entry.get('category_id')!r}; add it to the categories or remove the annotation"
            )
        box, crowd, area = entry.get("bbox"), entry.get("iscrowd") or 0, entry.get("area")
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
            raise InputError(f"{name}: expected bbox [x, y, width, height], found {str(box)[:60]}; correct it")
        if crowd not in (0, 1):
            raise InputError(f"{name}: expected 0 or 1 as iscrowd, found {str(crowd)[:60]!r}; correct it")
        if area is not None and not (_is_number(area) and area >= 0):
            raise InputError(f"{name}: expected at least 0 as area, found {str(area)[:60]!r}; correct it")
        entry["iscrowd"] = int(crowd)

        # --- what is left out, and what is counted ---
        x, y, w, h = box
        if min(x + w, one.width) - max(x, 0) < _LEAST or min(y + h, one.height) - max(y, 0) < _LEAST:
            skipped["boxes without an area in the picture"] += 1
            continue
        if entry.get("segmentation") and not _encloses(entry, one, name):
            skipped["objects whose segmentation encloses nothing"] += 1
            continue
        if x < 0 or y < 0 or x + w > one.width or y + h > one.height:
            skipped["boxes cut at the edge"] += 1
        if area is None:
            shape = entry.get("segmentation")
            area = coco_masks().area(run_lengths(shape, one.height, one.width)) if shape else w * h
            entry["area"] = float(area)
            skipped["objects without an area, measured here"] += 1  # told, because the figures by size depend on it
        one.annotations.append(entry)
    return FileScenes(list(listed.values()), categories, skipped)


def _value(entry: dict[str, Any], name: str, file: Path) -> Any:
    if name not in entry:
        raise InputError(f"{file}: expected {name!r} in every entry, found {str(entry)[:80]}; add it")
    return entry[name]


def _integer(entry: dict[str, Any], name: str, file: Path) -> int:
    value = _value(entry, name, file)
    if isinstance(value, float) and value.is_integer():  # as tools that keep tables write it
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{file}: expected an integer as {name!r}, found {value!r:.80}; correct it")
    return value


@dataclass
class ListedPicture:
    """A picture that an annotation file names, with its entries in COCO's format."""

    path: Path
    image_id: int
    height: int
    width: int
    annotations: list[Annotation] = field(default_factory=list)


class FileScenes(Scenes):
    """`Scenes` of files, decoded when they are read. skipped: what `read_coco` left out or counted."""

    def __init__(self, listed: Sequence[ListedPicture], categories: dict[int, str], skipped: Counter[str]) -> None:
        self.classes, self.categories = tuple(categories.values()), tuple(categories)
        self._listed, self.skipped = list(listed), skipped
        self.sizes = np.array([(one.height, one.width) for one in listed], np.int64)
        objects = [one for row in range(len(self)) for one in self.plain(row)]
        self.has_masks = bool(objects) and all(one.get("segmentation") for one in objects)

    def only(self, rows: NDArray[np.int64]) -> "FileScenes":
        """Some of the pictures, in the order of `rows`."""
        part = copy.copy(self)
        part._listed, part.sizes = [self._listed[row] for row in rows.tolist()], self.sizes[rows]
        return part

    def image_id(self, index: int) -> int:
        return self._listed[index].image_id

    def picture(self, index: int) -> NDArray[np.uint8]:
        """The picture [H, W, 3], not turned by EXIF data: annotations refer to the pixels as they are stored.

        Raises InputError for a file that cannot be decoded, or of another size than its annotations say.
        """
        one = self._listed[index]
        pixels = np.array(read_image(one.path, upright=False))
        if pixels.shape[:2] != (one.height, one.width):
            turned = read_image(one.path).size == (one.width, one.height)
            fix = "turn its pixels as its EXIF data say, and save it without them" if turned else "correct either"
            raise InputError(
                f"{one.path}: expected {one.width} x {one.height} pixels, as its annotations say, found "
                f"{pixels.shape[1]} x {pixels.shape[0]}; {fix}"
            )
        return pixels

    def annotations(self, index: int) -> Sequence[Annotation]:
        return self._listed[index].annotations

    def areas(self) -> list[float]:
        """The areas of all objects, without groups."""
        return [one["area"] for row in range(len(self)) for one in self.plain(row)]

    def describe(self) -> str:
        """How many pictures, objects and classes there are, and what was left out."""

        def count(number: int, one: str, several: str) -> str:
            return f"{number:,} {one if number == 1 else several}"

        every = [a for one in self._listed for a in one.annotations]
        groups, empty = len(every) - len(self.areas()), sum(not one.annotations for one in self._listed)
        classes = count(len({a["category_id"] for a in every}), "class", "classes")
        objects = count(len(every), "object", "objects")
        parts = [f"{count(len(self), 'picture', 'pictures')} with {objects} of {classes}"]
        parts += [f"{groups:,} of the objects groups"] if groups else []
        parts += [f"{count(empty, 'picture', 'pictures')} without an object"] if empty else []
        return ", ".join([*parts, *(f"{what}: {n:,}" for what, n in sorted(self.skipped.items()))])


def _encloses(annotation: Annotation, of: ListedPicture, name: str) -> bool:
    """Whether a segmentation encloses pixels; its polygons that have no extent in the picture are removed.

    Raises InputError unless it is polygons, or run lengths of the picture's pixels.
    """
    shape = annotation["segmentation"]
    if isinstance(shape, list):
        # The library would cut or drop a polygon with half a point.
        wrong = [
            one for one in shape if not (isinstance(one, list) and len(one) % 2 == 0 and all(map(_is_number, one)))
        ]
        if wrong:
            raise InputError(
                f"{name}: segmentation: expected polygons [x, y, x, y, …] of finite numbers, found "
                f"{str(wrong[0])[:60]}; correct the annotation"
            )
        furthest = max((abs(n) for one in shape for n in one), default=0)
        if furthest > _FAR:
            raise InputError(f"{name}: expected polygons within {_FAR:,} pixels, found {furthest:g}; correct them")
        annotation["segmentation"] = [one for one in shape if _has_extent(one, of)]
        return bool(annotation["segmentation"])
    pixels = of.height * of.width
    try:
        if (size := list(shape["size"])) == [of.height, of.width]:
            if isinstance(shape["counts"], list) and sum(shape["counts"]) != pixels:  # which the library fills up
                raise ValueError("their sum")
            return bool(decode(run_lengths(shape, of.height, of.width)).any())
    except Exception as error:  # the library raises any
        raise InputError(
            f"{name}: segmentation: expected polygons [[x, y, …], …] or run lengths {{size, counts}} of {pixels:,} "
            f"pixels, found {str(shape)[:60]} ({type(error).__name__}); correct the annotation"
        ) from None
    raise InputError(f"{name}: expected run lengths of size {[of.height, of.width]}, found {size}; correct them")


def _has_extent(polygon: list[float], of: ListedPicture) -> bool:
    """Whether a polygon has three points, and its bounding box an area in the picture."""
    x, y = polygon[::2], polygon[1::2]
    return len(x) >= 3 and min(max(x), of.width) > max(min(x), 0) and min(max(y), of.height) > max(min(y), 0)


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
