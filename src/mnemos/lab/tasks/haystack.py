"""Questions about what is hidden in long text, as bytes: a needle (RULER), and facts about people (BABILong-like).

The needle is S-NIAH-1 of RULER (Hsieh et al. 2024): find a number in a text that repeats a sentence, or in books. The
facts are an own simulation of bAbI's first three tasks, in books.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE
from .generated import Draw, GeneratedConfig, Rows
from .task import SPLITS, Split
from .text_files import find_text, split_documents

T = TypeVar("T")
# The haystack of RULER's first task.
SENTENCE = b"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
HELD_OUT = 0.1  # of the documents, per held-out split
_SENTENCE_END = re.compile(rb"[.!?] ")
# Bytes of a sentence, on average; text with longer ones has no positions for what is hidden in it.
_LONGEST_SENTENCE = 1_000
# S-NIAH-1: the instruction before the text, the sentence that is hidden in it, and the question.
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
DEPTHS = np.round(np.linspace(0, 100, 40)).astype(int).tolist()  # per cent of the text that is before the needle
# Keys are an adjective and a noun, as RULER's. All have equally many letters, so rows have equal parts.
ADJECTIVES = (
    "amber brave clear eager faint giant happy ideal jolly lucky misty noble olive proud quiet rapid shiny vivid"
)
NOUNS = "apple beach cabin daisy eagle flute grape hotel igloo jewel knife lemon maple night ocean piano river stone"
_LETTERS = 11  # of a key
# Bytes of everything but the haystack: all needles and questions have equally many.
_AROUND = len(BEFORE) + len(NEEDLE.format("-" * _LETTERS, "0" * DIGITS, ".")) + len(QUESTION.format("-" * _LETTERS))
# What the facts are about.
PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
# Of different initials, because the answer is the first letter.
PLACES = ("attic", "bakery", "cellar", "dairy", "forest", "garden", "harbour", "kitchen", "library", "museum")
THINGS = ("apple", "ball", "coin", "drum", "flute", "globe", "hammer", "jar", "key", "lamp")
_LONGEST_FACT = 48  # bytes of a fact or of a question, at most
_TRIES = 1000


@dataclass(frozen=True)
class Haystack:
    """Text [n] bytes with one space between words, and the positions at which its sentences begin, sorted."""

    text: bytes
    starts: list[int]

    def cut(self, random: np.random.Generator, length: int) -> tuple[bytes, list[int]]:
        """`length` bytes from a random sentence on, and the positions in them at which a sentence begins."""
        last = bisect_left(self.starts, len(self.text) - length + 1)
        if not last:
            raise InputError(
                f"data.path: expected at least {length:,} bytes of text in each split, found {len(self.text):,}; add "
                "text, or lower data.length"
            )
        begin = self.starts[int(random.integers(last))]
        inside = self.starts[bisect_left(self.starts, begin) : bisect_left(self.starts, begin + length)]
        return self.text[begin : begin + length], [start - begin for start in inside]


def books(path: str | None) -> dict[Split, Haystack]:
    """The text of a file or folder by split (`TextConfig` says how it is divided). None: Python's standard library."""
    haystacks: dict[Split, Haystack] = {}
    for split, documents in split_documents(find_text(path), HELD_OUT).items():
        text = b" ".join(b" ".join(document.tobytes().split()) for document in documents.values())
        starts = [0, *(match.end() for match in _SENTENCE_END.finditer(text))]
        if len(text) > _LONGEST_SENTENCE * len(starts):
            raise InputError(
                f'data.path: expected text in sentences, which end with ". ", "! " or "? ", found {len(starts):,} '
                f"in the {len(text):,} bytes of the {split} split; name other text"
            )
        haystacks[split] = Haystack(text, starts)
    return haystacks


class HaystackConfig(GeneratedConfig):
    """Base of tasks whose rows are text with something hidden in it, a question, and `answer` bytes, the targets."""

    answer: ClassVar[int]

    def row(self, haystack: Any, random: np.random.Generator) -> bytes:
        """A row and its answer: `length` + `answer` bytes."""
        raise NotImplementedError

    def haystacks(self) -> Mapping[Split, Haystack | None]:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        return 256, self.length + self.answer - 1

    def draws(self) -> tuple[Callable[[int], Draw], Mapping[Split, Draw]]:
        draws = {split: partial(self.draw_from, haystack) for split, haystack in self.haystacks().items()}
        return lambda update: draws["train"], draws

    def draw_from(self, haystack: Haystack | None, random: np.random.Generator, rows: int) -> Rows:
        text = b"".join(self.row(haystack, random) for _ in range(rows))
        tokens = np.frombuffer(text, np.uint8).reshape(rows, -1).astype(np.int64)
        targets = np.full((rows, tokens.shape[1] - 1), IGNORE)
        targets[:, -self.answer :] = tokens[:, -self.answer :]
        return tokens[:, :-1].copy(), targets


@register
@dataclass(frozen=True)
class NeedleConfig(HaystackConfig):
    """A needle in a haystack (RULER, S-NIAH-1), as bytes: a text has one number, and the end of the row asks for it.

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
    limits = (f"length > {_AROUND + 1}",)  # a line end follows the text of books, which has a byte or more
    answer = DIGITS

    length: int = 512
    path: str | None = None
    rows: int = 400  # of the validation split, and of the test split
    seed: int = 0

    def files(self) -> list[Path]:
        return find_text(None if self.path == "stdlib" else self.path).read if self.path else []

    def haystacks(self) -> Mapping[Split, Haystack | None]:
        return books(None if self.path == "stdlib" else self.path) if self.path else dict.fromkeys(SPLITS)

    def row(self, haystack: Haystack | None, random: np.random.Generator) -> bytes:
        # --- the text ---
        after, end = ("\n", b"") if haystack is None else (" ", b"\n")
        room = self.length - _AROUND - len(end)
        if haystack is None:  # the last bytes of repeated sentences, and where lines begin or end
            text = (SENTENCE * (room // len(SENTENCE) + 1))[-room:]
            starts = list(range(room % len(SENTENCE), room + 1, len(SENTENCE)))
        else:
            text, starts = haystack.cut(random, room)
        # --- the needle in it ---
        key = "-".join(_one(random, words.split()) for words in (ADJECTIVES, NOUNS))
        number = str(random.integers(10 ** (DIGITS - 1), 10**DIGITS))
        depth = starts[(len(starts) - 1) * _one(random, DEPTHS) // 100]
        needle, question = NEEDLE.format(key, number, after).encode(), QUESTION.format(key).encode()
        return b"".join([BEFORE, text[:depth], needle, text[depth:], end, question, number.encode()])


@register
@dataclass(frozen=True)
class FactsConfig(HaystackConfig):
    """Facts in books (BABILong-like), as bytes: which place is asked for at the end. Not BABILong's data.

    A row has `length` bytes: background text of the books in the file or folder `path` (None: the source of Python's
    standard library), with `facts` sentences in order at positions drawn with replacement among the beginnings of the
    background's sentences, and the question at the end. The target is the first letter of the place: the ten places
    have different ones, so guessing is right with probability 1/10.

    task 1: people go to places: where is a person? task 2: people also take and leave things: where is a thing? task 3:
    where was a thing before the place where it is now? The people, places, words and the simulation are this library's
    own, so no number is comparable with those of BABILong or bAbI. The documents are divided into training, validation
    and test; the held-out splits have `rows` rows each, drawn from `seed`.
    """

    name: ClassVar[str] = "babilong-like"
    limits = ("task in (1, 2, 3)", "facts >= 2 * task - 1", f"length >= {_LONGEST_FACT} * (facts + 1)")
    answer = 1

    task: int = 1
    length: int = 512
    facts: int = 4
    path: str | None = None
    rows: int = 500  # of the validation split, and of the test split
    seed: int = 0

    def files(self) -> list[Path]:
        return find_text(self.path).read

    def haystacks(self) -> Mapping[Split, Haystack]:
        return books(self.path)

    def row(self, haystack: Haystack, random: np.random.Generator) -> bytes:
        story = tell_story(random, self.task, self.facts)
        question = f" {story.question} ".encode()
        text, starts = haystack.cut(random, self.length - len(question) - sum(len(fact) + 1 for fact in story.facts))
        chosen = np.sort(random.integers(0, len(starts), len(story.facts)))
        parts, before = [], 0
        for fact, start in zip(story.facts, (starts[i] for i in chosen), strict=True):
            parts += [text[before:start], fact.encode(), b" "]
            before = start
        return b"".join([*parts, text[before:], question, story.answer[:1].encode()])


def _one(random: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(random.integers(len(choices)))]


class Story(NamedTuple):
    """Sentences in order, a question about them, and the place that answers it."""

    facts: list[str]
    question: str
    answer: str


def tell_story(random: np.random.Generator, task: int, facts: int) -> Story:
    """A random story of a number of facts with a question of task 1, 2 or 3 that they answer."""
    for _ in range(_TRIES):
        sentences, people, things = _simulate(random, task, facts)
        if task == 1:
            person = _one(random, sorted(people))
            return Story(sentences, f"Where is {person}?", people[person])
        moved = [(thing, stays) for thing, stays in sorted(things.items()) if len(stays) >= task - 1]
        if moved:
            thing, stays = _one(random, moved)
            if task == 2:
                return Story(sentences, f"Where is the {thing}?", stays[-1])
            return Story(sentences, f"Where was the {thing} before the {stays[-1]}?", stays[-2])
    raise InputError(f"data.facts: expected enough facts for a question of task {task}, found {facts}; raise it")


def _simulate(
    random: np.random.Generator, task: int, facts: int
) -> tuple[list[str], dict[str, str], dict[str, list[str]]]:
    """Sentences, where each person is, and where each thing has been, in order and without repetition in a row."""
    sentences: list[str] = []
    people: dict[str, str] = {}
    holder: dict[str, str] = {}  # of a thing
    things: dict[str, list[str]] = {}
    # Few people and things in the tasks with things, so that their facts belong together.
    actors, objects = (PEOPLE, THINGS[:0]) if task == 1 else (PEOPLE[:4], THINGS[:3])
    while len(sentences) < facts:
        person = _one(random, actors)
        carries = [thing for thing, who in holder.items() if who == person]
        # A thing that no fact has placed may lie anywhere, so anyone may take it.
        free = [t for t in objects if t not in holder and things.get(t, [people.get(person)])[-1] == people.get(person)]
        action = _one(random, ["go", "take", "leave"]) if task > 1 else "go"
        if action == "take" and free and person in people:
            thing = _one(random, free)
            holder[thing] = person
            things.setdefault(thing, [people[person]])
            sentences.append(f"{person} took the {thing}.")
        elif action == "leave" and carries:
            thing = _one(random, carries)
            del holder[thing]
            sentences.append(f"{person} left the {thing}.")
        elif action == "go":
            place = _one(random, [p for p in PLACES if p != people.get(person)])
            people[person] = place
            for thing in carries:
                things[thing].append(place)
            sentences.append(f"{person} went to the {place}.")
    return sentences, people, things
