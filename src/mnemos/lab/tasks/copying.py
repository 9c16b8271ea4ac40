"""The copy task of "Transformers are RNNs" (Figure 2): read a word of symbols, then repeat it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mnemos.registry import register

from .batch import IGNORE
from .generated import GeneratedConfig, GeneratedTask, Rows


@register
@dataclass(frozen=True)
class CopyConfig(GeneratedConfig):
    """Sequences [w, 0, w, 0, 0, …] of `length` tokens. The word w has n symbols, uniform over 1 … `symbols`.

    n is uniform between length/4 and length/2 − 1, the longest word that fits twice (32 to 63 for length 128). The loss
    counts only the n symbols of the second w. The validation and the test split have `rows` sequences each, drawn from
    `seed`.
    """

    name: ClassVar[str] = "copy"

    length: int = 128
    symbols: int = 10
    rows: int = 1024
    seed: int = 0

    def build(self) -> GeneratedTask:
        self.require(self.length >= 4 and self.symbols >= 1, "length >= 4 and symbols >= 1", "length", "symbols")
        return self.task(self.symbols + 1, self.length)

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        longest = self.length // 2 - 1
        n = random.integers(self.length // 4, longest, (rows, 1), endpoint=True)
        word = random.integers(1, self.symbols, (rows, longest), endpoint=True)
        place = np.arange(self.length)[None]
        second = (place > n) & (place <= 2 * n)
        inputs = np.zeros((rows, self.length), np.int64)
        # A boolean index selects row by row, left to right, so the symbols keep their order in both copies.
        inputs[place < n] = inputs[second] = word[place[:, :longest] < n]
        targets = np.full_like(inputs, IGNORE)
        targets[:, :-1] = np.where(second[:, 1:], inputs[:, 1:], IGNORE)
        return inputs, targets
