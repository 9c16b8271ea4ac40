"""In what order rows are visited: every row once an epoch, in full batches, of similar lengths if asked."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .randomness import ORDER, generator

POOL = 16  # batches sorted by length together: about 4% of ListOps is padding then, and 45% with no buckets


class Order:
    """Which rows make batch i, as a pure function of (i, batch_size, seed).

    Epochs follow each other without a gap: batch i holds positions i·B … i·B + B − 1 of an endless list in which
    every stretch of N positions is one epoch, a fresh permutation of the N rows. So every row occurs exactly once
    an epoch and every batch is full: where B does not divide N, the batch on the boundary of two epochs holds
    the last rows of one and the first of the next (and a batch larger than N holds several epochs).

    With `lengths` [N] the batches within an epoch are bucketed: `POOL` batches' worth of rows at a time is sorted
    by length and cut, and the batches are then shuffled. Rows of boundary batches keep their random lengths.
    Cost: O(N log N) once an epoch, O(B) a batch.
    """

    def __init__(self, rows: int, lengths: NDArray[np.int64] | None = None):
        if rows < 1:
            raise InputError("expected at least one row of data, found none; give a larger split")
        self.rows = rows
        self.lengths = lengths
        self._epoch = lru_cache(maxsize=4)(self._make_epoch)  # a boundary batch needs two, and two orders may alternate

    def batch(self, index: int, batch_size: int, seed: int) -> NDArray[np.int64]:
        """The rows [B] of batch `index`."""
        if index < 0 or batch_size < 1:
            raise InputError(f"expected batch index >= 0 and batch size >= 1, found {index} and {batch_size}")
        place, end = index * batch_size, (index + 1) * batch_size
        parts = []
        while place < end:
            epoch, start = divmod(place, self.rows)
            stop = min(self.rows, start + end - place)
            parts.append(self._epoch(epoch, batch_size, seed)[start:stop])
            place += stop - start
        return np.concatenate(parts)

    def _make_epoch(self, epoch: int, batch_size: int, seed: int) -> NDArray[np.int64]:
        """The rows [N] in the order of one epoch."""
        random = generator(seed, ORDER, epoch)
        order = random.permutation(self.rows)
        head = -epoch * self.rows % batch_size  # rows that complete the last batch of the epoch before
        whole = (self.rows - head) // batch_size
        if self.lengths is None or whole < 1:
            return order
        inner = order[head : head + whole * batch_size]
        pool = np.arange(len(inner)) // (POOL * batch_size)
        inner = inner[np.lexsort((self.lengths[inner], pool))].reshape(whole, batch_size)
        order[head : head + whole * batch_size] = inner[random.permutation(whole)].reshape(-1)
        return order
