"""Batches of pictures with their objects, as a pure function of a key that worker processes can be given."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import AUGMENT, generator
from mnemos.lab.tasks.ahead import Asked
from mnemos.lab.tasks.row_order import Order

from .batch import DetectionBatch, flipped, together
from .scenes import Scenes, objects


class Key(NamedTuple):
    """What determines a batch: rows of a split, what to add for their numbers, and (seed, index) of mirrors or None."""

    rows: NDArray[np.int64]
    before: int
    mirrors: tuple[int, int] | None


def keys_from(order: Order, asked: Asked) -> Iterator[Key]:
    """The keys of a training batch and of all later ones."""
    index, batch_size, seed = asked
    return (Key(order.batch(i, batch_size, seed), 0, (seed, i)) for i in itertools.count(index))


class BatchMaker:
    """Makes batches of the pictures of a split, as a pure function of a key."""

    def __init__(self, scenes: Scenes, masks: bool, flip: bool) -> None:
        self._scenes: Any = scenes if masks or not scenes.has_masks else _Boxes(scenes)
        self._share = 0.5 if flip else 0.0  # of training pictures, which is mirrored

    def __call__(self, key: Key) -> DetectionBatch:
        """The batch. Raises InputError for a picture that cannot be read."""
        rows = key.rows.tolist()
        read: list[Any] = [(self._scenes.picture(row), objects(self._scenes, row)) for row in rows]
        if key.mirrors is not None:
            seed, index = key.mirrors
            mirrored = generator(seed, AUGMENT, index).random(len(rows)) < self._share
            read = [flipped(*one) if turn else one for one, turn in zip(read, mirrored.tolist(), strict=True)]
        pictures, found = zip(*read, strict=True)
        return together(pictures, found, [row + key.before for row in rows])


class _Boxes:
    """`Scenes` without their masks."""

    has_masks = False

    def __init__(self, scenes: Scenes) -> None:
        self._scenes = scenes

    def __getattr__(self, name: str) -> Any:
        if name == "_scenes":  # while it is unpickled, in a worker process that was not forked
            raise AttributeError(name)
        return getattr(self._scenes, name)

    def __len__(self) -> int:
        return len(self._scenes)
