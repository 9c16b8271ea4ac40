"""What detections are worth, and what they look like: COCO's figures, drawn photos, and the files of a finished run."""

import colorsys
import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.atomic import write_bytes, write_json
from mnemos.lab.tasks.pictures import pillow
from mnemos.libraries import pycocotools, torchvision
from mnemos.types import InputError

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


class Scored(NamedTuple):
    """What detections are worth, in per cent, as papers print it; NaN where the pictures have no such object."""

    figures: dict[str, float]  # of `FIGURES`
    classes: dict[int, float]  # the AP of each category, by its id, because two may have one name


def average_precision(truth: dict[str, list[Annotation]], detections: Sequence[Annotation], mode: Mode) -> Scored:
    """The evaluation of detections against annotations, both in COCO's format, by pycocotools.

    Raises InputError for masks of detections without one.
    """
    pycocotools()
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if mode == "mask" and any("segmentation" not in one for one in detections):
        raise InputError(
            "expected a mask of every detection, found one without; set data.masks False, or use a detector with a "
            "mask branch (model.detector mask-rcnn)"
        )
    # COCO.loadRes is not used: it fails where nothing was detected, and takes the area of a mask from its box.
    entries = []
    for number, one in enumerate(detections, 1):
        area = coco_masks().area(one["segmentation"]) if mode == "mask" else one["bbox"][2] * one["bbox"][3]
        entries.append({**one, "id": number, "area": float(area)})
    if mode == "mask":  # a group may have none
        truth = {**truth, "annotations": [one for one in truth["annotations"] if one.get("segmentation")]}
    sides = [COCO(), COCO()]
    with contextlib.redirect_stdout(io.StringIO()):  # the library prints
        for side, content in zip(sides, (truth, {**truth, "annotations": entries}), strict=True):
            side.dataset = content
            side.createIndex()
        evaluation: Any = COCOeval(*sides, {"box": "bbox", "mask": "segm"}[mode])
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures = np.where(evaluation.stats < 0, np.nan, 100 * evaluation.stats).tolist()
    classes = {}
    for number, category in enumerate(evaluation.params.catIds):
        precision = evaluation.eval["precision"][:, :, number, 0, -1]  # [overlaps, recalls], of all sizes
        some = precision[precision > -1]
        classes[int(category)] = 100 * float(some.mean()) if some.size else math.nan
    return Scored(dict(zip(FIGURES, figures, strict=True)), classes)


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
    torchvision()
    from matplotlib.font_manager import findfont
    from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

    # Bright, so that black names are legible on them; those of successive categories differ in hue.
    hues = {category: number * _GOLDEN % 1.0 for number, category in enumerate(names)}
    colours = {key: tuple(round(255 * c) for c in colorsys.hsv_to_rgb(hue, 0.6, 1.0)) for key, hue in hues.items()}
    (height, width), image = picture.shape[:2], torch.from_numpy(picture).permute(2, 0, 1)

    # --- masks, then the size: names can be read from a shorter side of 400 pixels on ---
    if masked := [one for one in entries if one.get("segmentation")]:
        masks = [decode(run_lengths(one["segmentation"], height, width)) for one in masked]
        filled = [colours[one["category_id"]] for one in masked]
        image = draw_segmentation_masks(image, torch.from_numpy(np.stack(masks)), _OPACITY, filled)
    longer, shorter = max(height, width), min(height, width)
    scale = longest / longer if longest else max(1, min(math.ceil(400 / shorter), 4_000 // longer))
    size = max(1, round(scale * width)), max(1, round(scale * height))
    drawn = np.array(pillow().fromarray(image.permute(1, 2, 0).numpy()).resize(size, pillow().Resampling.BICUBIC))

    # --- boxes and names, those of greater scores above ---
    if not entries:
        return drawn
    entries = sorted(entries, key=lambda one: one.get("score", 0.0))
    boxes = scale * torch.tensor([one["bbox"] for one in entries], dtype=torch.float64)
    boxes[:, 2:] += boxes[:, :2]
    texts = [names[one["category_id"]] + (f" {one['score']:.2f}" if "score" in one else "") for one in entries]
    image = draw_bounding_boxes(
        torch.from_numpy(drawn).permute(2, 0, 1),
        boxes,
        texts,
        [colours[one["category_id"]] for one in entries],
        width=max(2, min(size) // 250),
        font=findfont("DejaVu Sans"),
        font_size=max(12, min(size) // 36),
        fill_labels=True,
    )
    return image.permute(1, 2, 0).numpy()
