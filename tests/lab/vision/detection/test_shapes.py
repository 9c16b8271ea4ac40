"""The generated pictures of shapes: seeded, each shape at least half visible, boxes and masks of what is visible."""

import numpy as np
import pytest

from mnemos.lab.vision.detection.scenes import objects
from mnemos.lab.vision.detection.shapes import NAMES, ShapeScenes, ShapesConfig, draw


def scenes(seed=0, use=0, count=60):
    return ShapeScenes(count, 64, 6, seed, use)


def test_a_picture_is_a_function_of_seed_use_and_index():
    first, again, other = scenes(), scenes(count=3), scenes(use=1)
    assert np.array_equal(first.picture(2), again.picture(2))
    assert first.annotations(2) == again.annotations(2)
    assert not np.array_equal(first.picture(2), first.picture(3))
    assert not np.array_equal(first.picture(2), other.picture(2))
    assert not np.array_equal(first.picture(2), scenes(seed=1).picture(2))
    # These pictures are in results: what is drawn must stay as it is.
    means = "81.15 131.59 115.58 169.52 123.08 142.29 120.53 132.47 146.4 115.07 170.99 137.34 125.43 174.32"
    some = ShapeScenes(14, 40, 4, 3, 0)
    found = [some.picture(index).mean() for index in range(14)]
    assert found == pytest.approx([float(mean) for mean in means.split()], abs=0.006)


def test_boxes_and_areas_are_those_of_the_visible_masks():
    some = scenes()
    numbers, kinds = set(), set()
    for index in range(30):
        found = objects(some, index)
        numbers.add(len(found.labels))
        kinds |= {one["category_id"] for one in some.annotations(index)}
        assert found.masks.sum(0).max() <= 1  # a pixel belongs to the shape in front
        for box, mask, entry in zip(found.boxes, found.masks, some.annotations(index), strict=True):
            rows, columns = np.nonzero(mask)
            assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert entry["area"] == mask.sum()
    sides = [ShapesConfig(side=side, train=1, valid=1, test=1) for side in (64, 128, 220)]
    assert [len(config.build().metrics) for config in sides] == [16, 20, 24], "of sizes that there can be"
    assert (numbers, kinds) == ({1, 2, 3, 4, 5, 6}, {1, 2, 3, 4})


def test_half_of_every_shape_stays_visible_and_shapes_differ_from_what_is_behind_them():
    shown = hidden = 0
    for index in range(40):
        drawn = draw(np.random.default_rng(index), 64, 6)
        for kind, mask in zip(drawn.shapes.tolist(), drawn.masks, strict=True):
            if NAMES[kind] != "circle":
                continue
            rows, columns = np.nonzero(mask)
            radius = (max(np.ptp(rows), np.ptp(columns)) + 1) / 2  # of what is visible: at most the circle's own
            share = mask.sum() / (np.pi * radius**2)
            assert share > 0.4
            shown, hidden = shown + (share > 0.9), hidden + (share < 0.9)
    assert shown > 10
    assert hidden > 0  # some are occluded
