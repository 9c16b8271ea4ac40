"""Associative recall: pairs of a key and a value, ours with distractors, and MQAR of "Zoology" (Arora et al. 2024)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from mnemos.registry import register

from .batch import IGNORE
from .generated import Draw, GeneratedConfig, Rows, distinct, smallest

POWER = 0.01  # of MQAR's gaps, as published


@register
@dataclass(frozen=True)
class RecallConfig(GeneratedConfig):
    """Pairs k₁ v₁ … k_P v_P, then `distance` distractors and `queries` keys, each followed by its value.

    Keys are drawn from 1 … `symbols` without repetition, and the queried keys are distinct. Values are uniform over
    `symbols` + 1 … 2·`symbols`. The loss counts only the values after the queried keys; the last value
    is a target but no input. Guessing is right with probability 1/`symbols`.

    Distractors are uniform over `distractors` symbols of their own, from 2·`symbols` + 1 on. In held-out sequences all
    `distance` distractors are between the pairs and the queries. In training, with
    - `shortest` > 0, a log-uniform number of them, from `shortest` on; the others come before the pairs, so T does not
      change. A memory that forgets can then learn short distances before long ones.
    - `grow` > 0, the first `grow` updates do this in shorter rows, whose largest distance grows from `shortest` by the
      same factor per update. All later updates use the full distance.
    """

    name: ClassVar[str] = "recall"
    limits = (
        "1 <= queries <= pairs <= symbols",
        "0 <= shortest <= distance",
        "distractors >= 1",
        "grow >= 0",
        "grow == 0 or shortest >= 1",
    )

    pairs: int = 16
    symbols: int = 32
    queries: int = 4
    rows: int = 1024  # of the validation split, and of the test split
    seed: int = 0
    distance: int = 0
    shortest: int = 0
    grow: int = 0
    distractors: int = 16

    @property
    def length(self) -> int:
        return 2 * self.pairs + self.distance + 2 * self.queries - 1

    @property
    def shape(self) -> tuple[int, int]:
        return 2 * self.symbols + 1 + (self.distractors if self.distance else 0), self.length

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        return self._draw(random, np.full((rows, 1), self.distance))

    def training(self, update: int) -> Draw:
        if not self.shortest or update >= self.grow > 0:
            return self.draw
        if not self.grow:
            return self.draw_near
        longest = self.shortest * (self.distance / self.shortest) ** (update / self.grow)
        return replace(self, distance=int(longest)).draw_near

    def draw_near(self, random: np.random.Generator, rows: int) -> Rows:
        """As `draw`, at log-uniform distances from `shortest` to `distance`."""
        # Log-uniform over [shortest, distance + 1), then rounded down.
        distances = self.shortest * ((self.distance + 1) / self.shortest) ** random.random((rows, 1))
        return self._draw(random, np.minimum(distances.astype(np.int64), self.distance))

    def _draw(self, random: np.random.Generator, distances: NDArray[np.int64]) -> Rows:
        rows = len(distances)
        # --- pairs and questions ---
        # Sorting random numbers yields a random order: one sort draws distinct keys, another the queried ones.
        keys = 1 + np.argsort(random.random((rows, self.symbols)), axis=1)[:, : self.pairs]
        values = self.symbols + random.integers(1, self.symbols, (rows, self.pairs), endpoint=True)
        queried = np.argsort(random.random((rows, self.pairs)), axis=1)[:, : self.queries]
        queries, answers = np.take_along_axis(keys, queried, 1), np.take_along_axis(values, queried, 1)

        # --- their positions ---
        pairs = np.stack([keys, values], 2).reshape(rows, -1)
        start = pairs.shape[1] + self.distance
        inputs = np.zeros((rows, self.length), np.int64)
        inputs[:, start::2], inputs[:, start + 1 :: 2] = queries, answers[:, :-1]
        position = np.arange(start)[None] - (self.distance - distances)
        inside = np.broadcast_to((position >= 0) & (position < pairs.shape[1]), (rows, start))
        before_queries = inputs[:, :start]
        before_queries[inside] = pairs.ravel()  # a boolean index selects left to right, so the pairs keep their order
        before_queries[~inside] = 2 * self.symbols + random.integers(
            1, self.distractors, rows * self.distance, endpoint=True
        )
        targets = np.full_like(inputs, IGNORE)
        targets[:, start::2] = answers
        return inputs, targets


@register
@dataclass(frozen=True)
class MQARConfig(GeneratedConfig):
    """MQAR (Zoology): `pairs` keys with values, then each key once more at a random position: predict its value.

    A row has N = `length` tokens of a vocabulary of V = `vocabulary`. It begins with k_1 v_1 … k_D v_D, D = `pairs`.
    The keys are different tokens of 1 … V/2 − 1, the values different tokens of V/2 … V − 1. Key j appears once more at
    token 2D + 2g_j. The gaps g_j are drawn from 0 … (N − 2D)/2 − 1 without replacement, g with probability
    ∝ (g + 1)^−.99. The target at that token is v_j; no other token has a target, and the value does
    not follow in the row. All other tokens are 0. Guessing a value is right with probability 2/V.

    Zoology's Figure 2 has V = 8,192 and (N, D) = (64, 4), (128, 8), (256, 16) and (512, 64), with
    `examples` = 100,000 training rows. 0 draws new rows for every update.

    `rewritten` = U (Zoology's forgetting MQAR): U of the keys, in random order, follow the D pairs once more, each with
    a new value, and the last value of a key is its answer. All D + U values of a row are different; in Zoology only the
    two of a key are. `counted` chooses the targets of the same rows: those of "all" keys, those of the "rewritten" keys
    alone, or the "old" values of the rewritten keys, which are then wrong answers: the accuracy on them says how often
    a model has not forgotten.

    `key_tokens` = 2 (Zoology's compositional MQAR): a key is a pair of tokens, and its value follows both. The D keys
    are all pairs of √D first and √D second tokens, in random order, so one token alone is right for one in √D. First
    tokens are of 1 … W − 1, second ones of W … 2W − 1, W = V//3, and values of 2W … V − 1. An asked key takes three
    tokens, the last of which is no part of it; the target is at its second one.
    """

    name: ClassVar[str] = "mqar"
    limits = (
        "pairs >= 1",
        "key_tokens in (1, 2)",
        "key_tokens == 1 or pairs == int(pairs**0.5) ** 2",
        "0 <= rewritten <= pairs",
        "counted == 'all' or rewritten >= 1",
        "length % 2 == 0",
        "length >= (key_tokens + 1) * (2 * pairs + rewritten)",
        "vocabulary // (key_tokens + 1) > pairs + rewritten",
    )

    length: int = 64
    pairs: int = 4
    vocabulary: int = 8192
    examples: int = 0
    rows: int = 1024  # of the validation split, and of the test split
    seed: int = 0
    rewritten: int = 0
    key_tokens: int = 1
    counted: Literal["all", "rewritten", "old"] = "all"

    @property
    def slot(self) -> int:
        """The tokens of a key and its value, and of an asked key and the token after it."""
        return self.key_tokens + 1

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        count, width = self.pairs + self.rewritten, self.vocabulary // self.slot
        context, first = self.slot * count, self.key_tokens * width  # `first`: the smallest value
        # --- keys, values, and where keys are asked ---
        keys = self._keys(random, rows, width)
        values = first + distinct(random, rows, self.vocabulary - first, count)
        weight = np.arange(1, (self.length - context) // self.slot + 1) ** (POWER - 1.0)
        # Exponential times of these rates, in increasing order, are a draw without replacement (Efraimidis 2006).
        gaps = smallest(random.exponential(size=(rows, len(weight))) / weight, self.pairs)
        # --- the pairs, and some keys with new values ---
        inputs = np.zeros((rows, self.length), np.int64)
        again = distinct(random, rows, self.pairs, self.rewritten) if self.rewritten else np.zeros((rows, 0), np.int64)
        pairs = inputs[:, :context].reshape(rows, count, self.slot)
        pairs[:, : self.pairs, :-1], pairs[:, :, -1] = keys, values
        pairs[:, self.pairs :, :-1] = np.take_along_axis(keys, again[:, :, None], 1)
        inputs[:, :context] = pairs.reshape(rows, context)
        # --- the questions, and which of them count ---
        asked = context + self.slot * gaps
        for i in range(self.key_tokens):
            np.put_along_axis(inputs, asked + i, keys[:, :, i], 1)
        answers = values[:, : self.pairs].copy()
        if self.counted != "old":
            np.put_along_axis(answers, again, values[:, self.pairs :], 1)
        if self.counted != "all":
            counts = np.zeros(answers.shape, bool)
            np.put_along_axis(counts, again, True, 1)
            answers[~counts] = IGNORE
        targets = np.full_like(inputs, IGNORE)
        np.put_along_axis(targets, asked + self.key_tokens - 1, answers, 1)
        return inputs, targets

    def _keys(self, random: np.random.Generator, rows: int, width: int) -> NDArray[np.int64]:
        """Tokens [rows, pairs, key_tokens]; of `width` first and `width` second ones."""
        if self.key_tokens == 1:
            return (1 + distinct(random, rows, width - 1, self.pairs))[:, :, None]
        side = math.isqrt(self.pairs)
        one, two = 1 + distinct(random, rows, width - 1, side), width + distinct(random, rows, width, side)
        both = distinct(random, rows, self.pairs, self.pairs)
        return np.stack([np.take_along_axis(one, both // side, 1), np.take_along_axis(two, both % side, 1)], 2)
