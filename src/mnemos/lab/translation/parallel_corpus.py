"""Parallel text as sub-words: cleaned by length and ratio with what was left out counted, and batched by tokens.

Text is encoded block by block. Rows of tokens are in memory while they are few, and in a temporary file when they are
many.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import ORDER, generator
from mnemos.types import InputError

from .parallel_text import SentencePair
from .translation_vocabulary import SubWordTokens

_BLOCK = 4096  # pairs that are encoded together
IN_MEMORY = 2**26  # bytes of tokens that are kept in memory
_NOISE = 4  # tokens
FEWEST = 8  # rows of a batch where so many rows of that length fit


class Vocabularies(NamedTuple):
    """The sub-words of the two sides; one object if the sides share them."""

    source: SubWordTokens
    target: SubWordTokens

    @property
    def joint(self) -> bool:
        """Whether both sides have the same sub-words."""
        return self.source.content == self.target.content


class Limits(NamedTuple):
    """Which pairs are trained on: at most `longest` sub-words per side, at most `ratio` times as many as the other."""

    longest: int
    ratio: float  # 0: any


@dataclass
class Cleaning:
    """How many pairs were read, and how many were left out, by reason."""

    read: int = 0
    empty: int = 0
    long: int = 0
    uneven: int = 0

    @property
    def kept(self) -> int:
        """The pairs that are trained on."""
        return self.read - self.empty - self.long - self.uneven

    def describe(self, limits: Limits) -> str:
        """The counts as a line of text."""
        if self.kept == self.read:
            return f"{self.read:,} pairs, none left out"
        reasons = (
            (self.empty, "with an empty side"),
            (self.long, f"with more than {limits.longest:,} sub-words"),
            (self.uneven, f"with more than {limits.ratio:g} times as many sub-words on one side"),
        )
        left = ", ".join(f"{count:,} {what}" for count, what in reasons if count)
        return f"{self.kept:,} of {self.read:,} pairs; left out: {left}"


class TokenRows:
    """Rows of token ids, appended and then read by number.

    Beyond `in_memory` bytes they are in a temporary file, which is memory-mapped and ends with the process, so that a
    data set of any size needs 8 bytes of memory per row. Cost of reading a row: O(its length).
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115
        self._in_memory, self._written = in_memory, 0
        self._ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._tokens: NDArray[np.int32] | None = None
        self._bounds = np.zeros(1, np.int64)

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Add rows after those that are there."""
        if rows:
            flat = np.fromiter((token for row in rows for token in row), np.int32)
            self._file.write(flat.tobytes())
            self._ends.append(self._ends[-1][-1] + np.cumsum([len(row) for row in rows]))
            self._written += flat.nbytes
            self._tokens = None

    def __len__(self) -> int:
        return sum(map(len, self._ends)) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        self._finish()
        return np.diff(self._bounds)

    def row(self, number: int) -> NDArray[np.int32]:
        """The tokens of a row."""
        if self._tokens is None:
            self._finish()
        assert self._tokens is not None
        return self._tokens[self._bounds[number] : self._bounds[number + 1]]

    def _finish(self) -> None:
        if self._tokens is not None:
            return
        self._ends = [np.concatenate(self._ends)]
        self._bounds = self._ends[0]
        self._file.flush()
        if self._written > self._in_memory:
            self._tokens = np.memmap(self._file, np.int32, "r", shape=(self._written // 4,))
        else:
            self._file.seek(0)
            self._tokens = np.frombuffer(self._file.read(), np.int32)
            self._file.seek(0, 2)


@dataclass
class Corpus:
    """A split: the sub-words of both sides, without special tokens, and of held-out splits the sentences."""

    source: TokenRows = field(default_factory=TokenRows)
    target: TokenRows = field(default_factory=TokenRows)
    cleaning: Cleaning = field(default_factory=Cleaning)
    sources: list[str] = field(default_factory=list)
    references: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each pair as the model reads them, [N, 2]: sub-words and one special token."""
        return np.stack([self.source.lengths, self.target.lengths], 1).astype(np.int32) + 1

    def add(
        self, pairs: Iterable[SentencePair], vocabularies: Vocabularies, limits: Limits, texts: bool, strict: bool
    ) -> None:
        """Encode pairs and add those within the limits.

        texts: keep the sentences too. strict: a pair that is empty or too long raises InputError with its place, and no
        ratio is too great, because held-out pairs must all be scored. Memory: 8 bytes per pair and side.
        """
        for block in _blocks(pairs):
            texts_of = [pair.source for pair in block], [pair.target for pair in block]
            sides = [vocabulary.encode(one) for vocabulary, one in zip(vocabularies, texts_of, strict=True)]
            self.cleaning.read += len(block)
            kept = [i for i, rows in enumerate(zip(*sides, strict=True)) if self._fits(block[i], rows, limits, strict)]
            self.source.append([sides[0][i] for i in kept])
            self.target.append([sides[1][i] for i in kept])
            if texts:
                self.sources += [texts_of[0][i] for i in kept]
                self.references += [texts_of[1][i] for i in kept]

    def _fits(self, pair: SentencePair, rows: tuple[list[int], ...], limits: Limits, strict: bool) -> bool:
        """Whether a pair is within the limits; counts it if it is not."""
        shorter, longer = sorted(map(len, rows))
        if strict and not 0 < shorter <= longer <= limits.longest:
            raise _cannot_be_scored(pair, rows, limits)
        if not shorter:
            self.cleaning.empty += 1
        elif longer > limits.longest:
            self.cleaning.long += 1
        elif not strict and limits.ratio and longer > limits.ratio * shorter:
            self.cleaning.uneven += 1
        else:
            return True
        return False


def _cannot_be_scored(pair: SentencePair, rows: tuple[list[int], ...], limits: Limits) -> InputError:
    """The error of a held-out pair with an empty side, or with one that is too long, at the place of that side."""
    places = zip((pair.source_place, pair.target_place), map(len, rows), strict=True)
    (path, line), found = next((place, count) for place, count in places if not 0 < count <= limits.longest)
    problem, more = (f"{found:,}", ", or raise data.longest") if found else ("an empty line", "")
    return InputError(
        f"{path}: line {line:,}: expected a sentence of 1 to {limits.longest:,} sub-words, because held-out pairs must "
        f"all be scored, found {problem}; correct the line, or remove it in both languages{more}"
    )


def _blocks(pairs: Iterable[SentencePair]) -> Iterator[list[SentencePair]]:
    rest = iter(pairs)
    while block := list(islice(rest, _BLOCK)):
        yield block


class TokenBatches:
    """Which rows make batch i, as a pure function of (i, seed): every row once per epoch.

    lengths: [N, 2], tokens of source and target. A batch has as many rows as fit into `tokens` when each side is padded
    to the longest sentence of the batch on either side, and at most `rows`: fairseq's max-tokens and batch-size. The
    rows are sorted by their longer side, then by the other, to which each epoch adds up to 4 tokens at random, so that
    other rows share a batch. The sorted longer sides are the same every epoch, so the batches are cut at the same
    places every epoch; then they are shuffled.
    Cost: O(N log N) once per epoch, O(rows) per batch. Memory: 16 bytes per row. Raises InputError for a sentence that
    does not fit into a batch.
    """

    def __init__(self, lengths: NDArray[np.int32], tokens: int, rows: int) -> None:
        if not len(lengths):
            raise InputError("expected at least one pair of sentences to train on, found none; give more text")
        self._long, self._short = lengths.max(1), lengths.min(1)
        longest = int(self._long.max())
        if longest > tokens:
            raise InputError(
                f"data.batch_tokens: expected at least {longest:,}, the longest sentence, found {tokens:,}; raise it, "
                "or lower data.longest"
            )
        self._starts = self._cut(-np.sort(-self._long), tokens, rows)
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    @staticmethod
    def _cut(descending: NDArray[np.int32], tokens: int, rows: int) -> list[int]:
        """Where each batch starts, and the end. A last batch of fewer rows shares those of the one before it."""
        starts, place = [0], 0
        while place < len(descending):
            fits = min(rows, tokens // max(1, int(descending[place])))
            place = min(len(descending), place + (fits - fits % FEWEST if fits > FEWEST else fits))
            starts.append(place)
        if len(starts) > 2 and starts[-1] - starts[-2] < starts[-2] - starts[-3]:
            starts[-2] = (starts[-3] + starts[-1] + 1) // 2
        return starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def fewest(self) -> int:
        """The rows of the smallest batch."""
        return int(np.diff(self._starts).min())

    def batch(self, index: int, seed: int) -> NDArray[np.int64]:
        """The rows of training batch `index` of the endless order."""
        epoch, place = divmod(index, len(self))
        order, batches = self._epoch(epoch, seed)
        return self._rows(order, int(batches[place]))

    def once(self) -> Iterator[NDArray[np.int64]]:
        """All rows once, the longest first; equal ones in their own order."""
        order = np.lexsort((-self._short, -self._long))
        return (self._rows(order, i) for i in range(len(self)))

    def _rows(self, order: NDArray[np.int64], number: int) -> NDArray[np.int64]:
        return order[self._starts[number] : self._starts[number + 1]]

    def _shuffle(self, epoch: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(all rows, sorted by length; the order of the batches) in an epoch."""
        random = generator(seed, ORDER, epoch)
        order = np.lexsort((-self._short - _NOISE * random.random(len(self._short)), -self._long))
        return order, random.permutation(len(self))
