"""S-NIAH-1 of RULER (Hsieh et al. 2024) as bytes: find a number in a text that repeats a sentence, or in books."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from mnemos.config import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE
from .generated import GeneratedTask, Rows
from .haystack import Haystack, books, files, repeated

BEFORE = (
    b"A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    b"number afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {} is: {}.{}"
QUESTION = (
    "What is the special magic number for {0} mentioned in the provided text? The special magic number for {0} "
    "mentioned in the provided text is "
)
DIGITS = 7
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int)  # per cent of the text that is before the needle
# Keys are an adjective and a noun, as RULER's. All have equally many letters, so rows have equal parts.
ADJECTIVES = (
    "amber brave clear eager faint giant happy ideal jolly lucky misty noble olive proud quiet rapid shiny vivid"
)
NOUNS = "apple beach cabin daisy eagle flute grape hotel igloo jewel knife lemon maple night ocean piano river stone"


@register
@dataclass(frozen=True)
class NeedleConfig(DataConfig):
    """A needle in a haystack (RULER, S-NIAH-1), as bytes: a text tells one number, and the end of the row asks for it.

    A row of `length` + 6 bytes is RULER's text, with the seven digits of the number at its end; the targets are these
    digits. The sentence with the number stands at one of 40 depths, at the beginning of a line or sentence. path=None:
    the text repeats "The grass is green. …". Otherwise it is from the books in this file or folder, whose documents are
    divided into training, validation and test; `data.path stdlib` is the source of Python's standard library. Words of
    keys are this library's own.

    RULER counts whole numbers that a model writes, and its rows are counted in tokens of the model's vocabulary; here
    the accuracy counts digits (1/10 by chance, and 1/9 for the first) and lengths are bytes. The validation and the
    test split have `rows` rows each, drawn from `seed`.
    """

    name: ClassVar[str] = "needle"

    length: int = 512
    path: str | None = None
    rows: int = 400
    seed: int = 0

    def files(self) -> list[Path]:
        """The books' files; none for the repeated sentence."""
        return files(_place(self.path)) if self.path else []

    def build(self) -> GeneratedTask:
        """The task: 256 tokens, T = length + 6. Raises InputError for a length below that of the text around."""
        if self.room < 1:
            raise InputError(
                f"data.length: expected at least {self.length - self.room + 1} bytes, which the question needs, found "
                f"{self.length}; raise it"
            )
        sizes = (256, self.length + DIGITS - 1, self.rows, self.seed)
        if not self.path:
            return GeneratedTask(partial(self.draw, None), *sizes)
        splits = books(_place(self.path))
        draws = {split: partial(self.draw, haystack) for split, haystack in splits.items()}
        held_out = {split: draws[split] for split in ("valid", "test")}
        return GeneratedTask(draws["train"], *sizes, held_out=held_out)

    @property
    def room(self) -> int:
        """The number of bytes for the haystack."""
        key, number = "-".join((ADJECTIVES.split()[0], NOUNS.split()[0])), "0" * DIGITS
        return self.length - len(BEFORE) - len(NEEDLE.format(key, number, "\n")) - len(QUESTION.format(key))

    def draw(self, haystack: Haystack | None, random: np.random.Generator, rows: int) -> Rows:
        """Draw inputs and targets, [rows, length + 6] each."""
        text = b"".join(self._row(haystack, random) for _ in range(rows))
        whole = np.frombuffer(text, np.uint8).reshape(rows, -1).astype(np.int64)
        targets = np.full((rows, whole.shape[1] - 1), IGNORE)
        targets[:, -DIGITS:] = whole[:, -DIGITS:]
        return whole[:, :-1].copy(), targets

    def _row(self, haystack: Haystack | None, random: np.random.Generator) -> bytes:
        if haystack is None:
            (text, places), after, end = repeated(self.room), "\n", b""
        else:
            (text, places), after, end = haystack.cut(random, self.room - 1), " ", b"\n"
        adjective, noun = (words[random.integers(len(words))] for words in (ADJECTIVES.split(), NOUNS.split()))
        number = str(random.integers(10 ** (DIGITS - 1), 10**DIGITS))
        key = f"{adjective}-{noun}"
        place = places[(len(places) - 1) * int(DEPTHS[random.integers(len(DEPTHS))]) // 100]
        needle, question = NEEDLE.format(key, number, after), QUESTION.format(key)
        return b"".join([BEFORE, text[:place], needle.encode(), text[place:], end, question.encode(), number.encode()])


def _place(path: str | None) -> str | None:
    return None if path == "stdlib" else path
