"""Parallel text as sub-words: cleaned by length and ratio with what was left out counted, and batched by tokens."""

from array import array
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
_NOISE = 4  # tokens
FEWEST = 8  # rows of a batch where so many rows of that length fit


class Vocabularies(NamedTuple):
    """The sub-words of the two sides; one object if the sides share them."""

    source: SubWordTokens
    target: SubWordTokens

    @property
    def joint(self) -> bool:
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
        return self.read - self.empty - self.long - self.uneven

    def describe(self, limits: Limits) -> str:
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
    """Rows of token ids, appended and then read by number. Memory: 4 bytes per token and 8 per row."""

    def __init__(self) -> None:
        self._tokens, self._ends = array("i"), array("q", [0])

    def append(self, rows: Iterable[Sequence[int]]) -> None:
        for row in rows:
            self._tokens.extend(row)
            self._ends.append(len(self._tokens))

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        ends = np.array(self._ends, np.int64)
        return ends[1:] - ends[:-1]

    def row(self, number: int) -> list[int]:
        return self._tokens[self._ends[number] : self._ends[number + 1]].tolist()


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
        rest = iter(pairs)
        while block := list(islice(rest, _BLOCK)):
            sentences = [pair.source for pair in block], [pair.target for pair in block]
            sides = [vocabulary.encode(one) for vocabulary, one in zip(vocabularies, sentences, strict=True)]
            self.cleaning.read += len(block)
            rows = enumerate(zip(*sides, strict=True))
            fitting = [i for i, pair in rows if self._fits(block[i], pair, limits, strict)]
            self.source.append(sides[0][i] for i in fitting)
            self.target.append(sides[1][i] for i in fitting)
            if texts:
                self.sources += [sentences[0][i] for i in fitting]
                self.references += [sentences[1][i] for i in fitting]

    def _fits(self, pair: SentencePair, rows: tuple[list[int], ...], limits: Limits, strict: bool) -> bool:
        """Whether a pair is within the limits; counts it if it is not."""
        shorter, longer = sorted(map(len, rows))
        if strict and not 0 < shorter <= longer <= limits.longest:
            sides = zip((pair.source_at, pair.target_at), map(len, rows), strict=True)
            (path, line), size = next((at, size) for at, size in sides if not 0 < size <= limits.longest)
            problem, more = (f"{size:,}", ", or raise data.longest") if size else ("an empty line", "")
            raise InputError(
                f"{path}: line {line:,}: expected a sentence of 1 to {limits.longest:,} sub-words, because held-out "
                f"pairs must all be scored, found {problem}; correct the line, or remove it in both languages{more}"
            )
        if not shorter:
            self.cleaning.empty += 1
        elif longer > limits.longest:
            self.cleaning.long += 1
        elif not strict and limits.ratio and longer > limits.ratio * shorter:
            self.cleaning.uneven += 1
        else:
            return True
        return False


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
        # --- where each batch starts, and the end ---
        descending, self._starts = -np.sort(-self._long), [0]
        while self._starts[-1] < len(descending):
            start = self._starts[-1]
            fits = min(rows, tokens // max(1, int(descending[start])))
            self._starts.append(min(len(descending), start + (fits - fits % FEWEST if fits > FEWEST else fits)))
        one, two, three = self._starts[-3:] if len(self._starts) > 2 else (0, 0, 0)
        if three - two < two - one:  # a last batch of fewer rows shares those of the one before it
            self._starts[-2] = (one + three + 1) // 2
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def fewest(self) -> int:
        return int(np.diff(self._starts).min())

    def batch(self, index: int, seed: int) -> NDArray[np.int64]:
        """The rows of training batch `index` of the endless order."""
        epoch, number = divmod(index, len(self))
        order, batches = self._epoch(epoch, seed)
        return self._rows(order, int(batches[number]))

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
