"""The order of training rows, optionally by length, the keys of batches, and random held-out rows."""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import ORDER, SPLIT, generator
from mnemos.types import InputError

POOL = 16  # batches sorted by length together: about 4% of a ListOps batch is then padding, and 45% without buckets


class Order:
    """Which rows make batch i, as a pure function of (i, batch_size, seed).

    Batch i holds positions i·B … i·B + B − 1 of an endless list of epochs, each a new permutation of the N rows; a
    batch at the boundary holds rows of both. With `lengths` [N] the other batches are bucketed: groups of `POOL`·B rows
    are sorted by length and cut into batches, which are shuffled. Cost: O(N log N) once per epoch, O(B) per batch.
    """

    def __init__(self, rows: int, lengths: NDArray[np.int64] | None = None):
        self.rows, self.lengths = rows, lengths
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)  # a boundary batch needs two, and two seeds may alternate

    def batch(self, index: int, batch_size: int, seed: int) -> NDArray[np.int64]:
        first, end = index * batch_size, (index + 1) * batch_size
        epochs = range(first // self.rows, (end - 1) // self.rows + 1)
        parts = ((self._epoch(e, batch_size, seed), e * self.rows) for e in epochs)
        return np.concatenate([order[max(0, first - start) : end - start] for order, start in parts])

    def _make_epoch(self, epoch: int, batch_size: int, seed: int) -> NDArray[np.int64]:
        random = generator(seed, ORDER, epoch)
        order = random.permutation(self.rows)
        head = -epoch * self.rows % batch_size  # rows that complete the last batch of the previous epoch
        whole = (self.rows - head) // batch_size
        if self.lengths is None or whole < 1:
            return order
        inner = order[head : head + whole * batch_size]
        pool = np.arange(len(inner)) // (POOL * batch_size)
        inner = inner[np.lexsort((self.lengths[inner], pool))].reshape(whole, batch_size)
        order[head : head + whole * batch_size] = inner[random.permutation(whole)].reshape(-1)
        return order


class BatchKey(NamedTuple):
    """What determines a batch: rows of a split, and (seed, batch index) of their augmentation; None: not augmented."""

    rows: NDArray[np.int64]
    augmentation: tuple[int, int] | None


def training_keys(order: Order, number: tuple[int, int, int]) -> Iterator[BatchKey]:
    """The keys of the training batch with this (index, batch size, seed), and of all later ones."""
    index, batch_size, seed = number
    return (BatchKey(order.batch(i, batch_size, seed), (seed, i)) for i in itertools.count(index))


def held_out_keys(rows: int, batch_size: int) -> list[BatchKey]:
    """The keys of the batches that hold `rows` rows in their order."""
    return [BatchKey(np.arange(i, min(i + batch_size, rows)), None) for i in range(0, rows, batch_size)]


def held_out(rows: int, sizes: tuple[int, ...], name: str) -> list[NDArray[np.int64]]:
    """Disjoint random parts of these sizes, and the rest as the last one: each sorted, and the same in every run."""
    if min(sizes) < 1 or sum(sizes) >= rows:
        raise InputError(
            f"{name}: expected held-out sizes of at least 1 that leave some of the {rows} images to train on, "
            f"found {', '.join(map(str, sizes))}; change these sizes"
        )
    order = generator(0, SPLIT).permutation(rows)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes))]
