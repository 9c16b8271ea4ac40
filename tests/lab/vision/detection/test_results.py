"""COCO's twelve figures of detections by hand, and objects drawn on a picture."""

import colorsys
import json
import math

import numpy as np
import pytest
from PIL import Image

from mnemos.lab.vision.detection import results
from mnemos.lab.vision.detection.results import FIGURES, average_precision, overlay, write_detections
from mnemos.lab.vision.detection.scenes import encode
from mnemos.lab.vision.detection.shapes import NAMES, ShapeScenes

BOX = {"bbox": [0, 0, 40, 40], "area": 1600, "iscrowd": 0, "category_id": 1}
TRUTH = {
    "images": [{"id": 1, "height": 200, "width": 200}],
    "annotations": [BOX | {"id": 1, "image_id": 1}, BOX | {"id": 2, "image_id": 1, "bbox": [100, 100, 40, 40]}],
    "categories": [{"id": 1, "name": "box"}, {"id": 2, "name": "box"}],
}
PLACE = 25, 40, 30, 60  # top, bottom, left, right
HALF = 51 / 101 * 100  # precision 1 up to recall 0.5, at the recalls 0, 0.01, … 0.5 of 101


def test_figures_of_boxes_by_hand():
    # Overlap 30/40 = 0.75 with the first object: right at the six thresholds to 0.75. The second is not found.
    found = [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 40, 30], "score": 0.9}]
    result = average_precision(TRUTH, found, "box")
    assert list(result.figures) == list(FIGURES)
    assert result.figures["AP"] == pytest.approx(0.6 * HALF)
    assert result.figures["AP50"] == result.figures["AP75"] == result.figures["AP medium"] / 0.6 == pytest.approx(HALF)
    assert result.figures["AR 100"] == pytest.approx(30)
    assert math.isnan(result.figures["AP large"])
    assert result.classes[1] == pytest.approx(0.6 * HALF)
    assert math.isnan(result.classes[2])
    assert set(found[0]) == {"image_id", "category_id", "bbox", "score"}, "it is not changed"
    wrong = [found[0] | {"bbox": [50, 0, 80, 20], "score": 0.99}] * 10  # the right one is the eleventh
    last = average_precision(TRUTH, [*wrong, found[0]], "box")
    assert [last.classes[1], last.figures["AP"], last.figures["AP medium"]] == pytest.approx([0.6 * HALF / 11] * 3)
    assert [last.figures[f"AR {number}"] for number in (1, 10, 100)] == pytest.approx([0, 0, 30])
    none = average_precision(TRUTH, [], "box")
    assert none.figures["AP"] == 0
    assert math.isnan(none.figures["AP small"])


def mask(*corners, size=(200, 200)):
    inside = np.zeros(size, np.bool_)
    for top, bottom, left, right in corners:
        inside[top:bottom, left:right] = True
    return encode(inside)


def test_figures_of_masks_by_hand():
    """A mask of 400 pixels in a box of 10,000 is a small object; a crowd makes a detection neither right nor wrong."""
    corner = mask((0, 100, 0, 2), (0, 2, 2, 102))
    crowd = BOX | {"id": 2, "image_id": 1, "iscrowd": 1, "segmentation": mask((150, 190, 150, 190)), "bbox": [150] * 4}
    one = BOX | {"id": 1, "image_id": 1, "bbox": [0, 0, 102, 100], "area": 400, "segmentation": corner}
    bare = BOX | {"id": 3, "image_id": 1, "iscrowd": 1}
    truth = TRUTH | {"annotations": [one, crowd, bare]}
    one_of = {"image_id": 1, "category_id": 1}
    found = [
        one_of | {"bbox": [0, 0, 102, 100], "score": 0.5, "segmentation": corner},
        one_of | {"bbox": [9, 9, 9, 9], "score": 0.9, "segmentation": crowd["segmentation"]},
    ]
    figures = average_precision(truth, found, "mask").figures
    assert figures["AP"] == figures["AP small"] == pytest.approx(100)
    assert math.isnan(figures["AP medium"])
    wrong = average_precision(TRUTH | {"annotations": [one]}, found, "mask").figures
    assert wrong["AP"] == pytest.approx(50), "without the crowd the better score is a wrong detection"
    assert wrong["AP small"] == pytest.approx(100), "of 1,600 pixels, whatever its box"


def test_objects_are_drawn_where_they_are():
    grey = np.full((50, 80, 3), 128, np.uint8)
    one = {"category_id": 3, "bbox": [30, 25, 30, 15], "segmentation": mask(PLACE, size=(50, 80)), "score": 0.5}
    drawn = overlay(grey, [one], {3: "cat"})
    assert drawn.shape == (400, 640, 3)
    changed = (drawn != 128).any(-1)
    assert changed[201:319, 241:479].all()
    changed[184:336, 224:496] = False  # the box, its name, and the mask, whose edge is scaled smoothly
    assert not changed.any()
    assert overlay(grey, [one], {3: "cat"}, longest=40).shape == (25, 40, 3)
    assert (overlay(grey, [], {3: "cat"}, longest=80) == grey).all()


def test_each_category_has_a_colour_and_greater_scores_are_above():
    grey, names = np.full((50, 80, 3), 128, np.uint8), {1: "dog", 3: "cat"}
    red, blue = ([round(255 * c) for c in colorsys.hsv_to_rgb(hue, 0.6, 1)] for hue in (0, 0.618034))
    both = [{"category_id": kind, "bbox": [30, 25, 30, 15], "score": score} for kind, score in ((1, 0.9), (3, 0.2))]
    for better, colour in ((both, red), ([both[0] | {"score": 0.1}, both[1]], blue)):
        assert overlay(grey, better, names)[[310, 320, 322], 360].tolist() == [[128] * 3, colour, [128] * 3]
    filled = overlay(grey, [both[1] | {"segmentation": mask(PLACE, size=(50, 80))}], names)[290, 360]
    np.testing.assert_allclose(filled, 0.55 * 128 + 0.45 * np.array(blue), atol=1)
    for (height, width), scale in (((10, 1000), 4), ((399, 450), 2), ((400, 450), 1), ((9, 4001), 1)):
        assert overlay(np.zeros((height, width, 3), np.uint8), [], names).shape == (scale * height, scale * width, 3)
    assert overlay(np.zeros((2, 90, 3), np.uint8), [], names, 30).shape == (1, 30, 3)


def test_the_first_photos_with_an_object_are_drawn_beside_what_was_found(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_LONGEST", 60)
    scenes, names = ShapeScenes(12, 30, 2, 0, 0), dict(enumerate(NAMES, 1))
    scenes.annotations(5).clear()
    (tmp_path / "detections").mkdir()
    (tmp_path / "detections" / "1-9.jpg").touch()
    found = [{"category_id": 1, "bbox": [5, 5, n, n], "image_id": 99, "score": n / 100} for n in (30, 29, 9)]
    write_detections(tmp_path, scenes, [(row, [] if row < 9 else found) for row in (11, *range(10))])
    shown = sorted(path.name for path in (tmp_path / "detections").iterdir())
    assert shown == [f"{k}-{number}.jpg" for k, number in enumerate((12, 1, 2, 3, 4, 5, 7, 8), 1)]
    pixels = np.asarray(Image.open(tmp_path / "detections" / "1-12.jpg"), np.float64)
    assert pixels.shape == (60, 132, 3)
    drawn = scenes.annotations(11), found[:1], found[:2], []
    every = [overlay(scenes.picture(11), entries, names, 60) for entries in drawn]
    far = [[np.abs(part - one).mean() for one in every] for part in (pixels[:, :60], pixels[:, 72:])]
    assert [int(np.argmin(one)) for one in far] == [0, 1]
    assert pixels[:, 64:68].min() > 240
    assert [one["image_id"] for one in json.loads((tmp_path / "detections.json").read_text())] == [12] * 3 + [10] * 3
