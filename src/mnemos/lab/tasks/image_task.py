"""The `Task` of image classification, and `mnemos predict` for its models."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.generators import AUGMENT, ORDER, generator, global_generators
from mnemos.registry import register

from .augment import AugmentConfig, TimmAugmentation, augment_light, normalise
from .batch import Batch
from .metrics import MAJORITY, class_metrics
from .pictures import ENDINGS, Pictures, read_fitted
from .prefetch import Prefetched, prefetch
from .preprocessing import Predicted, Preprocessing, likely_classes
from .row_order import BatchKey, Order, held_out_keys, training_keys
from .task import HeldOut, Split, Task


class Colours(NamedTuple):
    """Mean and standard deviation per channel of pixels in [0, 1]; images are normalised by them."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class ImageTask(Task):
    """A classification `Task` of images [B, C, size, size], float32, normalised. `names` are the class names.

    Evaluation visits every image of a split once, in a fixed random order, so that each batch holds many classes.
    `workers` processes prepare the following batches in advance, which does not change them.
    """

    inputs: Literal["images"] = "images"
    shuffled = pictured = True

    def __init__(
        self,
        splits: Mapping[Split, Pictures],
        names: Sequence[str],
        size: int,
        colours: Colours,
        augment: AugmentConfig,
        workers: int = 0,
    ) -> None:
        self.names, self.classes, self.side, self.colours = list(names), len(names), size, colours
        self.metrics, labels = class_metrics(self.classes), splits["test"].labels
        self.reference = {MAJORITY: float(np.bincount(labels).max() / len(labels))}
        self._splits, self._workers = splits, workers
        self._orders = {split: generator(0, ORDER).permutation(len(one)) for split, one in splits.items()}
        self._maker = _Maker(splits["train"], size, self.classes, colours, augment)
        self._train = Prefetched(self._maker, partial(training_keys, Order(self.size("train"))), workers)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Augmented: of each row by (seed, index, row). The global generators are unchanged afterwards."""
        return self._train.batch(index, batch_size, seed)

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        keys = [BatchKey(self._orders[split][rows], None) for rows, _ in held_out_keys(self.size(split), batch_size)]
        return prefetch(replace(self._maker, pictures=self._splits[split]), keys, min(self._workers, len(keys)))

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def epoch(self, batch_size: int) -> float:
        return self.size("train") / batch_size

    @property
    def sizes(self) -> dict[str, int]:
        return {"classes": self.classes, "image": self.side, "channels": len(self.colours.mean)}

    def preprocessing(self) -> "ImagePreprocessing":
        pictures = self._maker.pictures
        centre = 1.0 if pictures.stored else pictures.centre  # stored pictures are evaluated whole
        return ImagePreprocessing(self.side, centre, *self.colours, pictures.averaged, names=tuple(self.names))

    def example(self) -> Batch:
        row = torch.zeros(1, len(self.colours.mean), self.side, self.side)
        return Batch(row, row)

    def picture(self, split: Split, index: int) -> NDArray[np.uint8]:
        """Image `index` of a split in the order of `batches`, before normalisation, not augmented: [size, size, C]."""
        row = index if split == "train" else int(self._orders[split][index])
        return self._splits[split].fitted(row).copy()

    def close(self) -> None:
        self._train.close()


@dataclass
class _Maker:
    """A batch of pictures as a pure function of its key."""

    pictures: Pictures
    size: int
    classes: int
    colours: Colours
    augment: AugmentConfig
    timm: TimmAugmentation | None = None

    def __post_init__(self) -> None:
        self.augment.check()
        if self.augment.policy == "timm" and self.timm is None:  # here, so that forked workers need not import timm
            self.timm = TimmAugmentation(self.augment, self.size, self.classes, self.pictures.stored, *self.colours)

    def __call__(self, key: BatchKey) -> Batch:
        labels = torch.from_numpy(self.pictures.labels[key.rows].astype(np.int64))
        rows = key.rows.tolist()
        # --- timm draws from the global generators, anew for each picture and for the mixing of the batch ---
        if key.augmentation is not None and self.timm is not None:
            with global_generators() as put_seed:
                images = []
                for i, row in enumerate(rows):
                    put_seed(key.augmentation[0], AUGMENT, key.augmentation[1], i)
                    images.append(self.timm.image(self.pictures.image(row)))
                put_seed(key.augmentation[0], AUGMENT, key.augmentation[1], len(rows))
                return Batch(*self.timm.mix(torch.stack(images), labels))
        # --- the other policies ---
        pixels = np.stack([self.pictures.fitted(row) for row in rows])
        if key.augmentation is not None and self.augment.policy == "light":
            seed, index = key.augmentation
            pixels = augment_light(pixels, generator(seed, AUGMENT, index), self.augment.flip)
        return Batch(normalise(pixels, *self.colours), labels)


@register
@dataclass(frozen=True)
class ImagePreprocessing(Preprocessing):
    """The most probable classes of images; a folder stands for the images in it.

    size: pixels per side. centre, averaged: of `pictures.fit`. mean, std: of the pixels in [0, 1], per channel.
    """

    name: ClassVar[str] = "images"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"top": 3})
    endings = ENDINGS
    files = "images"

    size: int
    centre: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    averaged: bool = False

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
        pixels = read_fitted(path, self.size, self.centre, len(self.mean) == 1, self.averaged)
        logits, _ = reader(normalise(pixels[None], self.mean, self.std))
        return likely_classes(path, logits[0], self.names, options["top"])
