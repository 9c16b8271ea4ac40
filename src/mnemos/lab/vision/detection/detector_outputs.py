"""What a detector of torchvision computes of a batch: its losses, and its detections in COCO's result format."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.types import InputError

from .batch import DetectionBatch
from .scenes import Annotation, encode

_PARTS = ("rpn", "roi_heads")  # parts of R-CNN detectors that compute losses in training mode only


class DetectorOutputs(NamedTuple):
    """losses: scalars by name, means over a batch. detections: of each picture, in evaluation; None in training."""

    losses: dict[str, Tensor]
    detections: list[dict[str, Tensor]] | None


def run_detector(model: nn.Module, batch: DetectionBatch) -> DetectorOutputs:
    """Run a detector on a batch. In eval mode also its losses are computed, which costs a second forward.

    model: a detector of torchvision, or a module with one as `host`. Raises InputError as `check_masks`.
    """
    detector: Any = getattr(model, "host", model)
    check_masks(model, batch.masks is not None)
    dtype = next(p.dtype for p in detector.parameters() if p.is_floating_point())
    images, targets = batch.images(dtype), batch.targets()
    if detector.training:
        return DetectorOutputs(detector(images, targets), None)
    detections = detector(images)
    # Which anchors and boxes the losses sample is random: the same in each evaluation, without changing the generators.
    with torch.no_grad(), generators.preserve(), _compute_losses(detector):
        torch.manual_seed(0)
        return DetectorOutputs(detector(images, targets), detections)


def check_masks(model: nn.Module, masks: bool) -> None:
    """Raise InputError for a mask branch without masks to learn, and for masks to score without a mask branch.

    Of a detector that is not torchvision's, only the former is known.
    """
    detector: Any = getattr(model, "host", model)
    has_mask = getattr(getattr(detector, "roi_heads", None), "has_mask", False)
    has_mask = bool(has_mask() if callable(has_mask) else has_mask)  # a method of torchvision's
    if has_mask and not masks:
        raise InputError(
            f"expected masks for {type(detector).__name__}, found data without them; use a data set with segmentations "
            "and data.masks True, or a detector of boxes (model.detector faster-rcnn or retinanet)"
        )
    if masks and not has_mask and type(detector).__module__.startswith("torchvision."):
        raise InputError(
            f"expected data of boxes for {type(detector).__name__}, which finds no masks, found masks to score; set "
            "data.masks False, or use model.detector mask-rcnn"
        )


def check_classes(model: nn.Module, classes: int) -> None:
    """Raise InputError for a detector of torchvision with other than the data's number of classes and the background.

    Of other detectors and of other heads it is not known.
    """
    detector: Any = getattr(model, "host", model)
    predictor = getattr(getattr(detector, "roi_heads", None), "box_predictor", None)
    head = getattr(getattr(detector, "head", None), "classification_head", None)
    found = getattr(getattr(predictor, "cls_score", None), "out_features", getattr(head, "num_classes", None))
    if isinstance(found, int) and found != classes + 1:
        raise InputError(
            f"expected {classes + 1} classes of {type(detector).__name__}, those of the data and the background, found "
            f"{found}; make it with num_classes={classes + 1}"
        )


@contextlib.contextmanager
def _compute_losses(detector: Any) -> Iterator[None]:
    """Inside, a detector in eval mode returns its losses; its backbone, heads and transform stay in eval mode."""
    parts = [detector, *(part for name in _PARTS if (part := getattr(detector, name, None)) is not None)]
    try:
        for part in parts:
            part.training = True  # of the module alone: `train()` would reach the backbone
        yield
    finally:
        for part in parts:
            part.training = False


def as_results(found: dict[str, Tensor], image_id: int, categories: Sequence[int]) -> list[Annotation]:
    """A picture's detections in COCO's result format: image_id, category_id, bbox, score, and with masks segmentation.

    Pixels with a mask probability above 0.5 belong to the object.
    """
    results: list[Annotation] = []
    corners, scores, labels = (found[name].cpu().double().tolist() for name in ("boxes", "scores", "labels"))
    masks = [None] * len(scores) if "masks" not in found else (found["masks"][:, 0] > 0.5).cpu().numpy()
    for (x1, y1, x2, y2), score, label, mask in zip(corners, scores, labels, masks, strict=True):
        one: Annotation = {
            "image_id": image_id,
            "category_id": categories[int(label) - 1],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "score": score,
        }
        results.append(one if mask is None else {**one, "segmentation": encode(mask)})
    return results
