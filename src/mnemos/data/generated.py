"""Language tasks whose sequences are drawn as they are asked for, and never run out."""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from mnemos.types import InputError

from .batch import IGNORE, Batch, TokenTask
from .randomness import TEST, TRAIN, VALID, generator

Draw = Callable[[np.random.Generator, int], tuple[NDArray[np.int64], NDArray[np.int64]]]


class GeneratedTask(TokenTask):
    """A language `Task` whose rows come from `draw(random, rows)`: inputs [B, T] and targets [B, T].

    Training batch i is drawn from (the loop's seed, i), by `train(i)` where that is given (easier rows, say, of the
    same vocabulary and no longer). The two held-out splits are `rows` sequences each, drawn from `seed`, the same
    whatever the batch size. `size("train")` is 0: there is no end to it.
    """

    kind: Literal["language"] = "language"
    classes = 0
    carries_state = False
    majority = None

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
            raise InputError(f"expected at least one held-out sequence, found {rows}; raise the number of rows")
        self.vocab_size = vocab_size
        self.max_length = max_length
        self._train = train or (lambda _: draw)
        self._held_out = {"valid": draw(generator(seed, VALID), rows), "test": draw(generator(seed, TEST), rows)}

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        """Batch `index` of the endless training set that `seed` gives."""
        return _batch(*self._train(index)(generator(seed, TRAIN, index), batch_size))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        """The held-out sequences of a split, each once."""
        inputs, targets = self._held_out[split]
        for first in range(0, len(inputs), batch_size):
            yield _batch(inputs[first : first + batch_size], targets[first : first + batch_size])

    def size(self, split: Literal["train", "valid", "test"]) -> int:
        """Tokens predicted in a held-out split; 0 for training, which is endless."""
        return 0 if split == "train" else int((self._held_out[split][1] != IGNORE).sum())


def _batch(inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> Batch:
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))
