"""Facts about people and things in background text (BABILong-like): an own simulation of bAbI's first three tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from mnemos.config import DataConfig
from mnemos.registry import register
from mnemos.types import InputError

from .batch import IGNORE
from .generated import GeneratedTask, Rows
from .haystack import Haystack, books, files

PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
# Of different initials, because the answer is the first letter.
PLACES = ("attic", "bakery", "cellar", "dairy", "forest", "garden", "harbour", "kitchen", "library", "museum")
THINGS = ("apple", "ball", "coin", "drum", "flute", "globe", "hammer", "jar", "key", "lamp")
LONGEST = 48  # bytes of a fact or of a question, at most
_TRIES = 1000


@register
@dataclass(frozen=True)
class FactsConfig(DataConfig):
    """Facts in books (BABILong-like), as bytes: which place is asked for at the end. Not BABILong's data.

    A row has `length` bytes: background text of the books in the file or folder `path` (None: the source of Python's
    standard library), with `facts` sentences in order at places drawn with replacement among the beginnings of the
    background's sentences, and the question at the end. The target is the first letter of the place: the ten places
    have different ones, so guessing is right with probability 1/10.

    task 1: people go to places: where is a person? task 2: people also take and leave things: where is a thing? task 3:
    where was a thing before the place where it is now? The people, places, words and the simulation are this library's
    own, so no number is comparable with those of BABILong or bAbI. The documents are divided into training, validation
    and test; the held-out splits have `rows` rows each, drawn from `seed`.
    """

    name: ClassVar[str] = "babilong-like"

    task: int = 1
    length: int = 512
    facts: int = 4
    path: str | None = None
    rows: int = 500
    seed: int = 0

    def files(self) -> list[Path]:
        """The books' files."""
        return files(self.path)

    def build(self) -> GeneratedTask:
        """The task: 256 tokens, T = length. Raises InputError for a setting out of range, books without sentences."""
        if self.task not in (1, 2, 3) or self.facts < 2 * self.task - 1:
            raise InputError(
                f"babilong-like: expected data.task 1, 2 or 3 and data.facts of at least 2·task − 1, found task "
                f"{self.task} and {self.facts} facts; change these"
            )
        if self.length < (least := LONGEST * (self.facts + 1)):
            raise InputError(
                f"data.length: expected at least {least} bytes for {self.facts} facts and a question, found "
                f"{self.length}; raise it"
            )
        draws = {split: partial(self.draw, haystack) for split, haystack in books(self.path).items()}
        held_out = {split: draws[split] for split in ("valid", "test")}
        return GeneratedTask(draws["train"], 256, self.length, self.rows, self.seed, held_out=held_out)

    def draw(self, haystack: Haystack, random: np.random.Generator, rows: int) -> Rows:
        """Draw inputs and targets, [rows, length] each."""
        inputs, targets = np.empty((rows, self.length), np.int64), np.full((rows, self.length), IGNORE)
        for i in range(rows):
            story = told(random, self.task, self.facts)
            question = f" {story.question} ".encode()
            room = self.length - len(question) - sum(len(fact) + 1 for fact in story.facts)
            text, places = haystack.cut(random, room)
            chosen = np.sort(random.integers(0, len(places), len(story.facts)))
            parts, before = [], 0
            for fact, place in zip(story.facts, (places[j] for j in chosen), strict=True):
                parts += [text[before:place], fact.encode(), b" "]
                before = place
            inputs[i] = np.frombuffer(b"".join([*parts, text[before:], question]), np.uint8)
            targets[i, -1] = ord(story.answer[0])
        return inputs, targets


T = TypeVar("T")


def _one(random: np.random.Generator, choices: Sequence[T]) -> T:
    return choices[int(random.integers(len(choices)))]


class Story(NamedTuple):
    """Sentences in order, a question about them, and the place that answers it."""

    facts: list[str]
    question: str
    answer: str


def told(random: np.random.Generator, task: int, facts: int) -> Story:
    """A random story of a number of facts with a question of task 1, 2 or 3 that they answer."""
    for _ in range(_TRIES):
        sentences, people, things = _simulated(random, task, facts)
        if task == 1:
            person = _one(random, sorted(people))
            return Story(sentences, f"Where is {person}?", people[person])
        known = [(thing, stays) for thing, stays in sorted(things.items()) if len(stays) >= task - 1]
        if known:
            thing, stays = _one(random, known)
            if task == 2:
                return Story(sentences, f"Where is the {thing}?", stays[-1])
            return Story(sentences, f"Where was the {thing} before the {stays[-1]}?", stays[-2])
    raise InputError(f"data.facts: expected enough facts for a question of task {task}, found {facts}; raise it")


def _simulated(
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
        held = [thing for thing, who in holder.items() if who == person]
        # A thing that no fact has placed may lie anywhere, so anyone may take it.
        free = [t for t in objects if t not in holder and things.get(t, [people.get(person)])[-1] == people.get(person)]
        kind = _one(random, ["go", "take", "leave"]) if task > 1 else "go"
        if kind == "take" and free and person in people:
            thing = _one(random, free)
            holder[thing] = person
            things.setdefault(thing, [people[person]])
            sentences.append(f"{person} took the {thing}.")
        elif kind == "leave" and held:
            thing = _one(random, held)
            del holder[thing]
            sentences.append(f"{person} left the {thing}.")
        elif kind == "go":
            place = _one(random, [p for p in PLACES if p != people.get(person)])
            people[person] = place
            for thing in held:
                things[thing].append(place)
            sentences.append(f"{person} went to the {place}.")
    return sentences, people, things
