"""Which document each row reads in each batch: documents as aligned streams of segments."""

import bisect
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from mnemos.errors import InputError
from mnemos.generators import ORDER, generator


class Schedule:
    """Which document each of B rows reads in batch i. Each document in a queue goes to the first row that is free.

    `lengths` [N] are the documents' numbers of segments. With a `seed`, the queue is endless and shuffled every epoch;
    with None, each document is queued once, the longest first. Cost: O(log B) for every document that starts before
    the requested batch, once. Raises InputError if `rows` is below 1.
    """

    def __init__(self, lengths: Sequence[int], rows: int, seed: int | None):
        if rows < 1:
            raise InputError(f"rows: expected at least 1 row in a batch, found {rows}")
        self.lengths = lengths
        self._free = [(0, row) for row in range(rows)]  # a heap of (batch in which a row becomes free, row)
        self._starts: list[list[int]] = [[] for _ in range(rows)]
        self._documents: list[list[int]] = [[] for _ in range(rows)]
        self._queue = self._endless(seed) if seed is not None else iter(np.argsort(-np.array(lengths), kind="stable"))

    def _endless(self, seed: int) -> Iterator[int]:
        epoch = 0
        while True:
            yield from generator(seed, ORDER, epoch).permutation(len(self.lengths))
            epoch += 1

    def at(self, index: int) -> list[tuple[int, int] | None]:
        """For each row of batch `index`: (document, segment of it), or None if no document is left for the row."""
        while self._free and self._free[0][0] <= index:
            start, row = heapq.heappop(self._free)
            document = next(self._queue, None)
            if document is not None:  # otherwise the row leaves the heap: the queue is empty
                self._starts[row].append(start)
                self._documents[row].append(int(document))
                heapq.heappush(self._free, (start + self.lengths[document], row))
        return [self._row(row, index) for row in range(len(self._starts))]

    def _row(self, row: int, index: int) -> tuple[int, int] | None:
        last = bisect.bisect_right(self._starts[row], index) - 1
        if last < 0:
            return None
        document, segment = self._documents[row][last], index - self._starts[row][last]
        return (document, segment) if segment < self.lengths[document] else None
