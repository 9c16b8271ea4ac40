"""Tasks of generated sequences: training batches are drawn when they are needed, or from a fixed set."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.generators import ORDER, TEST, TRAIN, VALID, generator
from mnemos.lab.tasks.task import DataConfig
from mnemos.types import InputError, State, likelihood_of

from .batch import IGNORE, Batch
from .metrics import ANSWER
from .task import Split
from .token_task import TokenTask

Rows = tuple[NDArray[np.int64], NDArray[np.int64]]  # inputs and targets, [rows, T] each
Draw = Callable[[np.random.Generator, int], Rows]
LARGE = 1024  # tokens of a vocabulary: from here on the logits are most of the work of a small model
BLOCK = 2**20  # random numbers that `distinct` draws at once
MANY, FEW = 1024, 8  # choices from which on `distinct` draws one number at a time, at most 1/FEW of them


class GeneratedConfig(DataConfig):
    """Base of the configurations of tasks whose sequences are all generated: they read no file."""

    def files(self) -> tuple[()]:
        return ()

    def task(self, vocab_size: int, length: int, train: Callable[[int], "Draw"] | None = None) -> "GeneratedTask":
        """The task whose rows are drawn by the method `draw`, and in training, if it is given, by `train(update)`."""
        own: Any = self
        return GeneratedTask(own.draw, vocab_size, length, own.rows, own.seed, train, getattr(self, "examples", 0))


class GeneratedTask(TokenTask):
    """A `Task` whose rows come from `draw(random, rows)`: inputs [B, T] and targets [B, T], each with one right answer.

    Training batch i depends on (the training seed, i) only. With `train`, it is drawn by `train(i)` instead of `draw`,
    for example to begin with easier sequences; their vocabulary must be the same and their length no greater. With
    `examples` > 0, training has that many rows, drawn once from `seed` by `train(0)`, and each epoch reads all of them
    in an order of its own. The validation and the test split have `rows` sequences each, drawn from `seed` by
    `held_out[split]` if that is given, and do not depend on the batch size. `size("train")` is 0 without `examples`,
    because the training set is endless.
    """

    metrics = ANSWER
    splits_rows = True

    def __init__(
        self,
        draw: Draw,
        vocab_size: int,
        max_length: int,
        rows: int,
        seed: int,
        train: Callable[[int], Draw] | None = None,
        examples: int = 0,
        held_out: Mapping[str, Draw] | None = None,
    ) -> None:
        if rows < 1 or examples < 0:
            raise InputError(
                f"data.rows: expected at least 1, and data.examples at least 0, found {rows}, {examples}; change it"
            )
        self.vocab_size, self.max_length = vocab_size, max_length
        self.examples, self._seed = examples, seed
        self._train = train or (lambda _: draw)
        draws = held_out or {"valid": draw, "test": draw}
        numbers = {"valid": VALID, "test": TEST}
        self._held_out = {split: draws[split](generator(seed, number), rows) for split, number in numbers.items()}

    def forward(self, model: nn.Module, batch: Batch, state: State) -> tuple[Tensor, State]:
        """Run the model on a batch: (logits, new state).

        With a vocabulary of `LARGE` tokens or more, logits are [n, V], of the n positions that have a target, if the
        model can pick them (`picks_positions`): its last layer is most of the work of a small model, and few positions
        count. The state is the same.
        """
        compiled = hasattr(model, "_orig_mod")  # n differs from batch to batch
        picks = getattr(model, "picks_positions", False) and likelihood_of(model) is None and not compiled
        if self.vocab_size < LARGE or not picks:
            return super().forward(model, batch, state)
        return model(batch.inputs, state, mask=batch.mask, only=batch.targets != IGNORE)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        if not self.examples:
            return _batch(*self._train(index)(generator(seed, TRAIN, index), batch_size))
        epoch, place = np.divmod(np.arange(index * batch_size, (index + 1) * batch_size), self.examples)
        orders = {int(e): generator(seed, ORDER, int(e)).permutation(self.examples) for e in np.unique(epoch)}
        rows = np.array([orders[int(e)][i] for e, i in zip(epoch, place, strict=True)])
        inputs, targets = self._fixed
        return _batch(inputs[rows], targets[rows])

    @cached_property
    def _fixed(self) -> Rows:
        return self._train(0)(generator(self._seed, TRAIN), self.examples)

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[Batch]:
        inputs, targets = self._held_out[split]
        for first in range(0, len(inputs), batch_size):
            yield _batch(inputs[first : first + batch_size], targets[first : first + batch_size])

    def example(self) -> Batch:
        """The first validation row: logits of large vocabularies are computed, and counted, at its targets only."""
        return next(iter(self.batches("valid", 1)))

    def size(self, split: Split) -> int:
        if split == "train" and not self.examples:
            return 0
        targets = self._fixed[1] if split == "train" else self._held_out[split][1]
        return int((targets != IGNORE).sum())

    def epoch(self, batch_size: int) -> float:
        return self.examples / batch_size


def _batch(inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> Batch:
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def distinct(random: np.random.Generator, rows: int, choices: int, count: int) -> NDArray[np.int64]:
    """`count` different numbers of 0 … `choices` − 1 per row, in random order: [rows, count].

    Few of many are the first `count` different numbers of a sequence of independent draws; a larger part of them is the
    beginning of a random order of all. Both are uniform. Cost: O(rows·count·log count) time for at most 1/`FEW` of at
    least `MANY` choices, else O(rows·choices) time, and memory for the result and `BLOCK` further numbers.
    """
    if choices < MANY or count * FEW > choices:
        some = max(1, BLOCK // choices)
        blocks = (random.random((min(some, rows - i), choices)) for i in range(0, rows, some))
        return np.concatenate([smallest(block, count) for block in blocks])
    drawn = random.integers(0, choices, (rows, count))
    while True:
        order = np.argsort(drawn, axis=1, kind="stable")  # equal numbers stay in the order in which they were drawn
        ordered = np.take_along_axis(drawn, order, 1)
        repeated = np.zeros(drawn.shape, bool)
        np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], 1)
        missing = count - int((~repeated).sum(1).min())
        if missing <= 0:
            break
        drawn = np.concatenate([drawn, random.integers(0, choices, (rows, missing))], 1)
    first = np.argsort(repeated, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(drawn, first, 1)


def smallest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The indices of the `count` smallest numbers of each row, the smallest first: [rows, N] -> [rows, count]."""
    near = np.argpartition(values, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(values, near, 1), axis=1)
    return np.take_along_axis(near, order, 1)
