"""Multi-query associative recall (MQAR; Arora et al. 2024, "Zoology"), exact to its published definition."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mnemos.generators import ORDER, generator
from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE
from .generated import Draw, GeneratedConfig, GeneratedTask, Rows, distinct, smallest

# (N, D, rows) of the training set of Arora et al. 2024 ("Based", Figure 2): D pairs in N tokens.
MIXTURE = ((64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000))


@register
@dataclass(frozen=True)
class MQARConfig(GeneratedConfig):
    """MQAR (Zoology): `pairs` keys with values, then each key once more at a random place: predict its value.

    A row has N = `length` tokens of a vocabulary of V = `vocabulary`. It begins with k_1 v_1 … k_D v_D, D = `pairs`.
    The keys are different tokens of 1 … V/2 − 1, the values different tokens of V/2 … V − 1. Key j appears once more at
    token 2D + 2g_j. The gaps g_j are drawn from 0 … (N − 2D)/2 − 1 without replacement, g with probability
    ∝ a·(g + 1)^(a − 1), a = `power`. The target at that token is v_j; no other token has a target, and the value does
    not follow in the row. All other tokens are 0, or uniform over the vocabulary with `noise`. Guessing a value is
    right with probability 2/V.

    Zoology's Figure 2 has V = 8,192, a = 0.01, no noise, and (N, D) = (64, 4), (128, 8), (256, 16) and (512, 64), with
    `examples` = 100,000 training rows. 0 draws new rows for every update. `mixed`: the rows of a training batch have N
    and D of `MIXTURE`, as in the protocol of Based: training on lengths up to 256, tests on lengths up to 1,024, all
    with `noise`. Batches of a kind are as frequent as its rows are there. The validation and the test split have `rows`
    sequences each of `length` and `pairs`, drawn from `seed`.
    """

    name: ClassVar[str] = "mqar"

    length: int = 64
    pairs: int = 4
    vocabulary: int = 8192
    power: float = 0.01
    noise: bool = False
    mixed: bool = False
    examples: int = 0
    rows: int = 1024
    seed: int = 0

    def build(self) -> GeneratedTask:
        """The task: T = `length`, vocabulary size `vocabulary`. Raises InputError for a setting out of range."""
        most = max(length for length, _, _ in MIXTURE) if self.mixed else 0
        for length, pairs in [(self.length, self.pairs), *(one[:2] for one in MIXTURE if self.mixed)]:
            if length % 2 or not 1 <= pairs <= length // 4 or pairs > self.vocabulary // 2 - 1:
                raise InputError(
                    f"mqar: expected an even data.length of at least 4·pairs, and at least 2·pairs + 2 tokens in "
                    f"data.vocabulary, found length {length}, pairs {pairs}, vocabulary {self.vocabulary}; change one"
                )
        if not 0 < self.power <= 1:
            raise InputError(f"data.power: expected above 0 and at most 1, found {self.power}; use 0.01")
        if self.mixed and self.examples:
            raise InputError(f"data.examples: expected 0 with data.mixed, found {self.examples}; use 0")
        train = self.mixture if self.mixed else None
        sizes = (self.vocabulary, max(self.length, most), self.rows, self.seed)
        return GeneratedTask(self.draw, *sizes, train, self.examples)

    def mixture(self, update: int) -> Draw:
        """The function that draws the rows of an update, whose N and D are chosen at random from `MIXTURE`."""
        shares = np.array([rows for _, _, rows in MIXTURE])
        chosen = generator(self.seed, ORDER, update).choice(len(MIXTURE), p=shares / shares.sum())
        return replace(self, length=MIXTURE[chosen][0], pairs=MIXTURE[chosen][1]).draw

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        """Draw inputs and targets, [rows, length] each. Cost: O(rows·length·log length), or that of `distinct`."""
        context, half = 2 * self.pairs, self.vocabulary // 2
        keys = 1 + distinct(random, rows, half - 1, self.pairs)
        values = half + distinct(random, rows, self.vocabulary - half, self.pairs)
        weight = np.arange(1, (self.length - context) // 2 + 1) ** (self.power - 1.0)
        # Exponential times of these rates, in increasing order, are a draw without replacement (Efraimidis 2006).
        gaps = smallest(random.exponential(size=(rows, len(weight))) / weight, self.pairs)
        if self.noise:
            inputs = random.integers(0, self.vocabulary, (rows, self.length))
        else:
            inputs = np.zeros((rows, self.length), np.int64)
        inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
        asked = context + 2 * gaps
        np.put_along_axis(inputs, asked, keys, 1)
        targets = np.full_like(inputs, IGNORE)
        np.put_along_axis(targets, asked, values, 1)
        return inputs, targets
