"""Associative recall: read pairs of a key and a value, and later predict the value of a given key."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE
from .generated import Draw, GeneratedConfig, GeneratedTask

TokensAndTargets = tuple[NDArray[np.int64], NDArray[np.int64]]


@register
@dataclass(frozen=True)
class RecallConfig(GeneratedConfig):
    """Pairs k₁ v₁ … k_P v_P, then `gap` blanks, `distance` distractors and `queries` keys, each followed by its value.

    Keys are drawn from 1 … `symbols` without repetition, and the queried keys are distinct. Values are uniform over
    `symbols` + 1 … 2·`symbols`. The blank is 0. The loss counts only the values after the queried keys; the last value
    is a target but no input. Guessing is right with probability 1/`symbols`. The validation and the test split have
    `rows` sequences each, drawn from `seed`.

    Distractors are uniform over `distractors` symbols of their own, from 2·`symbols` + 1 on. In held-out sequences all
    `distance` distractors are between the pairs and the queries. `shortest` and `grow` change training sequences:
    - `shortest` = 0: they are like the held-out ones.
    - `shortest` > 0, `grow` = 0: the number of distractors between pairs and queries is log-uniform from `shortest` to
      `distance`. The others come before the pairs, so T and the positions of the queries do not change. A memory that
      forgets can then learn short distances before long ones.
    - `grow` > 0: the first `grow` updates do this in shorter rows, whose largest distance grows from `shortest` by the
      same factor per update, so short distances are learned at lower cost. All later updates use the full distance.
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
        """The length T of a held-out sequence."""
        return 2 * self.pairs + self.gap + self.distance + 2 * self.queries - 1

    def build(self) -> GeneratedTask:
        """The task: T = 2·pairs + gap + distance + 2·queries − 1.

        The vocabulary has 2·`symbols` + 1 tokens, plus `distractors` if `distance` > 0. Raises InputError for a
        setting out of range.
        """
        if not 1 <= self.queries <= self.pairs <= self.symbols or self.gap < 0:
            raise InputError(
                f"recall: expected 1 <= queries <= pairs <= symbols and gap >= 0, found {self.queries}, {self.pairs}, "
                f"{self.symbols} and {self.gap}; change these settings"
            )
        if not 0 <= self.shortest <= self.distance or self.distractors < 1:
            raise InputError(
                f"recall: expected 0 <= shortest <= distance and distractors >= 1, found {self.shortest}, "
                f"{self.distance} and {self.distractors}; change these settings"
            )
        if self.grow < 0 or (self.grow and not self.shortest):
            raise InputError(
                f"recall: expected grow >= 0, and shortest >= 1 to grow from, found {self.grow} and {self.shortest}; "
                "set shortest too"
            )
        vocabulary = 2 * self.symbols + 1 + (self.distractors if self.distance else 0)
        train = self.curriculum if self.shortest else None
        return GeneratedTask(self.draw, vocabulary, self.length, self.rows, self.seed, train)

    def draw(self, random: np.random.Generator, rows: int) -> TokensAndTargets:
        """Draw inputs and targets, [rows, T] each, at the full distance."""
        return self._draw(random, rows, None)

    def curriculum(self, update: int) -> Draw:
        """The function that draws the rows of an update; updates are counted from 0."""
        if not self.grow:
            return self.draw_near
        if update >= self.grow:
            return self.draw
        longest = self.shortest * (self.distance / self.shortest) ** (update / self.grow)
        return replace(self, distance=int(longest)).draw_near

    def draw_near(self, random: np.random.Generator, rows: int) -> TokensAndTargets:
        """Draw inputs and targets, [rows, T] each, at log-uniform distances from `shortest` to `distance`."""
        # Log-uniform over [shortest, distance + 1), then rounded down.
        drawn = self.shortest * ((self.distance + 1) / self.shortest) ** random.random((rows, 1))
        return self._draw(random, rows, np.minimum(drawn.astype(np.int64), self.distance))

    def _draw(self, random: np.random.Generator, rows: int, distance: NDArray[np.int64] | None) -> TokensAndTargets:
        # Sorting random numbers yields a random order: one sort draws distinct keys, another the queried ones.
        keys = 1 + np.argsort(random.random((rows, self.symbols)), axis=1)[:, : self.pairs]
        values = self.symbols + random.integers(1, self.symbols, (rows, self.pairs), endpoint=True)
        queried = np.argsort(random.random((rows, self.pairs)), axis=1)[:, : self.queries]
        queries, answers = np.take_along_axis(keys, queried, 1), np.take_along_axis(values, queried, 1)

        pairs = np.zeros((rows, 2 * self.pairs + self.gap), np.int64)
        pairs[:, 0 : 2 * self.pairs : 2], pairs[:, 1 : 2 * self.pairs : 2] = keys, values
        start = pairs.shape[1] + self.distance
        inputs = np.zeros((rows, self.length), np.int64)
        inputs[:, start::2], inputs[:, start + 1 :: 2] = queries, answers[:, :-1]
        position = np.arange(start)[None] - (0 if distance is None else self.distance - distance)
        inside = np.broadcast_to((position >= 0) & (position < pairs.shape[1]), (rows, start))
        before_queries = inputs[:, :start]
        before_queries[inside] = pairs.ravel()  # a boolean index selects left to right, so the pairs keep their order
        before_queries[~inside] = 2 * self.symbols + random.integers(
            1, self.distractors, rows * self.distance, endpoint=True
        )
        targets = np.full_like(inputs, IGNORE)
        targets[:, start::2] = answers
        return inputs, targets
