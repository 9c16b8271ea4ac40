"""The task of detection: pictures with objects, a detector's own losses, and COCO's average precision."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.hosts.branch import HostBranch
from mnemos.lab.tasks.augment import normalise
from mnemos.lab.tasks.batch import Batch
from mnemos.lab.tasks.metrics import CorpusMetric
from mnemos.lab.tasks.pictures import fit, pillow
from mnemos.lab.tasks.prefetch import Prefetched, prefetch
from mnemos.lab.tasks.row_order import Order
from mnemos.lab.tasks.task import Split, Task
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject

from .average_precision import FIGURES, AveragePrecision, Kind
from .batch import BatchMaker, DetectionBatch, Key, keys_from
from .detections import class_figures, write_detections
from .detector_outputs import DetectorOutputs, as_results, check_classes, check_masks, run_detector
from .preprocessing import DetectionPreprocessing
from .scenes import Annotation, Scenes, ground_truth

_PRINTED = ("AP", "AP50", "AP75")  # in lines of several metrics; all twelve are in results
Record = tuple[int, list[Annotation]]  # the number of a picture, and its detections
_NOTHING = "no object"
_SIDE = 224  # pixels, for a backbone whose caches do not say for which size they were made
_MULTIPLE = 32  # detectors pad images to multiples of it, and some backbones take no others


class DetectionTask(Task):
    """A `Task` over pictures with objects. The first metric is "box AP", in per cent.

    The model is a detector of torchvision, or a module with one as `host`. splits: pictures of each split. masks:
    whether objects have masks, which are then scored too. flip: mirror half of the training pictures. figures: those of
    `FIGURES` that are reported. The figure of a size is NaN if the scored pictures have no object of that size.

    Training batch i is a pure function of (i, batch_size, seed): pictures of similar proportions, in an order of their
    own in each epoch. With `workers` > 0, that many processes read and decode the following pictures in advance
    (`Prefetched`); each holds up to two batches of shared memory. Raises InputError for a split without a picture,
    for masks of data that have none, and for a negative number of workers.
    """

    inputs = "photos"

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
                raise InputError(
                    f"{split} split: expected a segmentation of every object, found {_describe_unmasked(scenes)}; add "
                    "it, or set data.masks False and use a detector of boxes (model.detector faster-rcnn or retinanet)"
                )
        self.splits: dict[Split, Scenes] = dict(splits)
        self.names, self._masks, self._workers = list(splits["train"].classes), masks, workers
        self.classes = len(self.names)
        height, width = self.splits["train"].sizes.T
        order = Order(len(height), np.round(1000 * np.log(width / height)).astype(np.int64))
        self._makers = {split: BatchMaker(scenes, masks, flip) for split, scenes in self.splits.items()}
        self._ahead = Prefetched(self._makers["train"], partial(keys_from, order), workers)
        self._figures = tuple(figures)
        self._scored: dict[Kind, tuple[list[Record], AveragePrecision]] = {}
        kinds: tuple[Kind, ...] = ("box", "mask") if masks else ("box",)
        self.metrics = tuple(self._metric(kind, one) for kind in kinds for one in figures)

    def _metric(self, kind: Kind, figure: str) -> CorpusMetric:
        of = {"box": "boxes", "mask": "masks"}[kind]
        form = "{name} {value:.2f}" if figure in _PRINTED else ""
        value = partial(self._value, kind, figure)
        return CorpusMetric(
            f"{kind} {figure}", True, f"{FIGURES[figure]} In per cent, of {of}.", form, self.collect, value
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The number of classes, without the background."""
        return {"classes": self.classes}

    @property
    def unit(self) -> str:
        """Pictures: the rows of batches are what `tokens` counts."""
        return "pictures"

    # The data.

    def train_batch(self, index: int, batch_size: int, seed: int) -> DetectionBatch:
        """Training batch `index`; each row is mirrored with probability ½."""
        return self._ahead.batch(index, batch_size, seed)

    def close(self) -> None:
        """End the worker processes. The task can still make batches."""
        self._ahead.close()

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[DetectionBatch]:
        """Every picture of a held-out split once, in order."""
        every = range(len(self.rows_of_batches(split, batch_size)))
        return (batch for _, batch in self.chosen_batches(split, batch_size, every))

    def rows_of_batches(self, split: Literal["valid", "test"], batch_size: int) -> Sequence[int]:
        """The numbers of pictures."""
        count = len(self.splits[split])
        return [min(batch_size, count - start) for start in range(0, count, batch_size)]

    def chosen_batches(
        self, split: Literal["valid", "test"], batch_size: int, numbers: Container[int]
    ) -> Iterator[tuple[int, DetectionBatch]]:
        """(number, batch) of some of `batches`; the others are not decoded."""
        before = len(self.splits["valid"]) if split == "test" else 0
        sizes = self.rows_of_batches(split, batch_size)
        chosen = [number for number in range(len(sizes)) if number in numbers]
        keys = (Key(np.arange(sizes[number]) + number * batch_size, before, None) for number in chosen)
        read = prefetch(self._makers[split], keys, min(self._workers, len(chosen)))
        return zip(chosen, read, strict=True)

    def size(self, split: Split) -> int:
        """The number of pictures."""
        return len(self.splits[split])

    def epoch(self, batch_size: int) -> float:
        """The number of updates in one epoch."""
        return self.size("train") / batch_size

    # Loss and metrics.

    def forward(self, model: nn.Module, batch: DetectionBatch, state: None) -> tuple[DetectorOutputs, None]:
        """The detector's losses; in eval mode its detections too."""
        return run_detector(model, batch), None

    def loss(self, model: nn.Module, outputs: DetectorOutputs, batch: DetectionBatch) -> Tensor:
        """The sum of the detector's losses, times the number of pictures: they are means over a batch."""
        return torch.stack(list(outputs.losses.values())).sum() * len(batch.pictures)

    def collect(self, model: nn.Module, outputs: DetectorOutputs, batch: DetectionBatch) -> list[Record]:
        """(number of the picture, its detections in COCO's result format) of each row: the records of the metrics."""
        assert outputs.detections is not None  # metrics are computed in eval mode
        rows = batch.rows.tolist()
        return [
            (row, as_results(one, row, self._categories)) for row, one in zip(rows, outputs.detections, strict=True)
        ]

    @property
    def _categories(self) -> Sequence[int]:
        return self.splits["train"].categories

    def _value(self, kind: Kind, figure: str, records: list[Record]) -> float:
        return self.evaluate(kind, records).figures[figure]

    def evaluate(self, kind: Kind, records: list[Record]) -> AveragePrecision:
        """The evaluation of the detections of some held-out pictures; that of the last records is kept."""
        kept = self._scored.get(kind)
        if kept is None or kept[0] is not records:
            truth: Annotation = {"images": [], "annotations": [], "categories": []}
            known = len(self.splits["valid"])
            for row, _ in records:
                split: Split = "valid" if row < known else "test"
                one = ground_truth(self.splits[split], [row - known * (split == "test")])
                truth["images"] += [{**image, "id": row} for image in one["images"]]
                for entry in one["annotations"]:
                    truth["annotations"].append({**entry, "id": len(truth["annotations"]) + 1, "image_id": row})
                truth["categories"] = one["categories"]
            found = [one for _, detections in records for one in detections]
            kept = self._scored[kind] = records, AveragePrecision(truth, found, kind)
        return kept[1]

    def check_model(self, model: nn.Module) -> None:
        """See `check_masks` and `check_classes`."""
        check_masks(model, self._masks)
        check_classes(model, self.classes)

    # Results.

    def preprocessing(self) -> DetectionPreprocessing:
        """The names of the classes and the ids of the training annotations, for new photos."""
        return DetectionPreprocessing(names=tuple(self.names), categories=tuple(self._categories))

    def artifacts(self, model: nn.Module, folder: Path, split: Literal["valid", "test"]) -> JSONObject:
        """`scored_artifacts` of a whole split, picture by picture."""
        return self.scored_artifacts(model, folder, split, self.batches(split, 1))

    def scored_artifacts(
        self, model: nn.Module, folder: Path, split: Literal["valid", "test"], batches: Iterable[DetectionBatch]
    ) -> JSONObject:
        """detections.json, drawn photos (`detections`), and the figures of each class, of the pictures in `batches`.

        Cost: an evaluation of these batches.
        """
        scenes, before = self.splits[split], len(self.splits["valid"]) * (split == "test")
        records: list[Record] = []
        with evaluating(model), torch.no_grad():
            detector: Any = getattr(model, "host", model)
            parameter = next(detector.parameters())
            for batch in batches:
                images = [image.to(parameter.device) for image in batch.images(parameter.dtype)]
                for row, found in zip(batch.rows.tolist(), detector(images), strict=True):
                    records.append((row, as_results(found, row, self._categories)))
        write_detections(folder, scenes, [(row - before, found) for row, found in records])
        kinds: tuple[Kind, ...] = ("box", "mask") if self._masks else ("box",)
        return {
            "by_class": class_figures(scenes, {kind: self.evaluate(kind, records) for kind in kinds}, self._figures)
        }

    def pictured(self, model: nn.Module) -> "tuple[Backbone, Squares] | None":
        """The model's backbone, and squares of the photos, to show what its caches do; None for a model without one."""
        detector: Any = getattr(model, "host", model)
        backbone = getattr(getattr(detector, "backbone", None), "backbone", None)
        if not isinstance(backbone, nn.Module):
            return None
        sizes = getattr(getattr(model, "config", None), "backbone", None)
        side = int(getattr(sizes, "image", 0)) or side_of_caches(detector, backbone)
        colours = tuple(detector.transform.image_mean), tuple(detector.transform.image_std)
        return Backbone(backbone), Squares(self.splits, side, colours)


def _describe_unmasked(scenes: Scenes) -> str:
    """The first object without a segmentation, by the ids of the annotation file."""
    for row in range(len(scenes)):
        for one in scenes.annotations(row):
            if not one.get("iscrowd", 0) and not one.get("segmentation"):
                return f"annotation {one.get('id', '?')} of picture {scenes.image_id(row)} without"
    return "no object"


class Squares:
    """The parts of an image task that `evaluate.explain` reads: pictures of one size, a class of each, their colours.

    A picture [side, side, 3] is the centre square of a photo, scaled. Its class is that of the photo's largest object.
    colours: (mean, std) of pixels in [0, 1], by which the detector normalises. about: what the pictures are, in words.
    """

    inputs = "images"

    def __init__(self, splits: Mapping[Split, Scenes], side: int, colours: tuple[Any, Any]) -> None:
        self._splits, self._side, self.colours = splits, side, colours
        self.names = [*splits["train"].classes, _NOTHING]
        self.about = (
            f"The pictures are the middle squares of photos, scaled to {side} × {side} pixels, the size for which the "
            "lengths of the caches are chosen; each is named by the largest object of its photo"
        )

    def size(self, split: Split) -> int:
        """The number of photos."""
        return len(self._splits[split])

    def picture(self, split: Split, index: int) -> NDArray[np.uint8]:
        """The square [side, side, 3]."""
        return fit(pillow().fromarray(self._splits[split].picture(index)), self._side, 1.0)

    def batches(self, split: Split, batch_size: int) -> Iterator[Batch]:
        """The squares, normalised [B, 3, side, side], with their classes [B]."""
        for start in range(0, self.size(split), batch_size):
            rows = range(start, min(start + batch_size, self.size(split)))
            pixels = np.stack([self.picture(split, row) for row in rows])
            yield Batch(normalise(pixels, *self.colours), torch.tensor([self._label(split, row) for row in rows]))

    def _label(self, split: Split, row: int) -> int:
        scenes = self._splits[split]
        found = [one for one in scenes.annotations(row) if not one.get("iscrowd", 0)]
        if not found:
            return len(self.names) - 1
        largest = max(found, key=lambda one: float(one.get("area", 0)))
        return list(scenes.categories).index(largest["category_id"])


class Backbone(nn.Module):
    """A detector's backbone, called as an image model: (maps, state)."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor, state: None) -> tuple[Any, None]:
        """See the class."""
        return self.backbone(images), state


@torch.no_grad()
def side_of_caches(detector: Any, backbone: nn.Module) -> int:
    """The side in pixels of the square images for which the caches of a detector's backbone were made.

    A cache has the grid of tokens that it was made for. How many tokens an image has is seen in a forward of one at the
    detector's own size, which the backbone takes. detector: one of torchvision's, in eval mode.
    """
    made = [one for one in backbone.modules() if isinstance(one, HostBranch) and one.grid and one.padded is None]
    if not made:
        return _SIDE
    first, counts = made[0], []
    handle = first.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape))
    side = min(detector.transform.min_size[-1], detector.transform.max_size)
    side = -(-side // _MULTIPLE) * _MULTIPLE
    parameter = next(p for p in backbone.parameters() if p.is_floating_point())
    try:
        backbone(parameter.new_zeros(1, 3, side, side))
    finally:
        handle.remove()
    if not counts:
        return _SIDE
    rows, tokens = counts[0][:2]
    height, width = first.grid or (1, 1)
    return max(1, round(side * math.sqrt(height * width / (rows * (tokens - first.prefix)))))
