"""COCO's average precision and recall, all twelve figures, of boxes and masks (by faster-coco-eval)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from mnemos.libraries import faster_coco_eval
from mnemos.types import InputError

from .scenes import Annotation

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
_PARTS = {  # of the overlaps 50, 55, …, 95 %, and of the sizes all, small, medium and large
    "AP": (slice(None), 0),
    "AP50": (slice(0, 1), 0),
    "AP75": (slice(5, 6), 0),
    "AP small": (slice(None), 1),
    "AP medium": (slice(None), 2),
    "AP large": (slice(None), 3),
}
Kind = Literal["box", "mask"]


class AveragePrecision:
    """The evaluation of detections against annotations, both in COCO's format.

    figures: {name: value} of `FIGURES`, in per cent, as papers print them; NaN for sizes of which there is no object.
    Raises InputError for detections of unknown pictures, and for masks of detections without one.
    """

    def __init__(self, truth: Annotation, detections: Sequence[Annotation], kind: Kind) -> None:
        library = faster_coco_eval()
        annotated = library.COCO(truth)
        known = set(annotated.imgs)
        for one in detections:
            if one["image_id"] not in known:
                raise InputError(
                    f"expected detections of annotated pictures, found one of picture {one['image_id']!r}; score the "
                    "split that was predicted"
                )
        if kind == "mask" and any("segmentation" not in one for one in detections):
            raise InputError(
                "expected a mask of every detection, found one without; set data.masks False, or use a detector with a "
                "mask branch (model.detector mask-rcnn)"
            )
        # With a box the library would take its area, not the mask's, for the figures by size. It also adds entries.
        dropped = {"bbox"} if kind == "mask" else {"segmentation"}
        found = annotated.loadRes([{k: v for k, v in one.items() if k not in dropped} for one in detections])
        kinds = {"box": "bbox", "mask": "segm"}
        self._evaluation: Any = library.COCOeval_faster(annotated, found, kinds[kind], print_function=_quiet)
        self._evaluation.evaluate()
        self._evaluation.accumulate()
        self._evaluation.summarize()
        values = np.asarray(self._evaluation.stats[: len(FIGURES)], np.float64)
        self.figures = dict(zip(FIGURES, np.where(values < 0, np.nan, 100 * values).tolist(), strict=True))

    def by_class(self, figure: str = "AP") -> Mapping[int, float]:
        """{id of a category: a figure "AP …" in per cent}; NaN for a class without an object, of that size.

        Two classes may have one name, so that they are told apart by id.
        """
        precision = self._evaluation.eval["precision"]  # [overlaps, recalls, classes, sizes, numbers of detections]
        overlaps, size = _PARTS[figure]
        found = {}
        for number, category in enumerate(self._evaluation.params.catIds):
            some = precision[overlaps, :, number, size, -1]
            some = some[some > -1]
            found[int(category)] = 100 * float(some.mean()) if some.size else float("nan")
        return found


def _quiet(*_: object) -> None:
    return None
