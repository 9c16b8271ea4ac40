"""Classification of token sequences held in memory: rows of integers, and the task over three splits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .batch import Batch
from .metrics import MAJORITY, class_metrics
from .row_order import Order
from .task import HeldOut, Split
from .token_task import TokenTask


@dataclass(frozen=True, eq=False)
class Rows:
    """N labelled sequences, concatenated: row i is tokens[starts[i] : starts[i + 1]], its label labels[i]."""

    tokens: NDArray[np.integer]
    starts: NDArray[np.int64]
    labels: NDArray[np.integer]

    @classmethod
    def ragged(cls, tokens: NDArray[np.integer], lengths: NDArray[np.int64], labels: NDArray[np.integer]) -> "Rows":
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), labels)

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        columns = zip(*((part.tokens, part.lengths, part.labels) for part in parts), strict=True)
        return cls.ragged(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.starts)

    def row(self, index: int) -> NDArray[np.integer]:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def part(self, first: int, end: int) -> "Rows":
        """Rows `first` to `end` − 1. The tokens are a view."""
        starts = self.starts[first : end + 1]
        return Rows(self.tokens[starts[0] : starts[-1]], starts - starts[0], self.labels[first:end])

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """The chosen rows as a batch [B, T], each padded at its end with token 0 to the length of the longest."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        valid = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.zeros(valid.shape, np.int64)
        tokens[valid] = np.concatenate([self.row(row) for row in rows])
        mask = None if valid.all() else torch.from_numpy(valid)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(self.labels[rows].astype(np.int64)), mask)


class ArrayTask(TokenTask):
    """A classification `Task` over three `Rows`, whose labels are the classes; training is an endless order of rows.

    `bucketed` puts rows of similar length into one batch (see `Order`); evaluation is then ordered by length too.
    """

    def __init__(
        self, splits: Mapping[Split, Rows], vocab_size: int, classes: int, max_length: int, bucketed: bool = False
    ):
        self._splits, self.vocab_size, self.classes, self.max_length = splits, vocab_size, classes, max_length
        self._bucketed = bucketed
        self._order = Order(len(splits["train"]), splits["train"].lengths if bucketed else None)
        if classes:
            self.metrics, labels = class_metrics(classes), splits["test"].labels
            self.reference = {MAJORITY: float(np.bincount(labels).max() / len(labels))}

    def read(self, rows: Rows, chosen: NDArray[np.int64]) -> Batch:
        return rows.batch(chosen)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        return self.read(self._splits["train"], self._order.batch(index, batch_size, seed))

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        rows = self._splits[split]
        order = np.argsort(rows.lengths, kind="stable") if self._bucketed else np.arange(len(rows))
        return (self.read(rows, order[i : i + batch_size]) for i in range(0, len(rows), batch_size))

    def size(self, split: Split) -> int:
        return len(self._splits[split])

    def epoch(self, batch_size: int) -> float:
        return self.size("train") / batch_size
