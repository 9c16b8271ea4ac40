"""nms and roi_align in PyTorch equal the definitions, written here as plain loops, and torchvision's detectors run."""

import math

import pytest
import torch
from refusals import refuses

from mnemos import libraries
from mnemos._compat import torchvision_operators
from mnemos._compat.torchvision_operators import nms, roi_align

torchvision = libraries.torchvision()


def slow_nms(boxes, scores, threshold):
    """Greedy suppression, box after box. Overlaps in the boxes' precision, compared in double precision."""
    kept = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i].item()):
        overlaps = [overlap(boxes[i], boxes[j]) for j in kept]
        if not any(one > threshold for one in overlaps):
            kept.append(i)
    return kept


def overlap(a, b):
    shared = (torch.minimum(a[2], b[2]) - torch.maximum(a[0], b[0])).clamp(min=0)
    shared = shared * (torch.minimum(a[3], b[3]) - torch.maximum(a[1], b[1])).clamp(min=0)
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return (shared / (areas - shared)).item()


def slow_roi_align(x, rois, scale, bins, ratio, aligned):
    """The mean of the samples of each bin, sample after sample."""
    found = x.new_zeros(len(rois), x.shape[1], *bins)
    for k, (image, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (c * scale - 0.5 * aligned for c in corners)
        sides = [y2 - y1, x2 - x1] if aligned else [max(y2 - y1, 1.0), max(x2 - x1, 1.0)]
        h, w = sides[0] / bins[0], sides[1] / bins[1]
        rows, columns = (ratio, ratio) if ratio > 0 else (math.ceil(h), math.ceil(w))
        for p in range(bins[0]):
            for q in range(bins[1]):
                samples = [
                    bilinear(x[int(image)], y1 + (p + (i + 0.5) / rows) * h, x1 + (q + (j + 0.5) / columns) * w)
                    for i in range(rows)
                    for j in range(columns)
                ]
                if samples:
                    found[k, :, p, q] = torch.stack(samples).mean(0)
    return found


def bilinear(image, y, x):
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return image.new_zeros(len(image))
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    b, r = y - top, x - left
    upper = image[:, top, left] * (1 - r) + image[:, top, right] * r
    return upper * (1 - b) + (image[:, bottom, left] * (1 - r) + image[:, bottom, right] * r) * b


def random_boxes(count, size, generator, whole=False):
    boxes = torch.rand(count, 4, generator=generator, dtype=torch.float64) * size
    boxes = torch.cat([torch.minimum(boxes[:, :2], boxes[:, 2:]), torch.maximum(boxes[:, :2], boxes[:, 2:])], 1)
    return boxes.round() if whole else boxes


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.0])
@pytest.mark.parametrize(("ties", "block"), [(False, 256), (True, 7)])
def test_nms_keeps_what_greedy_suppression_keeps(monkeypatch, threshold, ties, block):
    monkeypatch.setattr(torchvision_operators, "_BLOCK", block)
    generator = torch.Generator().manual_seed(7)
    boxes = random_boxes(60, 12, generator, whole=ties).float()  # with equal boxes and boxes without area
    scores = torch.rand(60, generator=generator)
    scores = (scores * 4).round() if ties else scores
    assert nms(boxes, scores, threshold).tolist() == slow_nms(boxes, scores, threshold)


def test_nms_of_more_boxes_than_a_block_and_of_a_long_chain():
    x = torch.arange(700.0)  # each box suppresses its neighbours, so what is kept depends on the first of the chain
    boxes = torch.stack([x, torch.zeros(700), x + 3, torch.ones(700)], 1)
    scores = torch.linspace(1, 0, 700)
    assert nms(boxes, scores, 0.4).tolist() == list(range(0, 700, 2))


def test_nms_compares_with_the_threshold_in_double_precision():
    boxes = torch.tensor([[0.0, 0.0, 10.0, 1.0], [0.0, 0.0, 3.0, 1.0]])  # overlap: 0.3 in float32, which exceeds 0.3
    scores = torch.tensor([0.9, 0.8])
    assert nms(boxes, scores, 0.3).tolist() == [0]
    assert nms(boxes.double(), scores, 0.3).tolist() == [0, 1]
    assert nms(boxes[:0], scores[:0], 0.3).tolist() == []
    refuses(r"nms: expected boxes \[N, 4\]", nms, boxes, scores[:1], 0.3)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [2, 0, 3])
@pytest.mark.parametrize("scale", [0.25, 1.0])
def test_roi_align_has_the_values_and_gradients_of_its_definition(scale, ratio, aligned):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 7, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    boxes = random_boxes(6, 9 / scale, generator) - 1 / scale  # they leave the map on every side
    boxes[0] = 2.0  # no area
    boxes[1] = boxes[1].round()
    rois = torch.cat([torch.tensor([[0.0], [1], [1], [0], [1], [0]], dtype=torch.float64), boxes], 1)
    wanted = slow_roi_align(x, rois, scale, (3, 2), ratio, aligned)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=generator)
    (gradient,) = torch.autograd.grad(wanted, x, weights)
    theirs = torchvision.ops.roi_align(x, rois, (3, 2), scale, ratio, aligned)  # which may be the compiled operator
    for found in (theirs, roi_align(x, rois, scale, 3, 2, ratio, aligned)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(found, x, weights)[0], gradient, rtol=0, atol=1e-12)


def test_roi_align_of_other_dtypes():
    x, rois = torch.randn(1, 2, 6, 6), torch.tensor([[0.0, 0.7, 1.2, 5.1, 4.4]])
    wanted = roi_align(x, rois, 1.0, 2, 2, 2, True)
    refuses("of one dtype, found", roi_align, x.bfloat16(), rois, 1.0, 2, 2, 2, True)
    with torch.autocast("cpu", torch.bfloat16):
        found = roi_align(x.bfloat16(), rois, 1.0, 2, 2, 2, True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0, atol=0.03)
    lost = roi_align(x, torch.tensor([[0, math.nan, 0, 3, 3]]), 1.0, 2, 2, 2, True)
    assert lost.isnan().all()  # not any number
    refuses(r"boxes \[K, 5\]", roi_align, x, rois[:, :4], 1.0, 2, 2, 2, True)
