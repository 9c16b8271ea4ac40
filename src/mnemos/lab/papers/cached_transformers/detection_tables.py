"""Tables 3 and 7: the paper's average precision on COCO beside the parameters and FLOPs of the detectors built here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mnemos import registry
from mnemos.lab.measure.flops import count_flops
from mnemos.lab.run.checks import on_meta

from ..claim import Claim
from ..findings import Finding, Table
from ..reproduce import Options

HEIGHT, WIDTH = 800, 1344  # 800 × 1333, padded to a multiple of 32
CLASSES = 80
_DETECTORS = {"table3": "mask-rcnn", "table7": "retinanet"}


class DetectorCost(NamedTuple):
    """Parameters, and multiply-adds of a picture of 800 × 1344 pixels in evaluation, of a detector's three parts.

    Of R-CNN detectors the heads read all proposals, and the mask branch as many boxes as a picture's detections.
    """

    backbone: tuple[int, float]
    pyramid: tuple[int, float]
    heads: tuple[int, float]


def detection(claim: Claim, options: Options) -> Finding:
    """Table 3 (Mask R-CNN) or 7 (RetinaNet). The costs are counted (not with --recipes-only), nothing is trained."""
    scores = Table(claim.about, ["", "recipe", *(f"paper {column}" for column in claim.columns), "ours"])
    for row, values in claim.values.items():
        scores.add(row, recipe_of(claim.name, row), *values, "not run")
    found = Finding([scores])
    if not options.recipes_only:
        found.tables.append(_costs(claim))
        found.notes.append(
            "G: 10⁹ multiply-adds of products, convolutions and attention. Not counted: sampling boxes from the maps, "
            "and non-maximum suppression."
        )
    found.notes.append(
        "AP is not measured: the recipes need COCO, a classifier trained on ImageNet and GPUs: mnemos train RECIPE "
        "--data.folder COCO --train.init_from RUN. The recipes shapes-… compare such detectors on generated pictures."
    )
    return found


def _costs(claim: Claim) -> Table:
    parts = ("backbone", "pyramid", "heads")
    costs = Table(
        f"Million parameters (M), and G of a picture of {HEIGHT} × {WIDTH} pixels in evaluation",
        ["recipe", *(f"{part} {unit}" for part in parts for unit in ("M", "G"))],
    )
    for row in claim.values:
        name = recipe_of(claim.name, row)
        costs.add(name, *(number for m, g in detector_cost(name) for number in (m / 1e6, g / 1e9)))
    return costs


def recipe_of(table: str, row: str) -> str:
    """The recipe of a row, such as coco-retinanet-pvt-tiny-cached for "PVT-Tiny, cached" of Table 7."""
    host, _, cached = row.lower().partition(", ")
    return "-".join(filter(None, ("coco", _DETECTORS[table], host, cached)))


def detector_cost(recipe: str) -> DetectorCost:
    """The cost of a recipe's detector. It is built without memory for its weights. Cost: about a second."""
    config = replace(registry.load("recipe", recipe)().model, classes=CLASSES)
    detector: Any = on_meta(config).eval().host
    pyramid = detector.backbone
    with torch.no_grad(), torch.device("meta"):
        picture = torch.zeros(1, 3, HEIGHT, WIDTH)
        backbone = _macs(lambda: pyramid.backbone(picture))
        whole = _macs(lambda: pyramid(picture))
        maps = list(pyramid(picture).values())
        heads = _macs(lambda: _heads(detector, maps))
    parameters = [_parameters(part) for part in (pyramid.backbone, pyramid, detector)]
    return DetectorCost(
        (parameters[0], backbone),
        (parameters[1] - parameters[0], whole - backbone),
        (parameters[2] - parameters[1], heads),
    )


def _heads(detector: Any, maps: list[torch.Tensor]) -> None:
    """Run the heads on the maps; those of R-CNN's second stage on boxes of which only the number matters."""
    if not hasattr(detector, "rpn"):
        detector.head(maps)
        return
    detector.rpn.head(maps)
    regions, channels = detector.roi_heads, maps[0].shape[1]
    proposals = detector.rpn._post_nms_top_n["testing"]
    regions.box_predictor(regions.box_head(torch.zeros(proposals, channels, 7, 7)))
    if regions.has_mask():
        regions.mask_predictor(regions.mask_head(torch.zeros(regions.detections_per_img, channels, 14, 14)))


def _macs(function: Callable[[], object]) -> float:
    return count_flops(function) / 2


def _parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
