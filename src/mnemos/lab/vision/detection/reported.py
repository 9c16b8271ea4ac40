"""What a finished detector leaves in its run's folder: all detections, some photos with them, and the AP of classes."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import write_bytes, write_json
from mnemos.lab.tasks.pictures import pillow
from mnemos.types import JSONObject

from .average_precision import AveragePrecision
from .overlay import overlay
from .scenes import Annotation, Scenes

DETECTIONS = "detections.json"  # in a run's folder: those of the scored pictures, in COCO's result format
SHOWN = "detections"  # the folder of photos with the objects that are there, and beside them those that were found
PHOTOS = 8  # that are shown
LEAST = 0.3  # the least score of a detection that is shown
_LONGEST, _GAP, _QUALITY = 480, 12, 85  # pixels of a drawn photo and between the two; quality of the JPEG

Found = tuple[int, list[Annotation]]  # (index of a picture, its detections in COCO's result format)


def write_detections(folder: Path, scenes: Scenes, found: Sequence[Found]) -> None:
    """Write detections.json, and the first photos with an object twice: with what is there, and with what was found.

    The files are detections/NUMBER-ID.jpg: annotations on the left, detections of at least `LEAST` on the right.
    """
    named = [{**one, "image_id": scenes.image_id(row)} for row, entries in found for one in entries]
    write_json(folder / DETECTIONS, named)
    names = dict(zip(scenes.categories, scenes.classes, strict=True))
    shown = [one for one in found if any(not a.get("iscrowd", 0) for a in scenes.annotations(one[0]))]
    (folder / SHOWN).mkdir(exist_ok=True)
    for old in (folder / SHOWN).glob("*.jpg"):
        old.unlink()
    for number, (row, entries) in enumerate(shown[:PHOTOS], start=1):
        picture = scenes.picture(row)
        truth = overlay(picture, scenes.annotations(row), names, _LONGEST)
        guess = overlay(picture, [one for one in entries if one["score"] >= LEAST], names, _LONGEST)
        gap = np.full((truth.shape[0], _GAP, 3), 255, np.uint8)
        file = folder / SHOWN / f"{number}-{scenes.image_id(row)}.jpg"
        write_bytes(file, jpeg(np.concatenate([truth, gap, guess], 1), _QUALITY))


def class_figures(scenes: Scenes, scored: Mapping[str, AveragePrecision], figures: Sequence[str]) -> list[JSONObject]:
    """[{"class", "box AP", "box AP50", …}] of each class, in per cent; None where the pictures have no such object.

    scored: {"box" or "mask": its evaluation}; figures: those "AP …" that are given.
    """
    columns = {
        f"{kind} {figure}": of.by_class(figure)
        for kind, of in scored.items()
        for figure in figures
        if figure.startswith("AP")
    }
    return [
        {"class": name} | {what: _rounded(values[category]) for what, values in columns.items()}
        for name, category in zip(scenes.classes, scenes.categories, strict=True)
    ]


def _rounded(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None


def jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """A picture [H, W, 3] as the bytes of a JPEG file."""
    written: Any = io.BytesIO()
    pillow().fromarray(pixels).save(written, "JPEG", quality=quality)
    return bytes(written.getvalue())
