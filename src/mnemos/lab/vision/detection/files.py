"""Pictures in files with their annotations, in the format of COCO: found, read, checked and counted.

One JSON file has the annotations of a split, in COCO's own folders or in others of that format.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import read_bytes
from mnemos.lab.tasks.pictures import check_image_files, problem, read_image
from mnemos.lab.tasks.row_order import held_out
from mnemos.lab.tasks.task import DataConfig, Split
from mnemos.registry import register
from mnemos.types import InputError

from .average_precision import FIGURES, LARGE, SMALL
from .scenes import Annotation, Part, Scenes, coco_masks, decode, is_number, is_polygon, run_lengths
from .task import DetectionTask

_LEAST = 0.01  # pixels: narrower boxes, such as an edge's rounding error, vanish when they are mirrored or scaled
_FAR = 100_000  # pixels from the origin: the library takes minutes, or never ends, to draw polygons that go further
_PLACES = (  # of a split's annotations, and of its photos
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
    SPLIT/_annotations.coco.json, SPLIT.json; photos also in images/SPLIT or images). train, test: the names of the
    splits; "": train2017 and val2017, or their usual other names. The test split is COCO's validation split, whose
    annotations are public. A test split with the name of the training split scores photos that are trained on.
    `valid_size` training photos, chosen at random, are the validation split; 0: it is the test split, as is usual for
    COCO, and then nothing may be chosen by it. masks, flip: see `ShapesConfig`. workers: processes that read and decode
    photos and masks in advance; 0: the training process does.
    """

    name: ClassVar[str] = "coco"

    folder: str = "coco"
    train: str = ""
    test: str = ""
    valid_size: int = 0
    masks: bool = True
    flip: bool = True
    workers: int = 0

    def files(self) -> tuple[Path, ...]:
        """The two annotation files. Their photos are not hashed."""
        return tuple(
            find_split(self.folder, split, train)[0] for split, train in ((self.train, True), (self.test, False))
        )

    def build(self) -> DetectionTask:
        """The task. Cost: annotations in memory; the first and last bytes of up to 20,000 photos are read.

        Raises InputError for a folder of another layout, wrong annotations, and missing or truncated photos.
        """
        train = read_coco(*find_split(self.folder, self.train, training=True))
        known = dict(zip(train.categories, train.classes, strict=True))
        same = self.test != "" and self.test == self.train
        test = train if same else read_coco(*find_split(self.folder, self.test, training=False), known)
        return _build_task(train, test, self.valid_size, self.masks, self.flip, self.workers)


@dataclass
class ListedPicture:
    """A picture that an annotation file names, with its entries in COCO's format."""

    path: Path
    image_id: int
    height: int
    width: int
    annotations: list[Annotation] = field(default_factory=list)


class FileScenes:
    """`Scenes` of files, decoded when they are read.

    Annotations whose box has no area within the picture, or whose segmentation encloses nothing, are left out;
    `skipped` counts them by reason. A box that leaves the picture in part is kept, and counted as "cut at the edge". A
    side below 0.01 pixels is no area. An annotation without "area" gets that of its segmentation, or else of its box,
    and is counted too: the figures by size depend on it.
    Raises InputError for missing and truncated files, and for annotations of unknown categories or without numbers.
    """

    def __init__(self, listed: Sequence[ListedPicture], categories: dict[int, str], where: str) -> None:
        if not listed:
            raise InputError(f"{where}: expected at least one picture, found none; check the annotations")
        self.classes: Sequence[str] = tuple(categories.values())
        self.categories: Sequence[int] = tuple(categories)
        self._listed = list(listed)
        self.skipped: Counter[str] = Counter()
        _check_files([str(one.path) for one in listed], where)
        for one in listed:
            one.annotations = [a for a in one.annotations if self._keeps(a, one, where)]
        every = [a for one in listed for a in one.annotations if not a.get("iscrowd", 0)]
        self.has_masks = bool(every) and all(a.get("segmentation") for a in every)
        self.sizes = np.array([(one.height, one.width) for one in listed], np.int64)

    def _keeps(self, annotation: Annotation, of: ListedPicture, where: str) -> bool:
        """Whether an annotation is of use. Raises InputError for one that is wrong."""
        name = f"{where}: annotation {annotation.get('id', '?')} of {of.path.name}"
        if annotation.get("category_id") not in self.categories:
            known = ", ".join(map(str, self.categories[:10])) + (", …" if self.categories[10:] else "")
            known = known or "the file's list, which is empty"
            raise InputError(
                f"{name}: expected a category of {known}, found {annotation.get('category_id')!r}; add it to the "
                "categories or remove the annotation"
            )
        box = annotation.get("bbox")
        if not isinstance(box, list) or len(box) != 4 or not all(is_number(n) for n in box):
            raise InputError(f"{name}: expected bbox [x, y, width, height], found {str(box)[:60]}; correct it")
        x, y, w, h = box
        crowd, area = annotation.get("iscrowd") or 0, annotation.get("area")
        if crowd not in (0, 1):
            raise InputError(f"{name}: expected 0 or 1 as iscrowd, found {str(crowd)[:60]!r}; correct it")
        if area is not None and not (is_number(area) and area >= 0):
            raise InputError(f"{name}: expected at least 0 as area, found {str(area)[:60]!r}; correct it")
        annotation["iscrowd"] = int(crowd)
        if min(x + w, of.width) - max(x, 0) < _LEAST or min(y + h, of.height) - max(y, 0) < _LEAST:
            self.skipped["boxes without an area in the picture"] += 1
            return False
        if annotation.get("segmentation") and not _encloses(annotation, of, name):
            self.skipped["objects whose segmentation encloses nothing"] += 1
            return False
        if x < 0 or y < 0 or x + w > of.width or y + h > of.height:
            self.skipped["boxes cut at the edge"] += 1
        if area is None:
            annotation["area"] = _area(annotation, of)
            self.skipped["objects without an area, measured here"] += 1
        return True

    def __len__(self) -> int:
        return len(self._listed)

    def image_id(self, index: int) -> int:
        """The id of the annotation file."""
        return self._listed[index].image_id

    def path(self, index: int) -> Path:
        """The picture's file."""
        return self._listed[index].path

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
        """The entries of the annotation file."""
        return self._listed[index].annotations

    def describe(self) -> str:
        """How many pictures, objects and classes there are, and what was left out."""
        counts = Counter(a["category_id"] for one in self._listed for a in one.annotations)
        groups = sum(a["iscrowd"] for one in self._listed for a in one.annotations)
        empty = sum(not one.annotations for one in self._listed)
        classes = _count(len(counts), "class", "classes")
        objects = _count(sum(counts.values()), "object", "objects")
        parts = [f"{_count(len(self), 'picture', 'pictures')} with {objects} of {classes}"]
        parts += [f"{groups:,} of the objects groups"] if groups else []
        parts += [f"{_count(empty, 'picture', 'pictures')} without an object"] if empty else []
        parts += [f"{what}: {n:,}" for what, n in sorted(self.skipped.items())]
        return ", ".join(parts)


def find_split(folder: str | Path, split: str, training: bool) -> tuple[Path, tuple[Path, ...]]:
    """(annotation file, folders for the photos) of a split; "": COCO's usual names of the training or validation split.

    Photos may be in a folder of the split's name, in one of that name in `images`, in `images`, or in the folder
    itself, which is the last. Raises InputError if there are no annotations.
    """
    folder = Path(folder)
    names = (split,) if split else (_TRAIN if training else _TEST)
    for name in names:
        for pattern, photos in _PLACES:
            file = folder / pattern.format(name)
            if file.is_file():
                places = [folder / photos.format(name), folder / "images" / name, folder / "images", folder]
                return file, tuple(place for place in places if place.is_dir())
    which = "data.train" if training else "data.test"
    raise InputError(
        f"{folder}: expected annotations in COCO's format, such as annotations/instances_{names[0]}.json, found none; "
        f"name the folder with data.folder, and the split with {which}"
    )


def read_coco(file: Path, places: tuple[Path, ...], categories: dict[int, str] | None = None) -> FileScenes:
    """The pictures of an annotation file. Cost: the whole file in memory.

    places: folders. All pictures are read from the first one that has the file of the first picture.
    categories: {id: name} of a training split, whose labels another split must share; by default the file's own, by id.
    Raises InputError for a file of another format, for an id that has another name in `categories`, and as
    `FileScenes`.
    """
    content = _read_json(file)
    own: dict[int, str] = {}
    for one in content["categories"]:
        number, name = _integer(one, "id", file), str(_value(one, "name", file))
        if own.setdefault(number, name) != name:
            raise InputError(
                f"{file}: expected one category of each id, found {own[number]!r} and {name!r} of id {number}; number "
                "them anew"
            )
    if categories is None:
        categories = dict(sorted(own.items()))
    for number, name in own.items():
        if categories.get(number, name) != name:
            raise InputError(
                f"{file}: expected category {number} to be {categories[number]!r}, as in the training split, found "
                f"{name!r}; number the categories of both files alike"
            )
    names = [_file_name(image, file) for image in content["images"]]
    photos = next((place for place in places if (place / names[0]).is_file()), places[0]) if names else places[0]
    listed: dict[int, ListedPicture] = {}
    for image, name in zip(content["images"], names, strict=True):
        number = _integer(image, "id", file)
        if number in listed:
            raise InputError(f"{file}: expected one picture of each id, found two of id {number}; number them anew")
        path = photos / name
        height, width = _integer(image, "height", file), _integer(image, "width", file)
        if min(height, width) < 1:
            raise InputError(
                f"{file}: expected a height and width of at least 1, found {height} and {width} of {path.name}; "
                "correct them"
            )
        listed[number] = ListedPicture(path, number, height, width)
    for one in content["annotations"]:
        number = _integer(one, "image_id", file)
        if number not in listed:
            raise InputError(
                f"{file}: expected annotations of its pictures, found annotation {one.get('id', '?')} of an unknown "
                f"picture {number}; add the picture or remove the annotation"
            )
        listed[number].annotations.append(dict(one))
    return FileScenes(list(listed.values()), categories, str(file))


def _build_task(
    train: FileScenes, test: FileScenes, valid_size: int, masks: bool, flip: bool, workers: int
) -> DetectionTask:
    """The task of two splits of files, and a line about each."""
    splits: dict[Split, Scenes] = {"train": train, "valid": test, "test": test}
    if not 0 <= valid_size < len(train):
        raise InputError(
            f"data.valid_size: expected 0 to {len(train) - 1:,}, fewer than the training photos, found {valid_size}; "
            "change it"
        )
    if valid_size:
        valid, rest = held_out(len(train), (valid_size,), "data.valid_size")
        splits |= {"valid": Part(train, valid), "train": Part(train, rest)}
    rows = range(len(splits["train"]))
    for split, scenes in (("valid", splits["valid"]), ("test", test)):
        every = [one for row in range(len(scenes)) for one in scenes.annotations(row)]
        if all(one["iscrowd"] for one in every):
            fix = "raise data.valid_size" if split == "valid" and valid_size else "name an annotated split as data.test"
            found = "none"
            if every:
                found = "groups (iscrowd 1) alone"
                fix = "set iscrowd to 0 where an annotation is one plain object"
            raise InputError(f"{split} split: expected an annotated object, to score detections, found {found}; {fix}")
    shown = [row for row in rows if any(not one["iscrowd"] for one in splits["train"].annotations(row))]
    empty = len(rows) - len(shown)
    splits["train"] = Part(splits["train"], np.array(shown, np.int64))
    task = DetectionTask(splits, masks, flip, _figures(splits["valid"], splits["test"]), workers)
    task.about = tuple(_about(train, test, valid_size, empty))
    return task


def _figures(*held: Scenes) -> list[str]:
    """The figures of sizes of which every held-out split has an object."""
    found = set(FIGURES)
    for scenes in held:
        areas = [one["area"] for row in range(len(scenes)) for one in scenes.annotations(row) if not one["iscrowd"]]
        for size, (low, high) in {"small": (0, SMALL), "medium": (SMALL, LARGE), "large": (LARGE, math.inf)}.items():
            if not any(low <= area <= high for area in areas):
                found -= {f"AP {size}", f"AR {size}"}
    return [figure for figure in FIGURES if figure in found]


def _about(train: FileScenes, test: FileScenes, valid_size: int, empty: int) -> Iterator[str]:
    left = f"; {empty:,} without an object are not trained on" if empty else ""
    yield f"train  {train.describe()}{left}"
    chosen = f"{valid_size:,} of the training photos, chosen at random"
    held = chosen if valid_size else "the test split, so nothing may be chosen by it"
    yield f"valid  {held}"
    yield f"test   {test.describe()}"


def _count(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _check_files(paths: Sequence[str], where: str) -> None:
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        more = f", and {len(missing) - 1:,} more" if missing[1:] else ""
        raise InputError(
            f"{where}: expected every picture that it names, found no {missing[0]}{more}; add them or name their folder"
        )
    check_image_files(paths)


def _encloses(annotation: Annotation, of: ListedPicture, name: str) -> bool:
    """Whether a segmentation encloses pixels; its polygons that have no extent in the picture are removed.

    Raises InputError unless it is polygons, or run lengths of the picture's pixels.
    """
    found = annotation["segmentation"]
    if isinstance(found, list) and all(is_polygon(one) for one in found):
        furthest = max((abs(n) for one in found for n in one), default=0)
        if furthest > _FAR:
            raise InputError(f"{name}: expected polygons within {_FAR:,} pixels, found {furthest:g}; correct them")
        annotation["segmentation"] = [one for one in found if _has_extent(one, of)]
        return bool(annotation["segmentation"])
    try:
        lengths = run_lengths(found, of.height, of.width)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if (size := list(lengths["size"])) != [of.height, of.width]:
        raise InputError(f"{name}: expected run lengths of size {[of.height, of.width]}, found {size}; correct them")
    try:
        return bool(decode(lengths).any())
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"{name}: expected run lengths of {of.height * of.width:,} pixels, but they cannot be decoded "
            f"({problem(error)}); correct them"
        ) from None


def _area(annotation: Annotation, of: ListedPicture) -> float:
    """The pixels of an object's segmentation, which is COCO's `area`; of its box if it has none."""
    found = annotation.get("segmentation")
    if found:
        return float(coco_masks().area(run_lengths(found, of.height, of.width)))
    return float(annotation["bbox"][2] * annotation["bbox"][3])


def _has_extent(polygon: list[float], of: ListedPicture) -> bool:
    """Whether a polygon has three points, and its bounding box an area in the picture."""
    x, y = polygon[::2], polygon[1::2]
    return len(x) >= 3 and min(max(x), of.width) > max(min(x), 0) and min(max(y), of.height) > max(min(y), 0)


def _read_json(file: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(read_bytes(file))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: expected annotations as JSON, but they cannot be read ({error}); check it") from None
    for name in ("images", "annotations", "categories"):
        found = content.get(name) if isinstance(content, dict) else None
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise InputError(
                f"{file}: expected COCO's lists images, annotations and categories, found no list {name!r}; "
                "name a file of instances"
            )
    return content


def _value(entry: dict[str, Any], name: str, file: Path) -> Any:
    if name not in entry:
        raise InputError(f"{file}: expected {name!r} in every entry, found {str(entry)[:80]}; add it")
    return entry[name]


def _file_name(image: dict[str, Any], file: Path) -> str:
    """The name of a picture's file; tools that ran on Windows separate folders by backslashes."""
    return str(_value(image, "file_name", file)).replace("\\", "/")


def _integer(entry: dict[str, Any], name: str, file: Path) -> int:
    """An integer; tools that keep tables write it as 1.0."""
    found = _value(entry, name, file)
    if isinstance(found, float) and found.is_integer():
        return int(found)
    if isinstance(found, bool) or not isinstance(found, int):
        raise InputError(f"{file}: expected an integer as {name!r}, found {found!r:.80}; correct it")
    return found
