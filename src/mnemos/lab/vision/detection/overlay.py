"""Boxes, masks, names and scores drawn on a picture."""

import colorsys
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemos.lab.tasks.pictures import pillow

from .scenes import Annotation, decode, run_lengths

READABLE = 400  # pixels: pictures whose shorter side is smaller are enlarged, so that names can be read
_ENLARGED, _JPEG = 4_000, 65_500  # pixels: the most to which a picture is enlarged, and the most of a JPEG
_OPACITY = 0.45  # of a mask
_GOLDEN = 0.618034  # hues of successive numbers that are far apart


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
