"""MAD's tasks (Poli et al. 2024): in-context, noisy and fuzzy recall, copying, compression and memorisation."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import SPLIT, generator
from mnemos.registry import register

from .batch import IGNORE
from .generated import Draw, GeneratedConfig, Rows

NOISE = 16  # tokens of noise
Marked = tuple[NDArray[np.int64], NDArray[np.bool_]]  # rows [B, T + 1], and which of their tokens are answers


class MADConfig(GeneratedConfig):
    """Rows that MAD trains on all next tokens, and tests on the answers alone."""

    def rows_and_answers(self, random: np.random.Generator, rows: int, training: bool) -> Marked:
        raise NotImplementedError

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        tokens, answers = self.rows_and_answers(random, rows, training=False)
        return tokens[:, :-1].copy(), np.where(answers, tokens, IGNORE)[:, 1:]

    def training(self, update: int) -> Draw:
        def draw(random: np.random.Generator, rows: int) -> Rows:
            tokens, _ = self.rows_and_answers(random, rows, training=True)
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()

        return draw


@register
@dataclass(frozen=True)
class MADRecallConfig(MADConfig):
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

    def rows_and_answers(self, random: np.random.Generator, rows: int, training: bool) -> Marked:
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
class MADFuzzyRecallConfig(MADConfig):
    """MAD's fuzzy in-context recall: keys and values are motifs of up to `motif` tokens.

    A key is a motif of different tokens of the lower half of `vocabulary` − 1 tokens, a value one of the upper half;
    the last token is padding, on the left. Lengths are uniform over 1 … `motif`, but held-out keys have `motif` tokens.
    Motifs of a length are uniform. A key's first value of the row stays its value. One pair, the probe, stands
    somewhere in the row and is its end (in the published code not of every row). Held-out targets are the tokens of the
    values of keys that were seen before; training targets are all next tokens. MAD's settings are the defaults
    (`examples` = 0: new rows for every update).
    """

    name: ClassVar[str] = "mad-fuzzy-recall"
    limits = ("motif >= 1", "vocabulary > 2 * motif", "length >= 6 * motif")

    length: int = 128
    vocabulary: int = 16
    motif: int = 3
    examples: int = 12_800
    rows: int = 1280  # of the validation split, and of the test split
    seed: int = 0

    def rows_and_answers(self, random: np.random.Generator, rows: int, training: bool) -> Marked:
        padded = np.full((rows, self.length + 1), self.vocabulary - 1, np.int64)
        answers = np.zeros(padded.shape, bool)
        for i in range(rows):
            tokens, marks = self._row(random, 1 if training else self.motif)
            padded[i, -len(tokens) :], answers[i, -len(marks) :] = tokens, marks
        return padded, answers

    def _row(self, random: np.random.Generator, shortest: int) -> tuple[list[int], list[bool]]:
        """A row, and which of its tokens are answers; keys have at least `shortest` tokens."""
        motif, end = self.motif, self.vocabulary - 1
        half = end // 2

        def draw(least: int, first: int, last: int) -> tuple[int, ...]:
            size = int(random.integers(least, motif, endpoint=True))
            return tuple((first + random.permutation(last - first)[:size]).tolist())

        probe, answer = draw(shortest, 0, half), draw(1, half, end)
        values = {probe: answer}
        last = self.length - len(probe) - len(answer) - 2 * motif  # no pair begins here or later
        probe_from = int(random.integers(last - 2 * motif, endpoint=True))
        tokens: list[int] = []
        marks: list[bool] = []
        seen: set[tuple[int, ...]] = set()
        while len(tokens) < last:
            key = probe if len(tokens) >= probe_from and probe not in seen else draw(shortest, 0, half)
            value = values.setdefault(key, draw(1, half, end))
            tokens += [*key, *value]
            marks += [False] * len(key) + [key in seen] * len(value)
            seen.add(key)
        return [*tokens, *probe, *answer], [*marks, *[False] * len(probe), *[True] * len(answer)]


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


@register
@dataclass(frozen=True)
class MADCompressionConfig(GeneratedConfig):
    """MAD's compression: read random tokens and a compression token, then write all of them from the state.

    A row begins with length − 1 tokens, uniform over `vocabulary` − 1, and the compression token, vocabulary − 1. In
    the published task it ends there, and an MLP decodes the model's output. Here the model reads that token length − 1
    times, with the tokens in order as targets: a memory that is read in segments of `length` − 1 has to hold them in
    its state. Figures are not comparable with MAD's. The other settings are MAD's.
    """

    name: ClassVar[str] = "mad-compression"
    limits = ("length >= 2", "vocabulary >= 2")

    length: int = 32
    vocabulary: int = 16
    examples: int = 12_800
    rows: int = 1280  # of the validation split, and of the test split
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.vocabulary, 2 * self.length - 2

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        n = self.length - 1
        word = random.integers(0, self.vocabulary - 1, (rows, n))
        inputs = np.concatenate([word, np.full((rows, n), self.vocabulary - 1)], 1)
        return inputs, np.concatenate([np.full((rows, n), IGNORE), word], 1)


@register
@dataclass(frozen=True)
class MADMemorisationConfig(GeneratedConfig):
    """MAD's memorisation: learn a fixed table of values by heart; no row says them.

    A row is k i k i … of `length` tokens: keys, uniform over the lower half of `vocabulary` − 1 tokens, each followed
    by the token i = vocabulary − 1, where the key's value is the target. The table gives each key a value of its own
    from the upper half; it depends on `seed` only. MAD's settings are the defaults: 256 training rows, and vocabularies
    from 256 to 8,192.
    """

    name: ClassVar[str] = "mad-memorisation"
    limits = ("length >= 2 and length % 2 == 0", "vocabulary >= 3")

    length: int = 32
    vocabulary: int = 256
    examples: int = 256
    rows: int = 1280  # of the validation split, and of the test split
    seed: int = 0

    def draw(self, random: np.random.Generator, rows: int) -> Rows:
        half, last = (self.vocabulary - 1) // 2, self.vocabulary - 1
        table = half + generator(self.seed, SPLIT).permutation(last - half)[:half]
        keys = random.integers(0, half, (rows, self.length // 2))
        inputs, targets = np.full((rows, self.length), last), np.full((rows, self.length), IGNORE)
        inputs[:, ::2], targets[:, 1::2] = keys, table[keys]
        return inputs, targets
