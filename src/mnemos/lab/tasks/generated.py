"""Tasks of generated sequences: training batches are drawn when they are needed, or from a fixed set."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.config import check_fields
from mnemos.generators import ORDER, TEST, TRAIN, VALID, generator
from mnemos.registry import register
from mnemos.types import State, likelihood_of

from .batch import IGNORE, Batch
from .metrics import ANSWER
from .task import DataConfig, HeldOut, Split
from .token_task import TokenTask

Rows = tuple[NDArray[np.int64], NDArray[np.int64]]  # inputs and targets, [rows, T] each
Draw = Callable[[np.random.Generator, int], Rows]
LARGE = 1024  # tokens of a vocabulary: from here on the logits are most of the work of a small model
BLOCK = 2**20  # random numbers that `distinct` draws at once
MANY, FEW = 1024, 8  # choices from which on `distinct` draws one number at a time, at most 1/FEW of them


class GeneratedConfig(DataConfig):
    """Base of the configurations of tasks whose sequences are all drawn: `draw` says how.

    The validation and the test split have `rows` sequences each, drawn from `seed`. With a field `examples` above 0,
    training has so many rows; otherwise each update draws new ones. limits: what must hold of the fields
    (`DataConfig.require`). shape: the number of tokens, and the greatest length T of a row.
    """

    limits: ClassVar[tuple[str, ...]] = ()
    vocabulary: Any
    length: Any
    rows: Any
    seed: Any
    examples = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.vocabulary, self.length

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        raise NotImplementedError

    def training(self, update: int) -> Draw:
        """What draws the training rows of an update, from 0: easier or other rows than `draw`, or the same."""
        return self.draw

    def files(self) -> tuple[()]:
        return ()

    def build(self) -> "GeneratedTask":
        check_fields(self, "data")
        self.require("rows >= 1", "examples >= 0", *self.limits)
        held_out: dict[Split, Draw] = {"valid": self.draw, "test": self.draw}
        return GeneratedTask(self.training, held_out, *self.shape, self.rows, self.seed, self.examples)


class GeneratedTask(TokenTask):
    """A `Task` whose rows are drawn: inputs [B, T] and targets [B, T], each with one right answer.

    Training batch i is drawn by `train(i)`, and depends on (the training seed, i) only. With `examples` > 0, training
    has that many rows, drawn once from `seed` by `train(0)`, and each epoch reads all of them in an order of its own. A
    held-out split has `rows` sequences, drawn from `seed` by `held_out[split]`.
    """

    metrics = ANSWER
    splits_rows = True

    def __init__(
        self,
        train: Callable[[int], Draw],
        held_out: Mapping[Split, Draw],
        vocab_size: int,
        max_length: int,
        rows: int,
        seed: int,
        examples: int = 0,
    ) -> None:
        self.vocab_size, self.max_length, self.examples = vocab_size, max_length, examples
        self._train, self._seed = train, seed
        self._held_out: dict[Split, Rows] = {
            "valid": held_out["valid"](generator(seed, VALID), rows),
            "test": held_out["test"](generator(seed, TEST), rows),
        }

    def forward(self, model: nn.Module, batch: Batch, state: State) -> tuple[Tensor, State]:
        """(logits, new state); of a large vocabulary the logits [n, V] of the n positions that have a target.

        That is if a model can pick them (`picks_positions`): from `LARGE` on its last layer may be most of its work.
        """
        compiled = hasattr(model, "_orig_mod")  # n differs from batch to batch
        picks = getattr(model, "picks_positions", False) and likelihood_of(model) is None and not compiled
        if self.vocab_size < LARGE or not picks:
            return super().forward(model, batch, state)
        return model(batch.inputs, state, mask=batch.mask, only=batch.targets != IGNORE)

    def train_batch(self, index: int, batch_size: int, seed: int) -> Batch:
        if not self.examples:
            return _as_batch(self._train(index)(generator(seed, TRAIN, index), batch_size))
        epochs, positions = np.divmod(np.arange(index * batch_size, (index + 1) * batch_size), self.examples)
        orders = {int(e): generator(seed, ORDER, int(e)).permutation(self.examples) for e in np.unique(epochs)}
        return _as_batch(self._examples, np.array([orders[e][i] for e, i in zip(epochs, positions, strict=True)]))

    @cached_property
    def _examples(self) -> Rows:
        return self._train(0)(generator(self._seed, TRAIN), self.examples)

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[Batch]:
        rows = self._held_out[split]
        return (_as_batch(rows, slice(i, i + batch_size)) for i in range(0, len(rows[0]), batch_size))

    def example(self) -> Batch:
        """The first validation row: logits of large vocabularies are computed, and counted, at its targets only."""
        return next(self.batches("valid", 1))

    def size(self, split: Split) -> int:
        if split == "train" and not self.examples:
            return 0
        return int(((self._examples if split == "train" else self._held_out[split])[1] != IGNORE).sum())

    def epoch(self, batch_size: int) -> float:
        return self.examples / batch_size


def _as_batch(rows: Rows, chosen: Any = slice(None)) -> Batch:
    return Batch(*(torch.from_numpy(part[chosen]) for part in rows))


def distinct(random: np.random.Generator, rows: int, choices: int, count: int) -> NDArray[np.int64]:
    """`count` different numbers of 0 … `choices` − 1 per row, uniform and in random order: [rows, count].

    Cost: O(rows·count·log count) time for at most 1/`FEW` of at least `MANY` choices, else O(rows·choices) time, and
    memory for the result and `BLOCK` further numbers.
    """
    # --- a large part: the beginning of a random order ---
    if choices < MANY or count * FEW > choices:
        some = max(1, BLOCK // choices)
        blocks = (random.random((min(some, rows - i), choices)) for i in range(0, rows, some))
        return np.concatenate([smallest(block, count) for block in blocks])
    # --- few of many: draw until no row has fewer than `count` different ones ---
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


@register
@dataclass(frozen=True)
class CopyConfig(GeneratedConfig):
    """The copy task of "Transformers are RNNs" (Figure 2): rows [w, 0, w, 0, 0, …] of `length` tokens.

    The word w has n symbols, uniform over 1 … `symbols`. n is uniform between length/4 and length/2 − 1, the longest
    word that fits twice (32 to 63 for length 128). The loss counts only the n symbols of the second w.
    """

    name: ClassVar[str] = "copy"
    limits = ("length >= 4", "symbols >= 1")

    length: int = 128
    symbols: int = 10
    rows: int = 1024  # of the validation split, and of the test split
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.symbols + 1, self.length

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        longest = self.length // 2 - 1
        n = random.integers(self.length // 4, longest, (rows, 1), endpoint=True)
        word = random.integers(1, self.symbols, (rows, longest), endpoint=True)
        position = np.arange(self.length)[None]
        second = (position > n) & (position <= 2 * n)
        inputs = np.zeros((rows, self.length), np.int64)
        # A boolean index selects row by row, left to right, so the symbols keep their order in both copies.
        inputs[position < n] = inputs[second] = word[position[:, :longest] < n]
        targets = np.full_like(inputs, IGNORE)
        targets[:, :-1] = np.where(second[:, 1:], inputs[:, 1:], IGNORE)
        return inputs, targets
