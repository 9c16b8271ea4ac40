"""torchvision's `nms` and `roi_align` in PyTorch, for installations in which its compiled operators do not load.

`mnemos.libraries.torchvision` installs both there. Values and gradients are those of torchvision's C++ for CPUs.
"""

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemos.errors import InputError

_NMS = "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_QNMS = "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_ROI_ALIGN = (
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor"
)
_BLOCK = 256  # boxes whose overlaps with all later ones are computed at once


def declare() -> torch.library.Library:
    """Define the operators. They exist as long as the returned object does.

    torchvision registers a tracing rule for nms and qnms on import, which fails if they are not defined. qnms, of
    quantised tensors, stays without an implementation.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in (_NMS, _QNMS, _ROI_ALIGN):
        library.define(schema)
    # Explicit: torchvision adds a tracing rule of its own. Implicit: autograd and tracing see roi_align's operations.
    library.impl("nms", nms, "CompositeExplicitAutograd")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    return library


def let_torchvision_call_them() -> None:
    """Make the functions of the imported `torchvision.ops` call the declared operators.

    Without compiled operators `torchvision.ops.nms` raises an error, and `torchvision.ops.roi_align` compiles an
    implementation that needs a C++ compiler and, for sampling_ratio ≤ 0, samples the whole map in every bin.
    """
    boxes: Any = sys.modules["torchvision.ops.boxes"]
    regions: Any = sys.modules["torchvision.ops.roi_align"]
    boxes._assert_has_ops = regions._assert_has_ops = lambda: None
    regions._has_ops = lambda: True


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Greedy non-maximum suppression: the indices [K] of the boxes that are kept, the highest score first.

    A box is kept if its intersection over union with every kept box of a higher score is at most `iou_threshold`; of
    equal scores the first box counts as higher. dets: [N, 4] as (x1, y1, x2, y2). scores: [N]. Cost: O(N·K) overlaps,
    in blocks of 256 boxes, so O(256·N) numbers are held at a time.
    Raises InputError for other shapes.
    """
    if dets.dim() != 2 or dets.shape[1] != 4 or scores.shape != dets.shape[:1]:
        raise InputError(
            f"nms: expected boxes [N, 4] and scores [N], found {list(dets.shape)} and {list(scores.shape)}; change them"
        )
    left = scores.sort(descending=True, stable=True).indices
    boxes = dets.to(torch.promote_types(dets.dtype, torch.float32))
    greatest = _at_most(iou_threshold, boxes.dtype)
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept = [left[:0]]
    while len(left):
        block, rest = left[:_BLOCK], left[_BLOCK:]
        overlaps = _overlaps(boxes[block], areas[block], boxes[left], areas[left]) > greatest
        chosen = _find_unsuppressed(overlaps[:, : len(block)].triu(1))
        kept.append(block[chosen])
        left = rest[~overlaps[chosen, len(block) :].any(0)]
    return torch.cat(kept)


def _at_most(threshold: float, dtype: torch.dtype) -> float:
    """The greatest number of a dtype that is not above the threshold.

    The C++ compares an overlap of that dtype with the threshold in double precision; PyTorch would round the threshold.
    """
    nearest = torch.tensor(threshold, dtype=dtype)
    if nearest.item() > threshold:
        nearest = torch.nextafter(nearest, torch.full_like(nearest, -math.inf))
    return float(nearest)


def _overlaps(a: Tensor, a_areas: Tensor, b: Tensor, b_areas: Tensor) -> Tensor:
    """Intersection over union of boxes a [A, 4] and b [B, 4]: [A, B]."""
    low = torch.maximum(a[:, None, :2], b[:, :2])
    high = torch.minimum(a[:, None, 2:], b[:, 2:])
    shared = (high - low).clamp_(min=0).prod(-1)
    return shared / (a_areas[:, None] + b_areas - shared)


def _find_unsuppressed(suppresses: Tensor) -> Tensor:
    """[B] bool: what greedy suppression keeps, from [B, B]: whether box i, if kept, suppresses the later box j.

    kept[j] = no i < j with kept[i] and suppresses[i, j] has one solution. Repeating it from all boxes finds one more of
    a chain of suppressions each time; chains are short.
    """
    kept = suppresses.new_ones(len(suppresses))
    while True:
        new = ~(suppresses & kept[:, None]).any(0)
        if torch.equal(new, kept):
            return kept
        kept = new


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """The mean of bilinear samples in each bin of each box (He et al. 2017): [K, C, pooled_height, pooled_width].

    input: [N, C, H, W]. rois: [K, 5] as (image, x1, y1, x2, y2), times spatial_scale in pixels of the map. A bin has
    sampling_ratio² samples, or for ≤ 0 as many as it has pixels, rounded up. aligned: pixel centres are at .5 rather
    than at integers, and boxes may be smaller than a pixel. Samples more than a pixel outside the map are 0. Only
    `input` gets a gradient. The arithmetic is in float32 or float64; under autocast the result has input's dtype.
    Cost: C·4·samples, and one copy of the input with channels last. 4 weights and 4 indices per sample are held at a
    time: of all boxes, or for sampling_ratio ≤ 0 of all boxes with the same numbers of samples. Without a limit on the
    size of boxes, clip them to the map first, as the detectors do.
    Raises InputError for other shapes, and outside autocast for two dtypes. An image outside 0 to N − 1 is an error of
    PyTorch's `embedding_bag`.
    """
    if rois.dim() != 2 or rois.shape[1] != 5 or input.dim() != 4:
        raise InputError(
            f"roi_align: expected a map [N, C, H, W] and boxes [K, 5], found {list(input.shape)} and "
            f"{list(rois.shape)}; change them"
        )
    if input.dtype != rois.dtype and not torch.is_autocast_enabled(input.device.type):
        raise InputError(
            f"roi_align: expected a map and boxes of one dtype, found {input.dtype} and {rois.dtype}; convert one"
        )
    dtype = torch.promote_types(input.dtype, torch.float32)
    boxes, bins = rois.detach().to(dtype), (pooled_height, pooled_width)
    pixels = input.to(dtype).permute(0, 2, 3, 1).flatten(0, 2)
    starts, sizes = _in_pixels(boxes, spatial_scale, bins, aligned)
    images = boxes[:, 0]
    if sampling_ratio > 0:
        pooled = _pool(pixels, input.shape, images, starts, sizes, bins, (sampling_ratio, sampling_ratio))
    else:
        pooled = _pool_adaptively(pixels, input.shape, images, starts, sizes, bins)
    return pooled.permute(0, 3, 1, 2).to(input.dtype).contiguous()


def _in_pixels(boxes: Tensor, scale: float, bins: tuple[int, int], aligned: bool) -> tuple[Tensor, Tensor]:
    """(where boxes start [K, 2], the size of their bins [K, 2]) in pixels of the map, each as (y, x)."""
    corners = boxes[:, [2, 1, 4, 3]] * scale - (0.5 if aligned else 0.0)
    starts, extents = corners[:, :2], corners[:, 2:] - corners[:, :2]
    extents = extents if aligned else extents.clamp(min=1)
    return starts, extents / extents.new_tensor(bins)


def _pool_adaptively(
    pixels: Tensor, shape: torch.Size, images: Tensor, starts: Tensor, sizes: Tensor, bins: tuple[int, int]
) -> Tensor:
    """`_pool` with ⌈size⌉ samples of each bin: boxes with equal grids together. 0 for a box that has no sample."""
    found = sizes.ceil().nan_to_num(1, 1, 1).long()
    grids, members = found.clamp(min=1).unique(dim=0, return_inverse=True)
    rows = [(members == number).nonzero().flatten() for number in range(len(grids))]
    parts = [pixels[:0].sum().expand(0, *bins, shape[1])]  # without boxes the result still belongs to the graph
    for grid, some in zip(grids.tolist(), rows, strict=True):
        parts.append(_pool(pixels, shape, images[some], starts[some], sizes[some], bins, (grid[0], grid[1])))
    order = torch.cat([members[:0], *rows]).argsort()
    return torch.cat(parts)[order] * (found > 0).all(-1)[:, None, None, None]


def _pool(
    pixels: Tensor,
    shape: torch.Size,
    images: Tensor,
    starts: Tensor,
    sizes: Tensor,
    bins: tuple[int, int],
    grid: tuple[int, int],
) -> Tensor:
    """Bins [K, PH, PW, C] of boxes with the same grid of samples per bin.

    A bilinear weight is a product of one for y and one for x, so each bin is a weighted sum of 2·gh rows times 2·gw
    columns of pixels: one bag of an embedding.
    """
    height, width = shape[-2:]
    y, y_weights = _taps(starts[:, 0], sizes[:, 0], bins[0], grid[0], height)
    x, x_weights = _taps(starts[:, 1], sizes[:, 1], bins[1], grid[1], width)
    first = images.long()[:, None, None, None, None] * (height * width)
    where = first + y[:, :, None, :, None] * width + x[:, None, :, None, :]
    weights = y_weights[:, :, None, :, None] * x_weights[:, None, :, None, :]
    bags, taps = len(images) * bins[0] * bins[1], 4 * grid[0] * grid[1]
    sums = F.embedding_bag(
        where.reshape(bags, taps), pixels, mode="sum", per_sample_weights=weights.reshape(bags, taps)
    )
    return sums.view(len(images), *bins, shape[1])


def _taps(starts: Tensor, sizes: Tensor, bins: int, grid: int, length: int) -> tuple[Tensor, Tensor]:
    """Along one axis: (pixels [K, bins, 2·grid] that the samples of each bin read, their weights, which sum to 1)."""
    number = torch.arange(bins, device=starts.device, dtype=starts.dtype)[:, None]
    offset = torch.arange(grid, device=starts.device, dtype=starts.dtype) + 0.5
    starts, sizes = starts[:, None, None], sizes[:, None, None]
    at = starts + number * sizes + offset * sizes / grid  # in the order of the C++, whose rounding decides the pixel
    inside = ~((at < -1) | (at > length))
    at = at.clamp(0, length - 1)
    low = at.long().clamp(0, length - 1)  # clamped, because a coordinate that is not a number has any integer
    part = at - low
    taps = torch.cat((low, (low + 1).clamp(max=length - 1)), -1)
    return taps, torch.cat((1 - part, part), -1) * inside.repeat(1, 1, 2) / grid
