"""What detections are worth, and what they look like: COCO's figures, drawn photos, and the files of a finished run."""

import colorsys
import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mnemos.atomic import write_bytes, write_json
from mnemos.lab.tasks.pictures import pillow
from mnemos.libraries import pycocotools
from mnemos.types import InputError, JSONObject

from .scenes import Annotation, Scenes, coco_masks, decode, run_lengths

FIGURES = {  # in COCO's order, with what they are
    "AP": "Mean average precision over classes and overlaps of 50 % to 95 %.",
    "AP50": "Average precision where an overlap of 50 % is right.",
    "AP75": "Average precision where an overlap of 75 % is right.",
    "AP small": "Average precision of objects below 32² pixels.",
    "AP medium": "Average precision of objects from 32² to 96² pixels.",
    "AP large": "Average precision of objects above 96² pixels.",
    "AR 1": "Average recall with 1 detection per picture.",
    "AR 10": "Average recall with 10 detections per picture.",
    "AR 100": "Average recall with 100 detections per picture.",
    "AR small": "Average recall of objects below 32² pixels.",
    "AR medium": "Average recall of objects from 32² to 96² pixels.",
    "AR large": "Average recall of objects above 96² pixels.",
}
SMALL, LARGE = 32**2, 96**2  # areas in pixels that divide the sizes
Mode = Literal["box", "mask"]

DETECTIONS = "detections.json"  # in a run's folder: those of the scored pictures, in COCO's result format
SHOWN = "detections"  # the folder of photos with their annotations, and beside them the detections
_PHOTOS, _LEAST_SCORE = 8, 0.3  # how many are shown, and the least score of a detection that is drawn
_LONGEST, _GAP, _QUALITY = 480, 12, 85  # pixels of a drawn photo and between the two; quality of the JPEG
_OPACITY = 0.45  # of a mask
_GOLDEN = 0.618034  # hues of successive numbers that are far apart


# ---- scores ----


class AveragePrecision:
    """The evaluation of detections against annotations, both in COCO's format, by pycocotools.

    figures: {name: value} of `FIGURES`, in per cent, as papers print them; NaN for sizes of which there is no object.
    Raises InputError for detections of unknown pictures, and for masks of detections without one.
    """

    def __init__(self, truth: dict[str, list[Annotation]], detections: Sequence[Annotation], mode: Mode) -> None:
        pycocotools()
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        known = {image["id"] for image in truth["images"]}
        if (other := next((one["image_id"] for one in detections if one["image_id"] not in known), None)) is not None:
            raise InputError(
                f"expected detections of annotated pictures, found one of picture {other!r}; score the split that was "
                "predicted"
            )
        if mode == "mask" and any("segmentation" not in one for one in detections):
            raise InputError(
                "expected a mask of every detection, found one without; set data.masks False, or use a detector with a "
                "mask branch (model.detector mask-rcnn)"
            )
        # COCO.loadRes is not used: it fails where nothing was detected, and takes the area of a mask from its box.
        entries = []
        for number, one in enumerate(detections, 1):
            area = coco_masks().area(one["segmentation"]) if mode == "mask" else one["bbox"][2] * one["bbox"][3]
            entries.append({**one, "id": number, "iscrowd": 0, "area": float(area)})
        if mode == "mask":  # a group may have none
            truth = {**truth, "annotations": [one for one in truth["annotations"] if one.get("segmentation")]}
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints
            sides = []
            for content in (truth, {**truth, "annotations": entries}):
                sides.append(COCO())
                sides[-1].dataset = content
                sides[-1].createIndex()
            self._evaluation: Any = COCOeval(*sides, {"box": "bbox", "mask": "segm"}[mode])
            self._evaluation.evaluate()
            self._evaluation.accumulate()
            self._evaluation.summarize()
        values = np.asarray(self._evaluation.stats, np.float64)
        self.figures = dict(zip(FIGURES, np.where(values < 0, np.nan, 100 * values).tolist(), strict=True))

    def by_class(self) -> Mapping[int, float]:
        """{id of a category: its AP in per cent}, by id, because two classes may have one name; NaN without objects."""
        precision = self._evaluation.eval["precision"]  # [overlaps, recalls, classes, sizes, numbers of detections]
        values = {}
        for number, category in enumerate(self._evaluation.params.catIds):
            some = precision[:, :, number, 0, -1]
            some = some[some > -1]
            values[int(category)] = 100 * float(some.mean()) if some.size else math.nan
        return values


def class_figures(scenes: Scenes, scored: Mapping[Mode, AveragePrecision]) -> list[JSONObject]:
    """[{"class", "box AP", "mask AP"}] of each class, in per cent; None where the pictures have no such object."""
    rows: list[JSONObject] = [{"class": name} for name in scenes.classes]
    for mode, of in scored.items():
        values = of.by_class()
        for row, category in zip(rows, scenes.categories, strict=True):
            row[f"{mode} AP"] = round(values[category], 2) if math.isfinite(values[category]) else None
    return rows


# ---- drawn photos ----


def write_detections(folder: Path, scenes: Scenes, detected: Sequence[tuple[int, list[Annotation]]]) -> None:
    """Write detections.json, and the first photos with an object as detections/NUMBER-ID.jpg, each twice.

    detected: (index of a picture, its detections in COCO's result format). Annotations are on the left, detections of a
    score of at least 0.3 on the right.
    """
    named = [{**one, "image_id": scenes.image_id(row)} for row, entries in detected for one in entries]
    write_json(folder / DETECTIONS, named)
    names = dict(zip(scenes.categories, scenes.classes, strict=True))
    shown = [(row, entries) for row, entries in detected if scenes.plain(row)]
    (folder / SHOWN).mkdir(exist_ok=True)
    for old in (folder / SHOWN).glob("*.jpg"):
        old.unlink()
    for number, (row, entries) in enumerate(shown[:_PHOTOS], start=1):
        picture = scenes.picture(row)
        truth = overlay(picture, scenes.annotations(row), names, _LONGEST)
        guess = overlay(picture, [one for one in entries if one["score"] >= _LEAST_SCORE], names, _LONGEST)
        gap = np.full((truth.shape[0], _GAP, 3), 255, np.uint8)
        file = folder / SHOWN / f"{number}-{scenes.image_id(row)}.jpg"
        write_bytes(file, jpeg(np.concatenate([truth, gap, guess], 1), _QUALITY))


def jpeg(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """A picture [H, W, 3] as the bytes of a JPEG file."""
    file = io.BytesIO()
    pillow().fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


def overlay(
    picture: NDArray[np.uint8], entries: Sequence[Annotation], names: Mapping[int, str], longest: int | None = None
) -> NDArray[np.uint8]:
    """A picture [H, W, 3] with objects drawn on it: [h, w, 3], scaled so that max(h, w) is `longest`.

    longest: None leaves the size, but small pictures are enlarged. entries: annotations or detections in COCO's format.
    names: of the categories; each category has a colour of its own. Cost: h·w per mask.
    """
    library = pillow()
    from PIL import ImageDraw, ImageFont

    # --- size ---
    height, width = picture.shape[:2]
    longer = max(height, width)
    if longest is not None:
        scale = longest / longer
    elif longer > 65_500:  # a JPEG has no more
        scale = 65_500 / longer
    else:  # names can be read from a shorter side of 400 pixels on; a whole number keeps pixels square
        scale = max(1, min(math.ceil(400 / min(height, width)), 4_000 // longer))
    size = (max(1, round(scale * width)), max(1, round(scale * height)))
    image = library.fromarray(picture).resize(size, library.Resampling.BICUBIC)

    # --- a saturated colour for each category; those of successive ones differ in hue, every second one is darker ---
    colours: dict[int, tuple[int, int, int]] = {}
    for number, category in enumerate(names):
        red, green, blue = colorsys.hsv_to_rgb((number * _GOLDEN) % 1.0, 0.85, 1.0 if number % 2 == 0 else 0.75)
        colours[category] = round(255 * red), round(255 * green), round(255 * blue)

    # --- masks, the larger below ---
    masked = [one for one in entries if one.get("segmentation")]
    for one in sorted(masked, key=lambda one: -one["bbox"][2] * one["bbox"][3]):
        inside = np.uint8(255 * _OPACITY) * decode(run_lengths(one["segmentation"], height, width))
        shade = library.fromarray(inside).resize(size, library.Resampling.NEAREST)
        image.paste(colours[one["category_id"]], mask=shade)

    # --- boxes, those of greater scores above; then names, which no box crosses ---
    pen, shorter = ImageDraw.Draw(image), min(size)
    line, font = max(2, shorter // 250), ImageFont.load_default(max(12, shorter // 36))
    entries = sorted(entries, key=lambda one: one.get("score", 0.0))
    for one in entries:
        x, y, w, h = (scale * n for n in one["bbox"])
        pen.rectangle((x, y, max(x + w, x + 1), max(y + h, y + 1)), outline=colours[one["category_id"]], width=line)
    for one in entries:
        x, y, colour = scale * one["bbox"][0], scale * one["bbox"][1], colours[one["category_id"]]
        text = names[one["category_id"]] + (f" {one['score']:.2f}" if "score" in one else "")
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        across, down = right - left + 2 * line, bottom - top + 2 * line
        # Above the box where there is room, else inside; never beyond the picture.
        x = min(max(0.0, x), max(0.0, size[0] - across))
        y = y - down if y >= down else min(max(0.0, y), max(0.0, size[1] - down))
        pen.rectangle((x, y, x + across, y + down), fill=colour)
        bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140
        pen.text((x + line - left, y + line - top), text, fill="black" if bright else "white", font=font)
    return np.array(image)
