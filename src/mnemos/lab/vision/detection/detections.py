"""What a finished detector leaves in its run's folder: all detections, some photos with them, and the AP of classes.

`overlay` draws boxes, masks, names and scores on a picture.
"""

import colorsys
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
from .scenes import Annotation, Scenes, decode, run_lengths

DETECTIONS = "detections.json"  # in a run's folder: those of the scored pictures, in COCO's result format
SHOWN = "detections"  # the folder of photos with the objects that are there, and beside them those that were found
PHOTOS = 8  # that are shown
LEAST = 0.3  # the least score of a detection that is shown
_LONGEST, _GAP, _QUALITY = 480, 12, 85  # pixels of a drawn photo and between the two; quality of the JPEG
Found = tuple[int, list[Annotation]]  # (index of a picture, its detections in COCO's result format)
READABLE = 400  # pixels: pictures whose shorter side is smaller are enlarged, so that names can be read
_ENLARGED, _JPEG = 4_000, 65_500  # pixels: the most to which a picture is enlarged, and the most of a JPEG
_OPACITY = 0.45  # of a mask
_GOLDEN = 0.618034  # hues of successive numbers that are far apart


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
        {"class": name} | {what: _round(values[category]) for what, values in columns.items()}
        for name, category in zip(scenes.classes, scenes.categories, strict=True)
    ]


def _round(value: float) -> float | None:
    return round(value, 2) if math.isfinite(value) else None


def jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """A picture [H, W, 3] as the bytes of a JPEG file."""
    written: Any = io.BytesIO()
    pillow().fromarray(pixels).save(written, "JPEG", quality=quality)
    return bytes(written.getvalue())


def overlay(
    picture: NDArray[np.uint8], entries: Sequence[Annotation], names: Mapping[int, str], longest: int | None = None
) -> NDArray[np.uint8]:
    """A picture [H, W, 3] with objects drawn on it: [h, w, 3], scaled so that max(h, w) is `longest`.

    longest: None leaves the size, or enlarges the picture by a whole number to a shorter side of at least 400, so that
    names can be read, but to at most 4,000 pixels; above 65,500, which JPEG does not have, it is scaled to these.
    entries: annotations or detections in COCO's format, with bbox, category_id, and optionally segmentation and score.
    names: of the categories; each category has a colour of its own. Objects of a greater score, or later ones, are
    drawn above others, larger masks below smaller ones. Cost: h·w per mask.
    """
    opener = pillow()
    height, width = picture.shape[:2]
    scale = _readable(height, width) if longest is None else longest / max(height, width)
    size = (max(1, round(scale * width)), max(1, round(scale * height)))
    canvas = np.array(opener.fromarray(picture).resize(size, opener.Resampling.BICUBIC), np.float32)
    colours = {category: _colour(number) for number, category in enumerate(names)}
    masked = [one for one in entries if one.get("segmentation")]
    for one in sorted(masked, key=lambda one: -one["bbox"][2] * one["bbox"][3]):
        mask = opener.fromarray(decode(run_lengths(one["segmentation"], height, width)))
        inside = np.array(mask.resize(size, opener.Resampling.NEAREST), np.bool_)
        canvas[inside] = (1 - _OPACITY) * canvas[inside] + _OPACITY * np.array(colours[one["category_id"]], np.float32)
    return _with_boxes(opener.fromarray(canvas.round().astype(np.uint8)), entries, names, colours, scale)


def _readable(height: int, width: int) -> float:
    longer = max(height, width)
    if longer > _JPEG:
        return _JPEG / longer
    return max(1, min(math.ceil(READABLE / min(height, width)), _ENLARGED // longer))


def _with_boxes(
    image: Any,
    entries: Sequence[Annotation],
    names: Mapping[int, str],
    colours: Mapping[int, tuple[int, int, int]],
    scale: float,
) -> NDArray[np.uint8]:
    from PIL import ImageDraw, ImageFont

    pen = ImageDraw.Draw(image)
    shorter = min(image.size)
    line = max(2, shorter // 250)
    try:
        font: Any = ImageFont.load_default(max(12, shorter // 36))
    except (TypeError, ImportError):  # an old Pillow, or one without FreeType, has one size
        font = ImageFont.load_default()
    entries = sorted(entries, key=lambda one: one.get("score", 0.0))
    for one in entries:
        x, y, w, h = (scale * n for n in one["bbox"])
        corners = x, y, max(x + w, x + 1), max(y + h, y + 1)
        pen.rectangle(corners, outline=colours[one["category_id"]], width=line)
    for one in entries:  # after all boxes, whose lines would cross them
        x, y, colour = scale * one["bbox"][0], scale * one["bbox"][1], colours[one["category_id"]]
        said = names[one["category_id"]] + (f" {one['score']:.2f}" if "score" in one else "")
        left, top, right, bottom = pen.textbbox((0, 0), said, font=font)
        across, down = right - left + 2 * line, bottom - top + 2 * line
        # Above the box where there is room, else inside; never beyond the picture.
        corner_x = min(max(0.0, x), max(0.0, image.size[0] - across))
        corner_y = y - down if y >= down else min(max(0.0, y), max(0.0, image.size[1] - down))
        pen.rectangle((corner_x, corner_y, corner_x + across, corner_y + down), fill=colour)
        bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
        place = corner_x + line - left, corner_y + line - top
        pen.text(place, said, fill=(0, 0, 0) if bright else (255, 255, 255), font=font)
    return np.array(image)


def _colour(number: int) -> tuple[int, int, int]:
    """A saturated colour; those of successive numbers differ in hue, and every second one is darker."""
    red, green, blue = colorsys.hsv_to_rgb((number * _GOLDEN) % 1.0, 0.85, 1.0 if number % 2 == 0 else 0.75)
    return round(255 * red), round(255 * green), round(255 * blue)
