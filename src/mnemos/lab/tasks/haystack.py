"""Background text of generated questions, as bytes: a repeated sentence, or books."""

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .task import Split
from .text import split_documents
from .text_files import find_text

# The haystack of RULER's first task.
SENTENCE = b"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
HELD_OUT = 0.1  # of the documents, per held-out split
_ENDS = (b". ", b"! ", b"? ")
_LONGEST = 1_000  # bytes of a sentence, on average; text with longer ones has no places for what is hidden in it


@dataclass(frozen=True)
class Haystack:
    """Text [n] bytes with one space between words, and the places at which its sentences begin, sorted."""

    text: bytes
    starts: list[int]

    def cut(self, random: np.random.Generator, length: int) -> tuple[bytes, list[int]]:
        """`length` bytes from a random sentence on, and the places in them at which a sentence begins.

        Raises InputError if the text is shorter.
        """
        last = bisect_left(self.starts, len(self.text) - length + 1)
        if not last:
            found = f"{len(self.text):,}; add text, or lower data.length"
            raise InputError(f"data.path: expected at least {length:,} bytes of text in each split, found {found}")
        begin = self.starts[int(random.integers(last))]
        inside = self.starts[bisect_left(self.starts, begin) : bisect_left(self.starts, begin + length)]
        return self.text[begin : begin + length], [place - begin for place in inside]


def repeated(length: int) -> tuple[bytes, list[int]]:
    """The last `length` bytes of a text that repeats `SENTENCE`, and the places in them where lines begin or end."""
    count = -(-length // len(SENTENCE))
    places = range(length - (length // len(SENTENCE)) * len(SENTENCE), length + 1, len(SENTENCE))
    return (SENTENCE * count)[len(SENTENCE) * count - length :], list(places)


def files(path: str | None) -> list[Path]:
    """The files of the books."""
    return find_text(path).read


def books(path: str | None) -> dict[Split, Haystack]:
    """The text of a file or folder by split (`TextConfig` says how it is divided). None: Python's standard library.

    Raises InputError for a path without text, and for text that is not in sentences.
    """
    splits = split_documents(find_text(path), HELD_OUT)
    found = {split: _haystack(list(documents.values())) for split, documents in splits.items()}
    for split, one in found.items():
        if len(one.text) > _LONGEST * len(one.starts):
            raise InputError(
                f'data.path: expected text in sentences, which end with ". ", "! " or "? ", found {len(one.starts):,} '
                f"in the {len(one.text):,} bytes of the {split} split; name other text"
            )
    return found


def _haystack(documents: list[NDArray[np.uint8]]) -> Haystack:
    text = b" ".join(b" ".join(document.tobytes().split()) for document in documents)
    places = {0}
    for end in _ENDS:
        place = text.find(end)
        while place >= 0:
            places.add(place + len(end))
            place = text.find(end, place + 1)
    return Haystack(text, sorted(places))
