"""Classification of token sequences held in memory: rows of integers, and the task over three splits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.types import InputError

from .batch import Batch
from .metrics import ACCURACY, MAJORITY, TOP5
from .row_order import Order
from .task import Split
from .token_task import TokenTask


@dataclass(frozen=True, eq=False)
class Rows:
    """N labelled sequences, concatenated: integers tokens [total] and labels [N], starts [N + 1] int64.

    Row i is tokens[starts[i] : starts[i + 1]].
    """

    tokens: NDArray[np.integer]
    starts: NDArray[np.int64]
    labels: NDArray[np.integer]

    @classmethod
    def ragged(cls, tokens: NDArray[np.integer], lengths: NDArray[np.int64], labels: NDArray[np.integer]) -> "Rows":
        """Rows of different lengths [N]: `tokens` holds them one after the other."""
        return cls(tokens, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), labels)

    @classmethod
    def fixed(cls, tokens: NDArray[np.integer], labels: NDArray[np.integer]) -> "Rows":
        """Rows of equal length, from tokens [N, T]."""
        return cls.ragged(tokens.reshape(-1), np.full(len(tokens), tokens.shape[1]), labels)

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """The rows of all parts, in order. `parts` must not be empty."""
        return cls.ragged(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.labels for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens in each row, [N]."""
        return np.diff(self.starts)

    def row(self, index: int) -> NDArray[np.integer]:
        """The tokens of row `index`, as a view."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def part(self, first: int, end: int) -> "Rows":
        """Rows `first` to `end` − 1. The tokens are a view."""
        starts = self.starts[first : end + 1]
        return Rows(self.tokens[starts[0] : starts[-1]], starts - starts[0], self.labels[first:end])

    def batch(self, rows: NDArray[np.int64]) -> Batch:
        """The chosen rows as a batch [B, T], each padded at its end with token 0 to the length of the longest."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        longest = int(lengths.max())
        tokens = np.zeros((len(rows), longest), np.int64)
        for i, row in enumerate(rows):
            tokens[i, : lengths[i]] = self.row(row)
        padded = bool((lengths < longest).any())
        mask = torch.from_numpy(np.arange(longest) < lengths[:, None]) if padded else None
        return Batch(torch.from_numpy(tokens), torch.from_numpy(self.labels[rows].astype(np.int64)), mask)


class RowsTask(TokenTask):
    """Base of tasks over the `Rows` of three splits, whose training is an endless order of them.

    `bucketed` puts rows of similar length into one batch (see `Order`); evaluation is then ordered by length too.
    Evaluation visits every row once; its last batch may be smaller than the others. Raises InputError for an empty
    split and an empty row.
    """

    def __init__(self, splits: Mapping[Split, Rows], vocab_size: int, max_length: int, bucketed: bool = False) -> None:
        for name, rows in splits.items():
            if not len(rows) or not rows.lengths.all():
                raise InputError(
                    f"{name} split: expected rows of at least one token, found none or an empty row ({len(rows)} "
                    "rows); check the data"
                )
        self._splits, self._bucketed = splits, bucketed
        self.vocab_size, self.max_length = vocab_size, max_length
        self._order = Order(len(splits["train"]), splits["train"].lengths if bucketed else None)

    def read(self, rows: Rows, chosen: NDArray[np.int64]) -> Batch:
        """The batch of the chosen rows of a split."""
        return rows.batch(chosen)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Training batch `index`, in the endless order that `seed` determines. Cost: O(B·T)."""
        return self.read(self._splits["train"], self._order.batch(index, batch_size, seed))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Batches that hold every row of a split once."""
        rows = self._splits[split]
        order = np.argsort(rows.lengths, kind="stable") if self._bucketed else np.arange(len(rows))
        for first in range(0, len(rows), batch_size):
            yield self.read(rows, order[first : first + batch_size])

    def size(self, split: Split) -> int:
        """The number of rows in a split."""
        return len(self._splits[split])

    def epoch(self, batch_size: int) -> float:
        """The number of updates in one epoch: every training row is used once."""
        return self.size("train") / batch_size


class ArrayTask(RowsTask):
    """A classification `Task` over three `Rows`, whose labels are the classes."""

    def __init__(
        self,
        train: Rows,
        valid: Rows,
        test: Rows,
        vocab_size: int,
        classes: int,
        max_length: int,
        bucketed: bool = False,
    ):
        super().__init__({"train": train, "valid": valid, "test": test}, vocab_size, max_length, bucketed)
        self.classes = classes
        self.metrics = (ACCURACY, TOP5) if classes > 5 else (ACCURACY,)
        self.reference = {MAJORITY: float(np.bincount(test.labels).max() / len(test))}
