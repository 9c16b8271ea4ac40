"""Language tasks with generated sequences: each training batch is drawn when it is needed, without end."""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.types import InputError

from .batch import IGNORE, Batch
from .randomness import TEST, TRAIN, VALID, generator
from .token_task import AnsweringTask

Draw = Callable[[np.random.Generator, int], tuple[NDArray[np.int64], NDArray[np.int64]]]


class GeneratedTask(AnsweringTask):
    """A language `Task` whose rows come from `draw(random, rows)`: inputs [B, T] and targets [B, T].

    Training batch i depends on (the training seed, i) only. With `train`, it is drawn by `train(i)` instead of `draw`,
    for example to begin with easier sequences; their vocabulary must be the same and their length no greater. The
    validation and the test split have `rows` sequences each, drawn from `seed`, and do not depend on the batch size.
    `size("train")` is 0, because the training set is endless. Raises InputError if `rows` is below 1.
    """

    def __init__(
        self,
        draw: Draw,
        vocab_size: int,
        max_length: int,
        rows: int,
        seed: int,
        train: Callable[[int], Draw] | None = None,
    ) -> None:
        if rows < 1:
            raise InputError(f"data.rows: expected at least 1 held-out sequence, found {rows}; raise it")
        self.vocab_size = vocab_size
        self.max_length = max_length
        self._train = train or (lambda _: draw)
        self._held_out = {"valid": draw(generator(seed, VALID), rows), "test": draw(generator(seed, TEST), rows)}

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Training batch `index`, a pure function of (index, batch_size, seed)."""
        return _batch(*self._train(index)(generator(seed, TRAIN, index), batch_size))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """Batches that hold every sequence of a held-out split once."""
        inputs, targets = self._held_out[split]
        for first in range(0, len(inputs), batch_size):
            yield _batch(inputs[first : first + batch_size], targets[first : first + batch_size])

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """The number of predicted tokens in a held-out split; 0 for the endless training split."""
        return 0 if split == "train" else int((self._held_out[split][1] != IGNORE).sum())


def _batch(inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> Batch:
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
