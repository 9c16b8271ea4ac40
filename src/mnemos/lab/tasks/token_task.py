"""Tasks whose inputs are tokens (`TokenTask`), and prediction of the next token of long documents (`SegmentedTask`)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.schedule import Schedule
from mnemos.types import InputError

from .batch import IGNORE, Batch, check_tokens
from .metrics import NEXT_TOKEN
from .task import HeldOut, Sampling, Split, Task

Documents = Sequence[NDArray[np.integer]]


class TokenTask(Task):
    """Base of tasks whose inputs are tokens [B, T] in 0 … vocab_size − 1, with T at most `max_length`.

    Targets are classes [B] where there are `classes`, and otherwise the next tokens [B, T].
    """

    inputs: Literal["tokens"] = "tokens"

    def example(self) -> Batch:
        """One row of zeros [1, max_length], int64."""
        row = torch.zeros(1, self.max_length, dtype=torch.int64)
        return Batch(row, row)

    def check(self, batch: Batch, where: str) -> None:
        check_tokens(batch, where, self.vocab_size, self.classes, self.max_length)
        if self.carries_state and batch.reset is None:
            raise InputError(
                f"{where}: expected a tensor `reset`, because the task carries its state, found None; check the data"
            )


class SegmentedTask(TokenTask):
    """A `Task` of the next token over documents (arrays of token ids [n]), as aligned streams of segments.

    The inputs of a document x₀ … x_{n−1} are start, x₀, …, x_{n−2}, its targets x₀, …, x_{n−1}: every token is
    predicted once. It is cut into ⌈n/L⌉ segments of L tokens, the last one padded (token 0, mask False, target IGNORE),
    so no segment holds two documents, and `reset` marks the start of one. Each row reads whole documents, one segment
    per batch, and then takes the next from a queue: in training an endless one, each epoch a new permutation. In
    evaluation it ends: a row without a document reads the start token and predicts nothing. So no prediction's context
    depends on the batch size.
    """

    metrics = NEXT_TOKEN
    splits_rows = carries_state = True

    def __init__(self, splits: Mapping[Split, Documents], vocab_size: int, segment: int, start: int = 0):
        self.vocab_size, self.max_length, self._start, self._splits = vocab_size, segment, start, splits
        for name, documents in splits.items():
            if not documents or not all(map(len, documents)):
                problem = "an empty one" if documents else "none"
                raise InputError(f"{name} split: expected documents of at least one token, found {problem}; add text")
        self._width = min(segment, max(len(document) for documents in splits.values() for document in documents))
        self._schedule = lru_cache(maxsize=2)(lambda rows, seed: Schedule(self._lengths("train"), rows, seed))

    def example(self) -> Batch:
        row = torch.zeros(1, self._width, dtype=torch.int64)
        return Batch(row, row)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        return self._batch(self._splits["train"], self._schedule(batch_size, seed).at(index))

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        return (self._batch(self._splits[split], rows) for rows in self._segments_of_rows(split, batch_size))

    def rows_of_batches(self, split: HeldOut, batch_size: int) -> list[int]:
        return [len(rows) for rows in self._segments_of_rows(split, batch_size)]

    def size(self, split: Split) -> int:
        return sum(map(len, self._splits[split]))

    def _lengths(self, split: Split) -> list[int]:
        return [-(-len(document) // self.max_length) for document in self._splits[split]]

    def _segments_of_rows(self, split: HeldOut, batch_size: int) -> Iterator[list[tuple[int, int] | None]]:
        """(document, segment) of each row of each held-out batch; None for a row without a document."""
        schedule = Schedule(self._lengths(split), min(batch_size, len(self._splits[split])), seed=None)
        return itertools.takewhile(any, map(schedule.at, itertools.count()))

    def _batch(self, documents: Documents, rows: list[tuple[int, int] | None]) -> Batch:
        shape = len(rows), self._width
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        lengths, reset = np.ones(len(rows), np.int64), np.ones(len(rows), bool)
        for i, row in enumerate(rows):
            if row is None:
                inputs[i, 0] = self._start
                continue
            document, segment = documents[row[0]], row[1]
            first = segment * self.max_length
            piece = document[first : first + self.max_length]
            targets[i, : len(piece)] = piece
            inputs[i, 0] = document[first - 1] if segment else self._start
            inputs[i, 1 : len(piece)] = piece[:-1]
            lengths[i], reset[i] = len(piece), segment == 0
        mask = np.arange(self._width) < lengths[:, None]
        padded = None if mask.all() else torch.from_numpy(mask)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), padded, torch.from_numpy(reset))


def sampling_options(sampling: Sampling) -> dict[str, Any]:
    """The arguments of `Stream.generate` that say how tokens are drawn."""
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
