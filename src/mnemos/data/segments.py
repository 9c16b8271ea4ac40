"""Long documents as aligned streams of segments: what a model with memory is trained and judged on.

A document x₀ … x_{n−1} is read as  start, x₀, …, x_{n−2}  and predicted as  x₀, …, x_{n−1}: every token exactly once,
the first from the start token alone. It is cut into ⌈n/L⌉ segments of L; the last is padded (token 0, mask False,
target IGNORE), so no segment holds two documents, and whether a row starts afresh is one flag a segment.

Each of the B rows of a batch reads whole documents, one segment a step, and a row that has finished one takes
the next of a queue in the following step. So no document is ever cut between two rows, whatever their lengths.
In training the queue is endless: epoch after epoch, each a fresh permutation of all documents; so every document
is read exactly once an epoch, no row is ever idle, and the epochs run into each other without a gap.
In evaluation the queue ends. A row with nothing left reads the start token of an empty document and predicts
nothing. What is predicted from what thus never depends on the batch size.
"""

import bisect
import heapq
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.types import InputError

from .batch import IGNORE, Batch, Metric, TokenTask
from .randomness import ORDER, generator


class Schedule:
    """Which document each of B rows reads at step i: documents from a queue, each given to the first row free.

    `steps` [N] are the documents' numbers of segments; `seed` shuffles them anew every epoch, without end; None
    queues each once, longest first. Cost: O(log B) for each document begun up to the step asked for, once.
    """

    def __init__(self, steps: Sequence[int], rows: int, seed: int | None):
        if rows < 1:
            raise InputError(f"expected a batch size of at least 1, found {rows}")
        self.steps = steps
        self._free = [(0, row) for row in range(rows)]  # a heap: the step at which a row is free
        self._starts: list[list[int]] = [[] for _ in range(rows)]
        self._documents: list[list[int]] = [[] for _ in range(rows)]
        self._queue = self._endless(seed) if seed is not None else iter(np.argsort(-np.array(steps), kind="stable"))

    def _endless(self, seed: int) -> Iterator[int]:
        epoch = 0
        while True:
            yield from generator(seed, ORDER, epoch).permutation(len(self.steps))
            epoch += 1

    def at(self, step: int) -> list[tuple[int, int] | None]:
        """For each row: (document, segment of it), or None for a row that has run out."""
        while self._free and self._free[0][0] <= step:
            start, row = heapq.heappop(self._free)
            document = next(self._queue, None)
            if document is not None:  # else the row stays out of the heap: it has run out
                self._starts[row].append(start)
                self._documents[row].append(int(document))
                heapq.heappush(self._free, (start + self.steps[document], row))
        return [self._row(row, step) for row in range(len(self._starts))]

    def _row(self, row: int, step: int) -> tuple[int, int] | None:
        last = bisect.bisect_right(self._starts[row], step) - 1
        if last < 0:
            return None
        document, segment = self._documents[row][last], step - self._starts[row][last]
        return (document, segment) if segment < self.steps[document] else None


class SegmentedTask(TokenTask):
    """A language `Task` over documents, arrays of token ids [n], read in segments of `segment` tokens.

    `start` is the token that stands before a document's first. Rows carry state from batch i to batch i + 1, and
    `reset` says which of them start a document. Evaluation uses at most as many rows as there are documents.
    Raises InputError for a split without tokens and, with document and offset, for a token outside the vocabulary.
    """

    kind: Literal["language"] = "language"
    metric: Metric = "loss"
    classes = 0
    carries_state = True
    majority = None

    def __init__(
        self,
        train: Sequence[NDArray[np.integer]],
        valid: Sequence[NDArray[np.integer]],
        test: Sequence[NDArray[np.integer]],
        vocab_size: int,
        segment: int,
        start: int = 0,
    ):
        if segment < 1:
            raise InputError(f"expected segments of at least one token, found {segment}")
        self.vocab_size = vocab_size
        self.max_length = segment
        self._start = start
        self._splits = {"train": train, "valid": valid, "test": test}
        for name, documents in self._splits.items():
            _check(name, documents, vocab_size)
        self._schedule = lru_cache(maxsize=2)(self._make_schedule)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Step `index` of the endless training streams that `seed` gives. Cost: O(B·L)."""
        documents = self._splits["train"]
        return self._batch(documents, self._schedule(batch_size, seed).at(index))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Every token of a split once; batch i + 1 continues batch i."""
        documents = self._splits[split]
        schedule = Schedule(self._steps(split), min(batch_size, len(documents)), seed=None)
        step = 0
        while any(rows := schedule.at(step)):
            yield self._batch(documents, rows)
            step += 1

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """Tokens of a split, all of which are predicted."""
        return sum(len(document) for document in self._splits[split])

    def _steps(self, split: str) -> list[int]:
        return [-(-len(document) // self.max_length) for document in self._splits[split]]

    def _make_schedule(self, batch_size: int, seed: int) -> Schedule:
        return Schedule(self._steps("train"), batch_size, seed)

    def _batch(self, documents: Sequence[NDArray[np.integer]], rows: list[tuple[int, int] | None]) -> Batch:
        shape = len(rows), self.max_length
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        lengths, reset = np.ones(len(rows), np.int64), np.ones(len(rows), bool)
        for i, place in enumerate(rows):
            if place is None:
                inputs[i, 0] = self._start
                continue
            document, segment = documents[place[0]], place[1]
            first = segment * self.max_length
            piece = document[first : first + self.max_length]
            targets[i, : len(piece)] = piece
            inputs[i, 0] = document[first - 1] if segment else self._start
            inputs[i, 1 : len(piece)] = piece[:-1]
            lengths[i], reset[i] = len(piece), segment == 0
        mask = np.arange(self.max_length) < lengths[:, None]
        return Batch(
            torch.from_numpy(inputs),
            torch.from_numpy(targets),
            None if mask.all() else torch.from_numpy(mask),
            torch.from_numpy(reset),
        )


def _check(name: str, documents: Sequence[NDArray[np.integer]], vocab_size: int) -> None:
    if not documents:
        raise InputError(f"{name} split: expected at least one document, found none; give more text")
    for i, document in enumerate(documents):
        if not len(document):
            raise InputError(f"{name} split: document {i} is empty; leave it out")
        if document.min() < 0 or document.max() >= vocab_size:
            offset = int(np.flatnonzero((document < 0) | (document >= vocab_size))[0])
            raise InputError(
                f"{name} split: document {i}, offset {offset}: expected a token from 0 to {vocab_size - 1}, "
                f"found {document[offset]}"
            )
