"""Pictures in files with their annotations, as COCO's and VOC's readers find them: checks, counts, decoding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.lab.tasks.pictures import check_image_files, problem, read_image
from mnemos.types import InputError

from .scenes import Annotation, coco_masks, decode, is_number, is_polygon, run_lengths

_LEAST = 0.01  # pixels: narrower boxes, such as an edge's rounding error, vanish when they are mirrored or scaled
_FAR = 100_000  # pixels from the origin: the library takes minutes, or never ends, to draw polygons that go further


@dataclass
class Listed:
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

    def __init__(self, listed: Sequence[Listed], categories: dict[int, str], where: str) -> None:
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

    def _keeps(self, annotation: Annotation, of: Listed, where: str) -> bool:
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

    def said(self) -> str:
        """How many pictures, objects and classes there are, and what was left out."""
        counts = Counter(a["category_id"] for one in self._listed for a in one.annotations)
        groups = sum(a["iscrowd"] for one in self._listed for a in one.annotations)
        empty = sum(not one.annotations for one in self._listed)
        classes = _counted(len(counts), "class", "classes")
        objects = _counted(sum(counts.values()), "object", "objects")
        parts = [f"{_counted(len(self), 'picture', 'pictures')} with {objects} of {classes}"]
        parts += [f"{groups:,} of the objects groups or difficult"] if groups else []
        parts += [f"{_counted(empty, 'picture', 'pictures')} without an object"] if empty else []
        parts += [f"{what}: {n:,}" for what, n in sorted(self.skipped.items())]
        return ", ".join(parts)


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _check_files(paths: Sequence[str], where: str) -> None:
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        more = f", and {len(missing) - 1:,} more" if missing[1:] else ""
        raise InputError(
            f"{where}: expected every picture that it names, found no {missing[0]}{more}; add them or name their folder"
        )
    check_image_files(paths)


def _encloses(annotation: Annotation, of: Listed, name: str) -> bool:
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


def _area(annotation: Annotation, of: Listed) -> float:
    """The pixels of an object's segmentation, which is COCO's `area`; of its box if it has none."""
    found = annotation.get("segmentation")
    if found:
        return float(coco_masks().area(run_lengths(found, of.height, of.width)))
    return float(annotation["bbox"][2] * annotation["bbox"][3])


def _has_extent(polygon: list[float], of: Listed) -> bool:
    """Whether a polygon has three points, and its bounding box an area in the picture."""
    x, y = polygon[::2], polygon[1::2]
    return len(x) >= 3 and min(max(x), of.width) > max(min(x), 0) and min(max(y), of.height) > max(min(y), 0)
