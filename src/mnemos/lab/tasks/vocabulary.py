"""Vocabularies: how text becomes tokens, and tokens become text. Bytes are here; words and sub-words have own files."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

Tokens = NDArray[np.integer[Any]]  # [n], each from 0 to `Vocabulary.size` − 1


class Vocabulary(ABC):
    """Base of vocabularies.

    Attributes:
        unit: what a token is, in the plural.
        size: the number of tokens.
        start: the token before a document's first token.
        unknown: the token of everything that the vocabulary lacks; None if it lacks nothing, or refuses it.
        lengths: [size] int64, the bytes of text that each token stands for. Their sum over a text's tokens is the
            number of bytes of `decode(tokens)`: the denominator of bits per byte.
    """

    unit: str
    size: int
    start: int
    unknown: int | None = None
    lengths: NDArray[np.int64]

    @abstractmethod
    def encode(self, text: bytes, where: str) -> Tokens:
        """The tokens of a text. Raises InputError, whose text begins with `where`, for text that has no tokens."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens. The start token of a vocabulary that has one of its own is left out."""

    def tail(self, newest_first: Iterable[int], size: int) -> list[int]:
        """The last tokens of a text, in order, whose own text holds any `size` bytes that end in the newest one's.

        They have twice these bytes before the newest, as a decoder may drop spaces, and 8 tokens more, as it may change
        the first ones of a text. Cost: O(size), whatever the length of the text.
        """
        found: list[int] = []
        before, spare = -2 * size, 8
        for token in newest_first:
            if before >= 0:
                spare -= 1
            if spare < 0:
                break
            before += int(self.lengths[token]) if found else 0
            found.append(token)
        return found[::-1]

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Group tokens into words: (text, number of tokens). Every token is in one group; by default each alone."""
        return [(self.decode([token]).decode("utf-8", "replace"), 1) for token in tokens]


class Bytes(Vocabulary):
    """The 256 bytes. The start token is byte 0, which does not occur in text."""

    unit, size, start = "bytes", 256, 0
    lengths = np.ones(256, np.int64)

    def encode(self, text: bytes, where: str) -> Tokens:
        """The bytes themselves, as a view."""
        return np.frombuffer(text, np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The bytes themselves, also byte 0, which a model may draw."""
        return bytes(tokens)

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Words, runs of white space, and other characters.

        A character of several bytes is part of a word. The start token is shown as ␀, and a byte that is not valid
        UTF-8 as �.
        """
        found = (match.group() for match in _WORD.finditer(bytes(tokens)))
        return [(part.replace(b"\0", "␀".encode()).decode("utf-8", "replace"), len(part)) for part in found]


_WORD = re.compile(rb"[\w\x80-\xff]+|\s+|[^\w\s\x80-\xff]")


def as_characters(text: bytes, where: str) -> str:
    """UTF-8 text, without the byte-order mark that some editors put before it.

    Raises InputError, which begins with `where` and names the offset of the first other byte.
    """
    try:
        return text.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: offset {error.start}: expected UTF-8 text, found the byte 0x{text[error.start]:02x}; convert "
            "the file to UTF-8, or use data.tokens bytes"
        ) from None
