"""Associative retrieval with and without rewriting (Rodkin et al. 2024, "Associative Recurrent Memory Transformer")."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from mnemos.generators import ORDER, generator
from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE
from .generated import Draw, GeneratedConfig, GeneratedTask, Rows, distinct

SYMBOLS = 16  # the digits of keys and values
SEPARATOR, QUESTION, END = SYMBOLS, SYMBOLS + 1, SYMBOLS + 2


@register
@dataclass(frozen=True)
class AssociativeRetrievalConfig(GeneratedConfig):
    """Associative retrieval (ARMT): one pair of a key and a value per segment, then a question for one value.

    A row has `pairs` segments "key SEPARATOR value END", and then "key QUESTION" and the value, whose digits are the
    targets. Keys have `key_digits` and values `value_digits` of 16 symbols, 0 … 15; the other three tokens are 16, 17
    and 18. A segment has key_digits + value_digits + 2 tokens (`segment`), which is the `segment_length` of memories
    that read one pair at a time.

    rewrite=False: the keys of a row are different, and the question is about a uniform one. rewrite=True: keys are
    uniform and may repeat; the question is about a uniform one of the different keys, and the answer is its last value.
    Guessing a digit is right with probability 1/16. The paper has 1 to 200 pairs: keys of one digit up to 10 pairs, of
    two up to 40, and of three up to 200.

    vary: a training batch has a number of pairs that is uniform over 1 … `pairs`, as in the paper. The validation and
    the test split have `rows` sequences of `pairs` pairs each, drawn from `seed`.
    """

    name: ClassVar[str] = "associative-retrieval"

    pairs: int = 20
    key_digits: int = 2
    value_digits: int = 1
    rewrite: bool = False
    vary: bool = True
    rows: int = 1024
    seed: int = 0

    @property
    def segment(self) -> int:
        """The number of tokens of a pair."""
        return self.key_digits + self.value_digits + 2

    @property
    def length(self) -> int:
        """The length T of a row: the pairs, and the question without the last digit of its answer."""
        return self.pairs * self.segment + self.key_digits + self.value_digits

    def build(self) -> GeneratedTask:
        """The task: 19 tokens, T = pairs·segment + key_digits + value_digits. Raises InputError for other settings."""
        if not 1 <= self.key_digits <= 5 or self.value_digits < 1:
            raise InputError(
                "associative-retrieval: expected 1 to 5 data.key_digits and at least 1 data.value_digits, found "
                f"{self.key_digits} and {self.value_digits}; change these"
            )
        if self.pairs < 1 or (not self.rewrite and self.pairs > SYMBOLS**self.key_digits):
            raise InputError(
                f"data.pairs: expected at least 1 and, without rewriting, at most 16^key_digits = "
                f"{SYMBOLS**self.key_digits}, found {self.pairs}; change pairs or key_digits"
            )
        train = self.varied if self.vary else None
        return GeneratedTask(self.draw, SYMBOLS + 3, self.length, self.rows, self.seed, train)

    def varied(self, update: int) -> Draw:
        """The function that draws the rows of an update, with 1 … `pairs` pairs."""
        return replace(self, pairs=int(generator(self.seed, ORDER, update).integers(1, self.pairs, endpoint=True))).draw

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        """Draw inputs and targets, [rows, length] each."""
        n, k, width = self.pairs, self.key_digits, self.segment
        keys = random.integers(0, SYMBOLS**k, (rows, n)) if self.rewrite else distinct(random, rows, SYMBOLS**k, n)
        values = random.integers(0, SYMBOLS, (rows, n, self.value_digits))
        # A key is asked at its last pair; without rewriting, every pair is the last one of its key.
        later = np.triu(np.ones((n, n), bool), 1)
        last = ~((keys[:, :, None] == keys[:, None, :]) & later).any(2)
        asked = np.where(last, random.random((rows, n)), -1).argmax(1)

        told = np.empty((rows, n, width), np.int64)
        told[:, :, :k] = keys[:, :, None] // SYMBOLS ** np.arange(k)[::-1] % SYMBOLS
        told[:, :, k], told[:, :, k + 1 : -1], told[:, :, -1] = SEPARATOR, values, END
        row = np.arange(rows)
        answer = values[row, asked]
        question = np.concatenate([told[row, asked, :k], np.full((rows, 1), QUESTION), answer[:, :-1]], 1)
        inputs = np.concatenate([told.reshape(rows, n * width), question], 1)
        targets = np.full_like(inputs, IGNORE)
        targets[:, inputs.shape[1] - self.value_digits :] = answer
        return inputs, targets
