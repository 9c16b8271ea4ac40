"""Parallel text as sub-words: encoded block by block, cleaned by length and ratio, with what was left out counted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mnemos.lab.tasks.token_rows import TokenRows
from mnemos.types import InputError

from .parallel_text import SentencePair
from .translation_vocabulary import SubWordTokens

_BLOCK = 4096  # pairs that are encoded together


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

    def said(self, limits: Limits) -> str:
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
            raise _unscored(pair, rows, limits)
        if not shorter:
            self.cleaning.empty += 1
        elif longer > limits.longest:
            self.cleaning.long += 1
        elif not strict and limits.ratio and longer > limits.ratio * shorter:
            self.cleaning.uneven += 1
        else:
            return True
        return False


def _unscored(pair: SentencePair, rows: tuple[list[int], ...], limits: Limits) -> InputError:
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
