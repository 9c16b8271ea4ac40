"""Associative recall: read pairs of a key and a value, then say which value went with a key, however much later."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.config import DataConfig
from mnemos.types import InputError

from .batch import IGNORE
from .generated import Draw, GeneratedTask

Rows = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class RecallConfig(DataConfig):
    """The fact k₁ v₁ … k_P v_P, `gap` blanks, `distance` distractors, then `queries` of the keys, each with its value.

    Keys are 1 … `symbols`, distinct in a sequence, as are the queries; values are `symbols` + 1 … 2·`symbols`, each
    drawn evenly; 0 is the blank. The loss counts the values after the queries alone; the last is not shown. Guessing
    is right once in `symbols`. `rows` sequences, drawn from `seed`, are held out for each of validation and test.

    Distractors are drawn evenly from `distractors` symbols of their own, 2·`symbols` + 1 and on. Held-out sequences
    have all `distance` of them between fact and questions. With `shortest`, training draws how many, from `shortest` to
    `distance`, evenly in the logarithm, and the rest stand before the fact: T is the same, the questions stand where
    they always do, and a memory that forgets learns what is near before what is far. 0: as the held-out ones are.
    With `grow`, only the first so many updates do, in shorter rows, whose largest distance grows from `shortest` on by
    the same factor every update: what is near is learned at a fraction of the cost. All later ones are at the full
    distance.
    """

    name: ClassVar[str] = "recall"

    pairs: int = 16
    symbols: int = 32
    queries: int = 4
    gap: int = 0
    rows: int = 1024
    seed: int = 0
    distance: int = 0
    shortest: int = 0
    grow: int = 0
    distractors: int = 16

    @property
    def length(self) -> int:
        """T."""
        return 2 * self.pairs + self.gap + self.distance + 2 * self.queries - 1

    def build(self) -> GeneratedTask:
        """The task: T = 2·pairs + gap + distance + 2·queries − 1.

        Vocabulary: 2·`symbols` + 1, and `distractors` more where there is a distance.
        """
        if not 1 <= self.queries <= self.pairs <= self.symbols or self.gap < 0:
            raise InputError(
                f"recall: expected 1 <= queries <= pairs <= symbols and gap >= 0, found {self.queries}, {self.pairs}, "
                f"{self.symbols} and {self.gap}"
            )
        if not 0 <= self.shortest <= self.distance or self.distractors < 1:
            raise InputError(
                f"recall: expected 0 <= shortest <= distance and distractors >= 1, found {self.shortest}, "
                f"{self.distance} and {self.distractors}"
            )
        if self.grow < 0 or (self.grow and not self.shortest):
            raise InputError(
                f"recall: expected grow >= 0, and shortest >= 1 to grow from, found {self.grow} and {self.shortest}"
            )
        vocabulary = 2 * self.symbols + 1 + (self.distractors if self.distance else 0)
        train = self.lesson if self.shortest else None
        return GeneratedTask(self.draw, vocabulary, self.length, self.rows, self.seed, train)

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        """Inputs and targets, [rows, T] each, at the full distance."""
        return self._draw(random, rows, None)

    def lesson(self, update: int) -> Draw:
        """What draws the rows of an update, from 0."""
        if not self.grow:
            return self.draw_near
        if update >= self.grow:
            return self.draw
        longest = self.shortest * (self.distance / self.shortest) ** (update / self.grow)
        return replace(self, distance=int(longest)).draw_near

    def draw_near(self, random: np.random.Generator, rows: int) -> Rows:
        """Inputs and targets, [rows, T] each, at distances from `shortest` to `distance`."""
        # Even in the logarithm over [shortest, distance + 1); then rounded down.
        drawn = self.shortest * ((self.distance + 1) / self.shortest) ** random.random((rows, 1))
        return self._draw(random, rows, np.minimum(drawn.astype(np.int64), self.distance))

    def _draw(self, random: np.random.Generator, rows: int, distance: NDArray[np.int64] | None) -> Rows:
        # The order of random numbers is a random order: one sort draws distinct keys, another which are asked for.
        keys = 1 + np.argsort(random.random((rows, self.symbols)), axis=1)[:, : self.pairs]
        values = self.symbols + random.integers(1, self.symbols, (rows, self.pairs), endpoint=True)
        asked = np.argsort(random.random((rows, self.pairs)), axis=1)[:, : self.queries]
        queries, answers = np.take_along_axis(keys, asked, 1), np.take_along_axis(values, asked, 1)

        fact = np.zeros((rows, 2 * self.pairs + self.gap), np.int64)
        fact[:, 0 : 2 * self.pairs : 2], fact[:, 1 : 2 * self.pairs : 2] = keys, values
        start = fact.shape[1] + self.distance
        inputs = np.zeros((rows, self.length), np.int64)
        inputs[:, start::2], inputs[:, start + 1 :: 2] = queries, answers[:, :-1]
        place = np.arange(start)[None] - (0 if distance is None else self.distance - distance)
        inside = np.broadcast_to((place >= 0) & (place < fact.shape[1]), (rows, start))
        told = inputs[:, :start]
        told[inside] = fact.ravel()  # booleans pick row by row, left to right, so a fact keeps its order
        told[~inside] = 2 * self.symbols + random.integers(1, self.distractors, rows * self.distance, endpoint=True)
        targets = np.full_like(inputs, IGNORE)
        targets[:, start::2] = answers
        return inputs, targets
