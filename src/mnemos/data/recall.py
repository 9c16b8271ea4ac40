"""Associative recall: read pairs of a key and a value, then say which value went with a key."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.config import DataConfig
from mnemos.types import InputError

from .batch import IGNORE
from .generated import GeneratedTask


@dataclass(frozen=True)
class RecallConfig(DataConfig):
    """Sequences k₁ v₁ … k_P v_P, `gap` blanks, then `queries` of the keys, each followed by its value.

    Keys are 1 … `symbols`, distinct in a sequence, as are the queries; values are `symbols` + 1 … 2·`symbols`, each
    drawn evenly; 0 is the blank. The loss counts the values after the queries alone; the last is not shown. Guessing
    is right once in `symbols`. `rows` sequences, drawn from `seed`, are held out for each of validation and test.
    """

    name: ClassVar[str] = "recall"

    pairs: int = 16
    symbols: int = 32
    queries: int = 4
    gap: int = 0
    rows: int = 1024
    seed: int = 0

    @property
    def length(self) -> int:
        """T."""
        return 2 * self.pairs + self.gap + 2 * self.queries - 1

    def build(self) -> GeneratedTask:
        """The task: vocabulary 2·`symbols` + 1, T = 2·pairs + gap + 2·queries − 1."""
        if not 1 <= self.queries <= self.pairs <= self.symbols or self.gap < 0:
            raise InputError(
                f"recall: expected 1 <= queries <= pairs <= symbols and gap >= 0, found {self.queries}, {self.pairs}, "
                f"{self.symbols} and {self.gap}"
            )
        return GeneratedTask(self.draw, 2 * self.symbols + 1, self.length, self.rows, self.seed)

    def draw(self, random: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and targets, [rows, T] each."""
        # The order of random numbers is a random order: one sort draws distinct keys, another which are asked for.
        keys = 1 + np.argsort(random.random((rows, self.symbols)), axis=1)[:, : self.pairs]
        values = self.symbols + random.integers(1, self.symbols, (rows, self.pairs), endpoint=True)
        asked = np.argsort(random.random((rows, self.pairs)), axis=1)[:, : self.queries]
        queries, answers = np.take_along_axis(keys, asked, 1), np.take_along_axis(values, asked, 1)

        start = 2 * self.pairs + self.gap
        inputs = np.zeros((rows, self.length), np.int64)
        inputs[:, 0 : 2 * self.pairs : 2], inputs[:, 1 : 2 * self.pairs : 2] = keys, values
        inputs[:, start::2], inputs[:, start + 1 :: 2] = queries, answers[:, :-1]
        targets = np.full_like(inputs, IGNORE)
        targets[:, start::2] = answers
        return inputs, targets
