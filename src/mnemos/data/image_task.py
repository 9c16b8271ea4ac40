"""Classification of images: three splits of pictures as a `Task`."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mnemos.types import InputError

from .ahead import ahead
from .augment import AugmentConfig, TimmAugmentation, augment_light, normalise
from .batch import Batch, Metric
from .buckets import Order
from .folders import Split
from .pictures import Pictures
from .randomness import AUGMENT, ORDER, generator, global_generators


class View(NamedTuple):
    """Some of the pictures: rows [N], in their order."""

    pictures: Pictures
    rows: NDArray[np.int64]

    @classmethod
    def whole(cls, pictures: Pictures) -> "View":
        """All of them."""
        return cls(pictures, np.arange(len(pictures)))


class Colours(NamedTuple):
    """Mean and standard deviation of pixels in [0, 1], a number a channel: what images are normalised by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


_NOWHERE = -1, 0, 0
IMAGENET = Colours((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class ImageTask:
    """A classification `Task` of images [B, C, size, size], float32, normalised.

    `names` are the classes'. Evaluation visits every image of a split once, in an order drawn once and for all, so that
    a batch holds many classes. `workers` > 0: processes that make batches ahead; it never changes them, and random
    access stays possible: a batch that does not follow the last is made here. Raises InputError for settings out of
    range, a missing library, and, when its batch is asked for, an image that cannot be read.
    """

    kind: Literal["classification"] = "classification"
    inputs: Literal["images"] = "images"
    metric: Metric = "accuracy"
    vocab_size = 0
    max_length = 0
    carries_state = False

    def __init__(
        self,
        splits: dict[Split, View],
        names: Sequence[str],
        size: int,
        colours: Colours,
        augment: AugmentConfig,
        workers: int = 0,
    ) -> None:
        for split, view in splits.items():
            if not len(view.rows):
                raise InputError(f"{split} split: expected at least one image, found none; give more data")
        if workers < 0:
            raise InputError(f"data.workers must be at least 0, found {workers}")
        self.names, self.classes, self.side, self.colours = list(names), len(names), size, colours
        self._views = dict(splits)
        for split in ("valid", "test"):
            self._views[split] = View(splits[split].pictures, _mixed(splits[split].rows))
        test = self._views["test"]
        self.majority = float(np.bincount(test.pictures.labels[test.rows]).max() / len(test.rows))
        self._order = Order(len(self._views["train"].rows))
        self._maker = _Maker(self._views["train"].pictures, size, self.classes, colours, augment)
        self._workers = workers
        self._stream: Iterator[Batch] | None = None  # of batch `_next` and those after it
        self._next = self._after = _NOWHERE  # `_after` follows the batch that was asked for last

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Batch `index` of the endless training order that `seed` gives, augmented; a pure function of these three.

        Every row is augmented from (seed, index, row). Python's, NumPy's and PyTorch's generators are left as they are.
        """
        key, follower = (index, batch_size, seed), (index + 1, batch_size, seed)
        if self._workers and key == self._after and key != self._next:  # two in a row: there will be more
            self.close()
            self._stream, self._next = ahead(self._maker, self._keys(key), self._workers), key
        self._after = follower
        if self._stream is None or key != self._next:
            return self._maker(next(self._keys(key)))
        self._next = follower
        try:
            return next(self._stream)
        except BaseException:
            self.close()
            raise

    def _keys(self, first: tuple[int, int, int]) -> Iterator["_Key"]:
        """What training batches are made of, from this one on. The iterator does not hold the task."""
        rows, order, (index, batch_size, seed) = self._views["train"].rows, self._order, first
        return (_Key(rows[order.batch(i, batch_size, seed)], (seed, i)) for i in itertools.count(index))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Every image of a split once, without augmentation."""
        view = self._views[split]
        keys = (_Key(view.rows[i : i + batch_size], None) for i in range(0, len(view.rows), batch_size))
        few = min(self._workers, -(-len(view.rows) // batch_size))
        return ahead(self._maker.of(view.pictures), keys, few)

    def size(self, split: Split) -> int:
        """Images of a split."""
        return len(self._views[split].rows)

    def epoch(self, batch_size: int) -> float:
        """Updates in which every training image is seen once."""
        return self.size("train") / batch_size

    def sample(self) -> Tensor:
        """One row of zeros [1, C, size, size], float32."""
        return torch.zeros(1, len(self.colours.mean), self.side, self.side)

    def picture(self, split: Split, index: int) -> NDArray[np.uint8]:
        """What the model sees of image `index` of a split, before normalisation: [size, size, C]. No augmentation.

        The images of `batches` come in this order.
        """
        view = self._views[split]
        return view.pictures.fitted(int(view.rows[index])).copy()

    def close(self) -> None:
        """End the processes that work ahead."""
        if self._stream is not None:
            self._stream.close()  # type: ignore[attr-defined]
        self._stream, self._next, self._after = None, _NOWHERE, _NOWHERE


class _Key(NamedTuple):
    """What a batch is made of: which pictures, and (seed, index) of what varies them, or None."""

    rows: NDArray[np.int64]
    place: tuple[int, int] | None


class _Maker:
    """Batches of pictures, as pure functions of their keys."""

    def __init__(self, pictures: Pictures, size: int, classes: int, colours: Colours, augment: AugmentConfig) -> None:
        augment.check()
        self.pictures, self.colours, self.augment = pictures, colours, augment
        self.timm = None
        if augment.policy == "timm":  # now, as workers that are forked need not import it again
            self.timm = TimmAugmentation(augment, size, classes, pictures.stored, *colours)

    def of(self, pictures: Pictures) -> "_Maker":
        """The same of others."""
        made = object.__new__(_Maker)
        made.__dict__ = {**self.__dict__, "pictures": pictures}
        return made

    def __call__(self, key: _Key) -> Batch:
        labels = torch.from_numpy(self.pictures.labels[key.rows].astype(np.int64))
        if key.place is not None and self.timm is not None:
            return Batch(*self._by_timm(self.timm, key.rows, key.place, labels))
        pixels = np.stack([self.pictures.fitted(row) for row in key.rows.tolist()])
        if key.place is not None and self.augment.policy == "light":
            pixels = augment_light(pixels, generator(key.place[0], AUGMENT, key.place[1]), self.augment.flip)
        return Batch(normalise(pixels, *self.colours), labels)

    def _by_timm(
        self, timm: TimmAugmentation, rows: NDArray[np.int64], place: tuple[int, int], labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        seed, index = place
        with global_generators() as put:
            images = []
            for i, row in enumerate(rows.tolist()):
                put(seed, AUGMENT, index, i)
                images.append(timm.image(self.pictures.image(row)))
            put(seed, AUGMENT, index, len(rows))
            return timm.mix(torch.stack(images), labels)


def _mixed(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return rows[generator(0, ORDER).permutation(len(rows))]
