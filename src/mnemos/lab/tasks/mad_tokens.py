"""MAD's other tasks (Poli et al. 2024): copying, selective copying, compression and memorisation."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mnemos.generators import SPLIT, generator
from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE
from .generated import GeneratedConfig, GeneratedTask, Rows


@register
@dataclass(frozen=True)
class MADCopyingConfig(GeneratedConfig):
    """MAD's copying: read `tokens` tokens among blanks, and after the copy token write them in order.

    A row has `length` tokens: the tokens to copy, uniform over `vocabulary` − 2, and blanks; the copy token; `tokens`
    blanks, at which the targets are the tokens. selective=True: each blank of the first part stands before one of the
    tokens, uniform. selective=False: all blanks follow the tokens. The blank is vocabulary − 2, the copy token
    vocabulary − 1. MAD's settings are the defaults (`examples` = 0: new rows for every update). The validation and the
    test split have `rows` sequences each, drawn from `seed`.
    """

    name: ClassVar[str] = "mad-copying"

    length: int = 256
    vocabulary: int = 16
    tokens: int = 16
    selective: bool = True
    examples: int = 12_800
    rows: int = 1280
    seed: int = 0

    def build(self) -> GeneratedTask:
        """The task: T = `length`, `vocabulary` tokens. Raises InputError for a setting out of range."""
        if self.tokens < 1 or self.length < 2 * self.tokens + 1 or self.vocabulary < 3:
            raise InputError(
                "mad-copying: expected data.tokens >= 1, data.length > 2·tokens and data.vocabulary >= 3, found "
                f"{self.tokens}, {self.length} and {self.vocabulary}; change these"
            )
        return GeneratedTask(self.draw, self.vocabulary, self.length, self.rows, self.seed, None, self.examples)

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        """Draw inputs and targets, [rows, length] each."""
        n, first = self.tokens, self.length - self.tokens - 1
        word = random.integers(0, self.vocabulary - 2, (rows, n))
        place = np.broadcast_to(np.arange(n), (rows, n))
        if self.selective:
            place = place + random.multinomial(first - n, np.full(n, 1 / n), rows).cumsum(1)
        inputs = np.full((rows, self.length), self.vocabulary - 2)
        np.put_along_axis(inputs, place, word, 1)
        inputs[:, first] = self.vocabulary - 1
        targets = np.full_like(inputs, IGNORE)
        targets[:, first + 1 :] = word
        return inputs, targets


@register
@dataclass(frozen=True)
class MADCompressionConfig(GeneratedConfig):
    """MAD's compression: read random tokens and a compression token, then write all of them from the state.

    The first `length` tokens of a row are those of the published task: length − 1 tokens, uniform over
    `vocabulary` − 1, and the compression token, vocabulary − 1. There a row ends, and an MLP decodes the model's output
    at this token. Here the model writes the tokens itself: it reads the compression token length − 1 times, with the
    tokens in order as targets. A memory that is read in segments of `length` − 1 then has to hold them in its state;
    attention reads them. Figures are not comparable with MAD's. The other settings are MAD's.
    """

    name: ClassVar[str] = "mad-compression"

    length: int = 32
    vocabulary: int = 16
    examples: int = 12_800
    rows: int = 1280
    seed: int = 0

    def build(self) -> GeneratedTask:
        """The task: T = 2·length − 2, `vocabulary` tokens. Raises InputError for a setting out of range."""
        if self.length < 2 or self.vocabulary < 2:
            raise InputError(
                f"mad-compression: expected data.length >= 2 and data.vocabulary >= 2, found {self.length} and "
                f"{self.vocabulary}; raise them"
            )
        size = 2 * self.length - 2
        return GeneratedTask(self.draw, self.vocabulary, size, self.rows, self.seed, None, self.examples)

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        """Draw inputs and targets, [rows, 2·length − 2] each."""
        n = self.length - 1
        word = random.integers(0, self.vocabulary - 1, (rows, n))
        inputs = np.concatenate([word, np.full((rows, n), self.vocabulary - 1)], 1)
        return inputs, np.concatenate([np.full((rows, n), IGNORE), word], 1)


@register
@dataclass(frozen=True)
class MADMemorisationConfig(GeneratedConfig):
    """MAD's memorisation: learn a fixed table of values by heart; no row tells them.

    A row is k i k i … of `length` tokens: keys, uniform over the lower half of `vocabulary` − 1 tokens, each followed
    by the token i = vocabulary − 1, where the key's value is the target. The table gives each key a value of its own
    from the upper half; it depends on `seed` only. MAD's settings are the defaults: 256 training rows, and vocabularies
    from 256 to 8,192. The validation and the test split have `rows` sequences each, drawn from `seed`.
    """

    name: ClassVar[str] = "mad-memorisation"

    length: int = 32
    vocabulary: int = 256
    examples: int = 256
    rows: int = 1280
    seed: int = 0

    def build(self) -> GeneratedTask:
        """The task: T = `length`, `vocabulary` tokens. Raises InputError for a setting out of range."""
        if self.length < 2 or self.length % 2 or self.vocabulary < 3:
            raise InputError(
                f"mad-memorisation: expected an even data.length >= 2 and data.vocabulary >= 3, found {self.length} "
                f"and {self.vocabulary}; change these"
            )
        return GeneratedTask(self.draw, self.vocabulary, self.length, self.rows, self.seed, None, self.examples)

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        """Draw inputs and targets, [rows, length] each."""
        half, last = (self.vocabulary - 1) // 2, self.vocabulary - 1
        table = half + generator(self.seed, SPLIT).permutation(last - half)[:half]
        keys = random.integers(0, half, (rows, self.length // 2))
        inputs, targets = np.full((rows, self.length), last), np.full((rows, self.length), IGNORE)
        inputs[:, ::2], targets[:, 1::2] = keys, table[keys]
        return inputs, targets
