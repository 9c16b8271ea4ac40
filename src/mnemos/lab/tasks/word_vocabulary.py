"""Vocabularies of words: white-space separated tokens, as the token files of WikiText hold them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mnemos.types import InputError

from .files import read_bytes
from .vocabulary import Tokens, Vocabulary, as_characters

END, UNKNOWN = "<eos>", "<unk>"  # the end of a line, and a word that the vocabulary lacks


class Words(Vocabulary):
    """Words in the order of a list: token i is words[i]. Adaptive softmax needs the most frequent words first.

    A line end is the word <eos>, which is also the start token. A word that the list lacks is <unk>. Decoding writes
    a space after each word and a line feed for <eos>, so a word counts its UTF-8 bytes and one, and <eos> one. A file
    with other white space has other bytes: WikiText has one space more at the beginning of each line.
    source: what the words are from, for errors. Raises InputError for a list with a word twice or without <eos>.
    """

    unit = "words"

    def __init__(self, words: Sequence[str], source: str = "the vocabulary") -> None:
        self.list, self.size, self._source = tuple(words), len(words), source
        self._ids = {word: i for i, word in enumerate(words)}
        if len(self._ids) < self.size:
            twice = Counter(words).most_common(1)[0][0]
            raise InputError(f"{source}: expected each word once, found {twice!r} again; remove one")
        if END not in self._ids:
            raise InputError(f"{source}: expected the word {END}, which stands for a line end, found none; add it")
        self.start, self.unknown = self._ids[END], self._ids.get(UNKNOWN)
        self.lengths = np.array([len(word.encode()) + 1 for word in words], np.int64)
        self.lengths[self.start] = 1

    @classmethod
    def count(cls, texts: Iterable[tuple[str, bytes]], most: int = 0) -> "Words":
        """The words of (name, text) pairs, the most frequent first, those of equal frequency in alphabetical order.

        most: the size of the vocabulary, with <eos> and <unk>, which are always in it; 0: every word.
        """
        counts: Counter[str] = Counter()
        for name, text in texts:
            characters = as_characters(text, name)
            counts.update(characters.split())
            counts[END] += characters.count("\n")
        counts[UNKNOWN] += 0
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        if most:
            kept = [word for word in ranked if word not in (END, UNKNOWN)][: most - 2]
            ranked = sorted([*kept, END, UNKNOWN], key=lambda word: (-counts[word], word))
        return cls(ranked)

    @classmethod
    def read(cls, path: str | Path) -> "Words":
        """The words of a file, one per line. Raises InputError for a file that cannot be read, and as the class."""
        lines = as_characters(read_bytes(path), str(path)).splitlines()
        for number, line in enumerate(lines, start=1):
            if len(line.split()) != 1:
                raise InputError(f"{path}: line {number}: expected one word, found {line!r:.60}; correct the line")
        return cls([line.strip() for line in lines], str(path))

    def encode(self, text: bytes, where: str) -> Tokens:
        """The words of each line, and <eos> for each line feed: a last line without one has no <eos>."""
        first, *rest = as_characters(text, where).split("\n")
        words = first.split()
        for line in rest:
            words.append(END)
            words += line.split()
        if self.unknown is None:
            self._check(words, where)
        missing, ids = self.unknown, self._ids
        return np.fromiter((ids.get(word, missing) for word in words), np.int32, len(words))

    def _check(self, words: Sequence[str], where: str) -> None:
        lacking = next((i for i, word in enumerate(words) if word not in self._ids), None)
        if lacking is not None:
            raise InputError(
                f"{where}: word {lacking + 1:,}: expected a word of {self._source}, which has no {UNKNOWN}, found "
                f"{words[lacking]!r:.60}; use the vocabulary of this text, or add {UNKNOWN} to it"
            )

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Each word with a space after it; <eos> is a line feed."""
        return "".join("\n" if token == self.start else f"{self.list[token]} " for token in tokens).encode()

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Each token is a word."""
        return [(self.list[token], 1) for token in tokens]
