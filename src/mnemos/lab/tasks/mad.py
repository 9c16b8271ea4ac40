"""Two of MAD's tasks (Poli et al. 2024): in-context recall, also among noise, and copying."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.registry import register

from .batch import IGNORE
from .generated import Draw, GeneratedConfig, Rows

NOISE = 16  # tokens of noise


@register
@dataclass(frozen=True)
class MADRecallConfig(GeneratedConfig):
    """MAD's in-context recall: pairs of a key and a value; predict the value of each key that was seen before.

    A row of N = `length` tokens is N/2 pairs without the last value. Keys are uniform over the lower half of
    `vocabulary` tokens, values over the upper half. A key's first value of the row stays its value. The key of the last
    pair is uniform over those before. Held-out targets are the values of keys that were seen before; training targets
    are all next tokens, as in the published task. `noise` > 0 is MAD's noisy recall: each pair but a random one and the
    last is replaced by two of 16 further tokens with this probability.

    MAD's settings: vocabulary 16, length 128, `examples` = 12,800 training rows (0: new rows for every update); noisy:
    noise .2.
    """

    name: ClassVar[str] = "mad-recall"
    limits = (
        "length >= 4 and length % 2 == 0",
        "vocabulary >= 2 and vocabulary % 2 == 0",
        "0 <= noise < 1",
    )

    length: int = 128
    vocabulary: int = 16
    noise: float = 0.0
    examples: int = 12_800
    rows: int = 1280  # of the validation split, and of the test split
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.vocabulary + (NOISE if self.noise else 0), self.length - 1

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        tokens, answers = self._rows_and_answers(random, rows)
        return tokens[:, :-1].copy(), np.where(answers, tokens, IGNORE)[:, 1:]

    def training(self, update: int) -> Draw:
        def draw(random: np.random.Generator, rows: int) -> Rows:
            tokens, _ = self._rows_and_answers(random, rows)
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()

        return draw

    def _rows_and_answers(self, random: np.random.Generator, rows: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Rows [B, T + 1], and which of their tokens are answers."""
        n, half = self.length // 2, self.vocabulary // 2
        keys = random.integers(0, half, (rows, n))
        table = half + random.integers(0, half, (rows, half))  # each key's value in this row
        hidden = np.zeros((rows, n), bool)
        if self.noise:
            hidden = random.random((rows, n)) < self.noise
            hidden[np.arange(rows), random.integers(0, n - 1, rows)] = False
            hidden[:, -1] = False
        # The last key is one of those before: uniform over the different ones.
        seen = np.zeros((rows, half), bool)
        row, pair = (~hidden[:, :-1]).nonzero()
        seen[row, keys[row, pair]] = True
        keys[:, -1] = np.where(seen, random.random((rows, half)), -1).argmax(1)
        # A value is an answer if its key stands, not hidden by noise, earlier in the row.
        same = (keys[:, :, None] == keys[:, None, :]) & np.tril(np.ones((n, n), bool), -1)
        answers = np.zeros((rows, n, 2), bool)
        answers[:, :, 1] = (same & ~hidden[:, None, :]).any(2) & ~hidden
        pairs = np.stack([keys, np.take_along_axis(table, keys, 1)], 2)
        pairs[hidden] = self.vocabulary + random.integers(0, NOISE, (int(hidden.sum()), 2))
        return pairs.reshape(rows, -1), answers.reshape(rows, -1)


@register
@dataclass(frozen=True)
class MADCopyingConfig(GeneratedConfig):
    """MAD's copying: read `tokens` tokens among blanks, and after the copy token write them in order.

    A row has `length` tokens: the tokens to copy, uniform over `vocabulary` − 2, and blanks; the copy token; `tokens`
    blanks, at which the targets are the tokens. Each blank of the first part stands before one of the tokens, uniform
    ("selective" copying). The blank is vocabulary − 2, the copy token
    vocabulary − 1. MAD's settings are the defaults (`examples` = 0: new rows for every update).
    """

    name: ClassVar[str] = "mad-copying"
    limits = ("tokens >= 1", "length > 2 * tokens", "vocabulary >= 3")

    length: int = 256
    vocabulary: int = 16
    tokens: int = 16
    examples: int = 12_800
    rows: int = 1280  # of the validation split, and of the test split
    seed: int = 0

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        n, first = self.tokens, self.length - self.tokens - 1
        word = random.integers(0, self.vocabulary - 2, (rows, n))
        positions = np.arange(n) + random.multinomial(first - n, np.full(n, 1 / n), rows).cumsum(1)
        inputs = np.full((rows, self.length), self.vocabulary - 2)
        np.put_along_axis(inputs, positions, word, 1)
        inputs[:, first] = self.vocabulary - 1
        targets = np.full_like(inputs, IGNORE)
        targets[:, first + 1 :] = word
        return inputs, targets
