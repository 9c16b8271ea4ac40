"""The task of detection: pictures with objects, a detector's own losses, and COCO's average precision."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.lab.tasks.metrics import CorpusMetric
from mnemos.lab.tasks.prefetch import Prefetched, prefetch
from mnemos.lab.tasks.row_order import Order, held_out_keys, training_keys
from mnemos.lab.tasks.task import HeldOut, Split, Task
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject

from ..detect import DetectionPreprocessing, as_results
from .results import FIGURES, Mode, Scored, average_precision, write_detections
from .scenes import Annotation, BatchMaker, DetectionBatch, Scenes, ground_truth

_PRINTED = ("AP", "AP50", "AP75")  # in lines of several metrics; all twelve are in results
Record = tuple[int, list[Annotation]]  # the number of a picture, and its detections


class DetectionTask(Task):
    """A `Task` over pictures with objects. The first metric is "box AP", in per cent.

    The model is a detector of torchvision, or a module with one as `host`. masks: whether objects have masks, which are
    then scored too. flip: mirror half of the training pictures. figures: those of `FIGURES` that are reported. A
    training batch has pictures of similar proportions. workers: see `Prefetched`; each has up to two batches in shared
    memory. Raises InputError for a split without a picture, and for masks of data that have none.
    """

    inputs = "photos"
    unit = "pictures"

    def __init__(
        self,
        splits: Mapping[Split, Scenes],
        masks: bool,
        flip: bool = True,
        figures: Sequence[str] = tuple(FIGURES),
        workers: int = 0,
    ) -> None:
        for split, scenes in splits.items():
            if not len(scenes):
                raise InputError(f"{split} split: expected at least one picture with an object, found none; add some")
            if masks and not scenes.has_masks:
                every = ((scenes.image_id(row), one) for row in range(len(scenes)) for one in scenes.plain(row))
                bare = ((image, one) for image, one in every if not one.get("segmentation"))
                first = next((f"annotation {one.get('id', '?')} of picture {image}" for image, one in bare), "any")
                raise InputError(
                    f"{split} split: expected a segmentation of every object, found none for {first}; add "
                    "it, or set data.masks False and use a detector of boxes (model.detector faster-rcnn or retinanet)"
                )
        self.splits: dict[Split, Scenes] = dict(splits)
        self.names, self._masks, self._workers = list(splits["train"].classes), masks, workers
        self.classes = len(self.names)

        # --- training batches ---
        height, width = self.splits["train"].sizes.T
        order = Order(len(height), np.round(1000 * np.log(width / height)).astype(np.int64))
        # Records of metrics name a picture by a number: those of the test split follow those of the validation split.
        self._first = {"train": 0, "valid": 0, "test": len(self.splits["valid"])}
        makers = ((split, BatchMaker(scenes, masks, flip, self._first[split])) for split, scenes in splits.items())
        self._makers = dict(makers)
        self._prefetched = Prefetched(self._makers["train"], partial(training_keys, order), workers)

        # --- metrics ---
        self._modes: tuple[Mode, ...] = ("box", "mask") if masks else ("box",)
        self._scored: dict[Mode, tuple[list[Record], Scored]] = {}
        self.metrics = tuple(
            CorpusMetric(
                f"{mode} {figure}",
                True,
                f"{FIGURES[figure]} In per cent, of {'boxes' if mode == 'box' else 'masks'}.",
                "{name} {value:.2f}" if figure in _PRINTED else "",
                self.collect,
                partial(self._value, mode, figure),
                bounds=(0, 100),
            )
            for mode in self._modes
            for figure in figures
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {"classes": self.classes}

    # ---- data ----

    def train_batch(self, index: int, batch_size: int, seed: int) -> DetectionBatch:
        return self._prefetched.batch(index, batch_size, seed)

    def close(self) -> None:
        self._prefetched.close()

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[DetectionBatch]:
        every = range(-(-self.size(split) // batch_size))
        return (batch for _, batch in self.chosen_batches(split, batch_size, every))

    def rows_of_batches(self, split: HeldOut, batch_size: int) -> Sequence[int]:
        return [len(key.rows) for key in held_out_keys(self.size(split), batch_size)]

    def chosen_batches(
        self, split: HeldOut, batch_size: int, numbers: Container[int]
    ) -> Iterator[tuple[int, DetectionBatch]]:
        """(number, batch) of some of `batches`; the others are not decoded."""
        every = enumerate(held_out_keys(self.size(split), batch_size))
        chosen = [(number, key) for number, key in every if number in numbers]
        batches = prefetch(self._makers[split], [key for _, key in chosen], min(self._workers, len(chosen)))
        return zip((number for number, _ in chosen), batches, strict=True)

    def size(self, split: Split) -> int:
        return len(self.splits[split])

    def epoch(self, batch_size: int) -> float:
        return self.size("train") / batch_size

    # ---- loss and metrics ----

    def forward(self, model: nn.Module, batch: DetectionBatch, state: None) -> "tuple[DetectorOutputs, None]":
        """The detector's losses; in eval mode its detections too, for which it runs twice."""
        self.check_model(model)
        detector: Any = getattr(model, "host", model)
        dtype = next(p.dtype for p in detector.parameters() if p.is_floating_point())
        images, targets = batch.images(dtype), batch.targets()
        if detector.training:
            return DetectorOutputs(detector(images, targets), None), None
        detections = detector(images)

        # --- losses; what gives them is in training mode, and backbone, heads and transform stay in eval mode ---
        heads = (getattr(detector, name, None) for name in ("rpn", "roi_heads"))
        parts = [detector, *(part for part in heads if part is not None)]
        try:
            for part in parts:
                part.training = True  # of the module alone: `train()` would reach the backbone
            # Which anchors and boxes are sampled is random: the same ones each time, without a trace in the generators.
            with torch.no_grad(), generators.preserve():
                torch.manual_seed(0)
                return DetectorOutputs(detector(images, targets), detections), None
        finally:
            for part in parts:
                part.training = False

    def loss(self, model: nn.Module, outputs: "DetectorOutputs", batch: DetectionBatch) -> Tensor:
        """The sum of the detector's losses, times the number of pictures: they are means over a batch."""
        return torch.stack(list(outputs.losses.values())).sum() * len(batch.pictures)

    def collect(self, model: nn.Module, outputs: "DetectorOutputs", batch: DetectionBatch) -> list[Record]:
        """(number of the picture, its detections in COCO's result format) of each row: the records of the metrics."""
        assert outputs.detections is not None  # metrics are computed in eval mode
        return self._records(batch, outputs.detections)

    def _records(self, batch: DetectionBatch, detections: Sequence[dict[str, Tensor]]) -> list[Record]:
        categories, rows = self.splits["train"].categories, batch.rows.tolist()
        return [(row, as_results(one, row, categories)) for row, one in zip(rows, detections, strict=True)]

    def _value(self, mode: Mode, figure: str, records: list[Record]) -> float:
        return self.evaluate(mode, records).figures[figure]

    def evaluate(self, mode: Mode, records: list[Record]) -> Scored:
        """The evaluation of the detections of some held-out pictures; that of the last records is kept."""
        if mode not in self._scored or self._scored[mode][0] is not records:
            valid, test = self.splits["valid"], self.splits["test"]
            held_out = [*((valid, row) for row in range(len(valid))), *((test, row) for row in range(len(test)))]
            truth = ground_truth((number, *held_out[number]) for number, _ in records)
            detections = [one for _, entries in records for one in entries]
            self._scored[mode] = records, average_precision(truth, detections, mode)
        return self._scored[mode][1]

    def check_model(self, model: nn.Module) -> None:
        """Raise InputError for a detector of torchvision of other classes, or whose masks are not those of the data.

        Of detectors and heads of one's own it is not known, but for a mask branch.
        """
        detector: Any = getattr(model, "host", model)
        name, heads = type(detector).__name__, getattr(detector, "roi_heads", None)
        has_mask = getattr(heads, "has_mask", False)
        has_mask = bool(has_mask() if callable(has_mask) else has_mask)  # a method of torchvision's
        if has_mask != self._masks and (has_mask or type(detector).__module__.startswith("torchvision.")):
            fits, found = ("mask-rcnn", "masks") if self._masks else ("faster-rcnn or retinanet", "boxes alone")
            raise InputError(
                f"expected data {'with masks' if has_mask else 'of boxes'} for {name}, found {found} to score; set "
                f"data.masks {has_mask}, or use a detector that finds {found} (model.detector {fits})"
            )
        score = getattr(getattr(heads, "box_predictor", None), "cls_score", None)
        head = getattr(getattr(detector, "head", None), "classification_head", None)
        classes, wanted = getattr(score, "out_features", getattr(head, "num_classes", None)), self.classes + 1
        if isinstance(classes, int) and classes != wanted:
            raise InputError(
                f"expected {wanted} classes of {name}, those of the data and the background, found {classes}; make it "
                f"with num_classes={wanted}"
            )

    # ---- results ----

    def preprocessing(self) -> DetectionPreprocessing:
        return DetectionPreprocessing(names=tuple(self.names), categories=tuple(self.splits["train"].categories))

    def scored_artifacts(
        self, model: nn.Module, folder: Path, split: HeldOut, batches: Iterable[DetectionBatch]
    ) -> JSONObject:
        """detections.json, drawn photos (`detections`), and the figures of each class, of the pictures in `batches`."""
        records: list[Record] = []
        with evaluating(model), torch.no_grad():
            detector: Any = getattr(model, "host", model)
            parameter = next(detector.parameters())
            for batch in batches:
                images = [image.to(parameter.device) for image in batch.images(parameter.dtype)]
                records += self._records(batch, detector(images))
        scenes, first = self.splits[split], self._first[split]
        write_detections(folder, scenes, [(number - first, entries) for number, entries in records])
        rows: list[JSONObject] = [{"class": name} for name in scenes.classes]
        for mode in self._modes:
            values = self.evaluate(mode, records).classes
            for row, category in zip(rows, scenes.categories, strict=True):
                row[f"{mode} AP"] = round(values[category], 2) if math.isfinite(values[category]) else None
        return {"by_class": rows}


class DetectorOutputs(NamedTuple):
    """What a detector of torchvision computes of a batch."""

    losses: dict[str, Tensor]  # scalars by name, means over the batch
    detections: list[dict[str, Tensor]] | None  # of each picture, in evaluation
