"""The common form of detection data: pictures with annotations in COCO's format, whatever files they come from."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mnemos.libraries import faster_coco_eval
from mnemos.types import InputError

Annotation = dict[str, Any]  # an entry of COCO's "annotations"


class Objects(NamedTuple):
    """The objects of a picture for training: boxes [N, 4] float32 as (x1, y1, x2, y2) in pixels, labels [N] from 1.

    masks: [N, H, W] bool, or None. Groups of objects (`iscrowd`) and boxes without an area are left out.
    """

    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    masks: NDArray[np.bool_] | None


class Scenes(Protocol):
    """N pictures with the objects that they show.

    classes: the names of the labels 1, 2, …; label 0 is the background. categories: for each class, the id by which
    annotations and result files name it. has_masks: whether every object has a segmentation. sizes: [N, 2], (height,
    width) of each picture.
    """

    classes: Sequence[str]
    categories: Sequence[int]
    has_masks: bool
    sizes: NDArray[np.int64]

    def __len__(self) -> int: ...

    def image_id(self, index: int) -> int:
        """The id by which annotations and result files name the picture."""
        ...

    def picture(self, index: int) -> NDArray[np.uint8]:
        """The picture [H, W, 3]."""
        ...

    def annotations(self, index: int) -> Sequence[Annotation]:
        """The picture's entries of COCO's format: bbox (x, y, width, height), category_id, area, iscrowd and id.

        With masks also segmentation: polygons, or run lengths as text or as a list.
        """
        ...


def objects(scenes: Scenes, index: int, masks: bool = True) -> Objects:
    """The objects of a picture that a detector is trained to find. Boxes are cut at the picture's edge.

    masks: also those, where the data have them. Cost: N·H·W for masks.
    """
    height, width = scenes.sizes[index].tolist()
    label_of = {category: number for number, category in enumerate(scenes.categories, start=1)}
    found = [one for one in scenes.annotations(index) if not one.get("iscrowd", 0)]
    corners = np.array([corners_of(one, height, width) for one in found], np.float32).reshape(-1, 4)
    has_area = np.flatnonzero((corners[:, 2:] > corners[:, :2]).all(1))
    found = [found[row] for row in has_area.tolist()]
    labels = np.array([label_of[one["category_id"]] for one in found], np.int64)
    if not masks or not scenes.has_masks:
        return Objects(corners[has_area], labels, None)
    inside = np.zeros((len(found), height, width), np.bool_)
    for mask, one in zip(inside, found, strict=True):
        mask[:] = decode(run_lengths(one["segmentation"], height, width))
    return Objects(corners[has_area], labels, inside)


def corners_of(annotation: Annotation, height: int, width: int) -> tuple[float, float, float, float]:
    """(x1, y1, x2, y2) of an annotation's box, cut at the picture's edge."""
    x, y, w, h = annotation["bbox"]
    return max(x, 0.0), max(y, 0.0), min(x + w, float(width)), min(y + h, float(height))


def run_lengths(segmentation: Any, height: int, width: int) -> Annotation:
    """A segmentation of COCO's format, polygons or run lengths in either form, as compressed run lengths.

    Raises InputError for anything else, and for a polygon with half a point, which the library would cut or drop.
    """
    masks = coco_masks()
    parts = segmentation if isinstance(segmentation, list) else ()
    if (wrong := next((one for one in parts if isinstance(one, list) and not is_polygon(one)), None)) is not None:
        raise InputError(
            f"segmentation: expected polygons [x, y, x, y, …] of finite numbers, found {len(wrong)} values in "
            f"{str(wrong)[:60]}; correct the annotation"
        )
    try:
        if isinstance(segmentation, list):
            return masks.merge(masks.frPyObjects(segmentation, height, width))
        if isinstance(segmentation["counts"], list):
            return masks.frPyObjects(segmentation, height, width)
        counts = segmentation["counts"]
        return {"size": segmentation["size"], "counts": counts.encode() if isinstance(counts, str) else counts}
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"segmentation: expected polygons [[x, y, …], …] or run lengths {{size, counts}}, found "
            f"{str(segmentation)[:60]} ({type(error).__name__}); correct the annotation"
        ) from None


def is_polygon(value: Any) -> bool:
    """Whether a value is [x, y, x, y, …] of finite numbers."""
    return isinstance(value, list) and len(value) % 2 == 0 and all(map(is_number, value))


def is_number(value: Any) -> bool:
    """Whether a value is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def decode(lengths: Annotation) -> NDArray[np.bool_]:
    """The mask [H, W] of compressed run lengths."""
    return np.asarray(coco_masks().decode(lengths), np.bool_)


def encode(mask: NDArray[np.bool_]) -> Annotation:
    """A mask [H, W] as compressed run lengths {"size", "counts"} with counts as text, which JSON can hold."""
    found = coco_masks().encode(np.asfortranarray(mask, np.uint8))
    counts = found["counts"]
    return {"size": [int(n) for n in found["size"]], "counts": counts.decode() if isinstance(counts, bytes) else counts}


def coco_masks() -> Any:
    """The module of run lengths. Raises InputError with the install command if it is missing."""
    return faster_coco_eval().mask


class Part:
    """Some pictures of a data set: those with indices `rows`, in that order."""

    def __init__(self, scenes: Scenes, rows: NDArray[np.int64]) -> None:
        self.scenes, self.rows = scenes, rows
        self.classes, self.categories, self.has_masks = scenes.classes, scenes.categories, scenes.has_masks
        self.sizes = scenes.sizes[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def image_id(self, index: int) -> int:
        """See `Scenes`."""
        return self.scenes.image_id(int(self.rows[index]))

    def picture(self, index: int) -> NDArray[np.uint8]:
        """See `Scenes`."""
        return self.scenes.picture(int(self.rows[index]))

    def annotations(self, index: int) -> Sequence[Annotation]:
        """See `Scenes`."""
        return self.scenes.annotations(int(self.rows[index]))


def ground_truth(scenes: Scenes, indices: Sequence[int]) -> Annotation:
    """The pictures as the content of a COCO annotation file: {"images", "annotations", "categories"}."""
    images = []
    entries: list[Annotation] = []
    for index in indices:
        height, width = scenes.sizes[index].tolist()
        images.append({"id": scenes.image_id(index), "height": height, "width": width})
        entries += _numbered(scenes, index, len(entries))
    categories = zip(scenes.categories, scenes.classes, strict=True)
    return {
        "images": images,
        "annotations": entries,
        "categories": [{"id": number, "name": name} for number, name in categories],
    }


def _numbered(scenes: Scenes, index: int, before: int) -> Iterator[Annotation]:
    """The entries of a picture with ids of their own, from 1: the evaluation takes an id of 0 for no match."""
    for number, one in enumerate(scenes.annotations(index), start=before + 1):
        yield {**one, "id": number, "image_id": scenes.image_id(index), "iscrowd": int(one.get("iscrowd", 0))}
