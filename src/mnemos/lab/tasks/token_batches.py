"""Batches of at most so many tokens: rows of similar length together, in a new order each epoch."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import ORDER, generator
from mnemos.types import InputError

_NOISE = 4  # tokens
FEWEST = 8  # rows of a batch where so many rows of that length fit


class TokenBatches:
    """Which rows make batch i, as a pure function of (i, seed): every row once per epoch.

    lengths: [N, 2], tokens of source and target. A batch has as many rows as fit into `tokens` when each side is padded
    to the longest sentence of the batch on either side, and at most `rows`: fairseq's max-tokens and batch-size. The
    rows are sorted by their longer side, then by the other, to which each epoch adds up to 4 tokens at random, so that
    other rows share a batch. The sorted longer sides are the same every epoch, so the batches are cut at the same
    places every epoch; then they are shuffled.
    Cost: O(N log N) once per epoch, O(rows) per batch. Memory: 16 bytes per row. Raises InputError for a sentence that
    does not fit into a batch.
    """

    def __init__(self, lengths: NDArray[np.int32], tokens: int, rows: int) -> None:
        if not len(lengths):
            raise InputError("expected at least one pair of sentences to train on, found none; give more text")
        self._long, self._short = lengths.max(1), lengths.min(1)
        longest = int(self._long.max())
        if longest > tokens:
            raise InputError(
                f"data.batch_tokens: expected at least {longest:,}, the longest sentence, found {tokens:,}; raise it, "
                "or lower data.longest"
            )
        self._starts = self._cut(-np.sort(-self._long), tokens, rows)
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    @staticmethod
    def _cut(descending: NDArray[np.int32], tokens: int, rows: int) -> list[int]:
        """Where each batch starts, and the end. A last batch of fewer rows shares those of the one before it."""
        starts, place = [0], 0
        while place < len(descending):
            fits = min(rows, tokens // max(1, int(descending[place])))
            place = min(len(descending), place + (fits - fits % FEWEST if fits > FEWEST else fits))
            starts.append(place)
        if len(starts) > 2 and starts[-1] - starts[-2] < starts[-2] - starts[-3]:
            starts[-2] = (starts[-3] + starts[-1] + 1) // 2
        return starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def fewest(self) -> int:
        """The rows of the smallest batch."""
        return int(np.diff(self._starts).min())

    def batch(self, index: int, seed: int) -> NDArray[np.int64]:
        """The rows of training batch `index` of the endless order."""
        epoch, place = divmod(index, len(self))
        order, batches = self._epoch(epoch, seed)
        return self._rows(order, int(batches[place]))

    def once(self) -> Iterator[NDArray[np.int64]]:
        """All rows once, the longest first; equal ones in their own order."""
        order = np.lexsort((-self._short, -self._long))
        return (self._rows(order, i) for i in range(len(self)))

    def _rows(self, order: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        return order[self._starts[number] : self._starts[number + 1]]

    def _shuffled(self, epoch: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(all rows, sorted by length; the order of the batches) in an epoch."""
        random = generator(seed, ORDER, epoch)
        order = np.lexsort((-self._short - _NOISE * random.random(len(self._short)), -self._long))
        return order, random.permutation(len(self))
