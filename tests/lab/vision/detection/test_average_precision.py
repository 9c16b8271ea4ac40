"""COCO's twelve figures: those of pycocotools on the same detections, and exact ones of detections by hand."""

import contextlib
import io
import math

import numpy as np
import pytest

from mnemos.lab.vision.detection.average_precision import FIGURES, AveragePrecision
from mnemos.lab.vision.detection.scenes import coco_masks, encode, ground_truth
from mnemos.lab.vision.detection.shapes import ShapeScenes
from mnemos.types import InputError


def crowded_truth():
    """Shapes on a canvas of other sizes, so that there are small, medium and large ones, and some crowds."""
    truth = ground_truth(ShapeScenes(12, 256, 6, 0, 0), range(12))
    for number, one in enumerate(truth["annotations"]):
        one["iscrowd"] = int(number % 9 == 0)
    return truth


def detections(truth, seed=0):
    """Shifted and relabelled copies of the annotations with random scores, several per object, and some of nothing."""
    random, found = np.random.default_rng(seed), []
    for one in truth["annotations"]:
        for _ in range(random.integers(0, 4)):
            mask = coco_masks().decode({**one["segmentation"], "counts": one["segmentation"]["counts"].encode()})
            mask = np.roll(mask, random.integers(-6, 7, 2), (0, 1)).astype(bool)
            if not mask.any():
                continue
            x, y, w, h = one["bbox"]
            box = [x + float(random.normal(0, 3)), y + float(random.normal(0, 3)), w * random.uniform(0.8, 1.2), h]
            found.append(
                {
                    "image_id": one["image_id"],
                    "category_id": one["category_id"] if random.random() < 0.8 else int(random.integers(1, 5)),
                    "bbox": [float(n) for n in box],
                    "segmentation": encode(mask),
                    "score": round(float(random.random()), 2),  # with equal scores
                }
            )
    return found


def by_pycocotools(truth, found, kind):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        annotated = COCO()
        annotated.dataset = truth
        annotated.createIndex()
        shown = [{k: v for k, v in one.items() if kind == "box" or k != "bbox"} for one in found]
        evaluation = COCOeval(annotated, annotated.loadRes(shown), {"box": "bbox", "mask": "segm"}[kind])
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [100 * n if n >= 0 else math.nan for n in evaluation.stats]


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_the_figures_are_those_of_pycocotools(kind):
    truth = crowded_truth()
    found = detections(truth)
    before = [dict(one) for one in found]
    figures = AveragePrecision(truth, found, kind).figures
    assert list(figures) == list(FIGURES)
    np.testing.assert_allclose(list(figures.values()), by_pycocotools(truth, found, kind), rtol=0, atol=1e-9)
    assert len({round(n, 3) for n in figures.values()}) > 6  # they differ, so an exchange would be seen
    assert found == before


def test_figures_by_hand():
    box = {"bbox": [0, 0, 40, 40], "area": 1600, "iscrowd": 0, "category_id": 1}
    truth = {
        "images": [{"id": 1, "height": 200, "width": 200}],
        "annotations": [box | {"id": 1, "image_id": 1}, box | {"id": 2, "image_id": 1, "bbox": [100, 100, 40, 40]}],
        "categories": [{"id": 1, "name": "box"}, {"id": 2, "name": "box"}],
    }
    # Overlap 30/40 = 0.75 with the first object: right at the six thresholds to 0.75. The second is not found.
    found = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 40, 30], "score": 0.9}]
    result = AveragePrecision(truth, found, "box")
    half = 51 / 101 * 100  # precision 1 up to recall 0.5, at the recalls 0, 0.01, … 0.5 of 101
    assert result.figures["AP"] == pytest.approx(0.6 * half)
    assert result.figures["AP50"] == result.figures["AP75"] == pytest.approx(half)
    assert result.figures["AR 100"] == pytest.approx(30)
    assert math.isnan(result.figures["AP large"])
    assert result.by_class()[1] == pytest.approx(0.6 * half)
    assert math.isnan(result.by_class()[2])
    none = AveragePrecision(truth, [], "box")
    assert none.figures["AP"] == 0
    assert math.isnan(none.figures["AP small"])
    with pytest.raises(InputError, match="found one of picture 5"):
        AveragePrecision(truth, [found[0] | {"image_id": 5}], "box")
