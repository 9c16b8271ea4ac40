"""Facts in real text that are asked for many words later: what does a memory hold, and for how long?"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mnemos.config import check_fields
from mnemos.errors import plural
from mnemos.modes import evaluating
from mnemos.registry import register
from mnemos.types import InputError, JSONObject

from .batch import IGNORE
from .generated import GeneratedTask, Rows, distinct
from .metrics import GUESS
from .task import DataConfig, HeldOut, Question, Split

PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
PLACES = ("attic", "bakery", "cellar", "dairy", "forest", "garden", "harbour", "kitchen", "library", "museum")
TOLD, STOP, ASKED, MARK = "is in the", ".", "Where is", "?"
OTHER = "…"  # a word of the text that is none of the commonest ones
FACT, QUESTION = 4, 3  # tokens of "Anna | is in the | garden | ." and of "Where is | Anna | ?"
HELD_OUT = 0.1  # of the text, per held-out split
NEAREST = 4  # words between a fact and the question, the least in training
SHOWN, ROWS = 12, 64  # questions in reports; rows that are answered at once
BESIDE = 4  # words of the text that reports show beside facts and questions
_WORD = re.compile(rb"[a-z]+")


@register
@dataclass(frozen=True)
class ToldConfig(DataConfig):
    """Facts told in real text and asked for at the end of the row, as words: "Anna is in the garden. … Where is Anna?".

    A row is a piece of real text with `people` facts in a row, each about another person, and a question about one of
    them at the end. The only target is the place, one of ten. Between the last fact and the question are as many words
    as one of the `distances` says; in a held-out split each is equally frequent, in rows of equal length. Tokens are
    the `words` commonest words of the training text, one token for all others, and the parts of facts and questions.

    The text is the reference of the Python language in the standard library (65,000 words, by the version of Python),
    divided by its words. `rows` is the number of rows of a held-out split, drawn from `seed`.
    grow: in the first `grow` updates the greatest distance grows from the least to the greatest of `distances`, by the
    same factor per update, in rows as long as it needs: near facts are learned first. The distance of a training row is
    log-uniform from 4 up to the greatest one.
    """

    name: ClassVar[str] = "told"

    distances: tuple[int, ...] = (32, 64, 128, 256, 512)
    people: int = 1
    words: int = 500
    rows: int = 1000  # of the validation split, and of the test split
    seed: int = 0
    grow: int = 0

    def files(self) -> list[Path]:
        return [Path(str(topics.__file__))]

    def build(self) -> "ToldTask":
        check_fields(self, "data")
        self.require(
            "rows >= 1",
            "len(set(distances)) == len(distances) >= 1",
            f"min(distances) >= {NEAREST}",
            f"1 <= people <= {len(PEOPLE)}",
            "words >= 1",
            "grow >= 0",
        )
        return ToldTask(self, _split_words())

    def trained_on(self, updates: int) -> str:
        first, last = self.longest(0), self.longest(max(0, updates - 1))
        grown = f"a greatest one, which grew from {first} to {last} in {updates} updates" if first < last else f"{last}"
        beyond = "; greater ones were tested without training" if last < max(self.distances) else ""
        return f"In training the distances were drawn log-uniformly from {NEAREST} words up to {grown}{beyond}."

    def longest(self, update: int) -> int:
        """The greatest distance of a training row in this update, from 0."""
        shortest, longest = min(self.distances), max(self.distances)
        return int(shortest * (longest / shortest) ** (update / self.grow)) if update < self.grow else longest

    @property
    def length(self) -> int:
        return FACT * self.people + max(self.distances) + QUESTION


class ToldTask(GeneratedTask):
    """The task of `ToldConfig`; a result has the accuracy at each distance too. text: the words of each split."""

    other = OTHER

    def __init__(self, config: ToldConfig, text: Mapping[Split, Sequence[bytes]]) -> None:
        self.config = config
        common = [word for word, _ in Counter(text["train"]).most_common(config.words)]
        self.names = [*(word.decode() for word in common), OTHER, TOLD, STOP, ASKED, MARK, *PEOPLE, *PLACES]
        self._other, self._told, self._stop, self._asked, self._mark, self._people = (len(common) + i for i in range(6))
        self._places = self._people + len(PEOPLE)
        for split, words in text.items():
            if len(words) <= config.length:
                raise InputError(
                    f"data.distances: expected rows of fewer words than the {len(words):,} of the {split} split, found "
                    f"rows of {config.length:,}; lower data.distances"
                )
        tokens = {word: i for i, word in enumerate(common)}
        self.text = {split: np.array([tokens.get(w, self._other) for w in words]) for split, words in text.items()}
        super().__init__(
            lambda update: partial(self._draw, self.text["train"], config.longest(update)),
            {
                "valid": partial(self._draw, self.text["valid"], None),
                "test": partial(self._draw, self.text["test"], None),
            },
            *(len(self.names), config.length, config.rows, config.seed),
        )
        self.reference = {GUESS: 1 / len(PLACES)}

    def _draw(self, text: NDArray[np.int64], longest: int | None, random: np.random.Generator, rows: int) -> Rows:
        """longest: the greatest distance of a training row; None: held-out rows."""
        people = self.config.people
        # --- the distance of each row, and its text ---
        if longest is None:
            distance = random.permutation(np.resize(self.config.distances, rows))
            longest = max(self.config.distances)
        else:
            low, high = np.log(NEAREST), np.log(longest + 1)
            distance = np.minimum(np.exp(random.uniform(low, high, rows)).astype(np.int64), longest)
        length = FACT * people + longest + QUESTION
        begin = random.integers(0, len(text) - length, (rows, 1), endpoint=True)
        inputs = text[begin + np.arange(length)]
        # --- the facts in it ---
        who = self._people + distinct(random, rows, len(PEOPLE), people)
        where = self._places + random.integers(0, len(PLACES), (rows, people))
        facts = np.stack([who, np.full_like(who, self._told), where, np.full_like(who, self._stop)], 2).reshape(
            rows, -1
        )
        start = length - QUESTION - distance - FACT * people
        np.put_along_axis(inputs, start[:, None] + np.arange(FACT * people), facts, 1)
        # --- the question ---
        chosen = random.integers(0, people, (rows, 1))
        inputs[:, -3], inputs[:, -1] = self._asked, self._mark
        inputs[:, -2] = np.take_along_axis(who, chosen, 1)[:, 0]
        targets = np.full_like(inputs, IGNORE)
        targets[:, -1] = np.take_along_axis(where, chosen, 1)[:, 0]
        return inputs, targets

    def distances(self, inputs: Tensor) -> Tensor:
        """The number of words between the last fact and the question of each row: [B, T] -> [B]."""
        last = (torch.arange(inputs.shape[1]) * (inputs == self._stop)).amax(1)
        return inputs.shape[1] - QUESTION - 1 - last

    def artifacts(self, model: nn.Module, folder: Path, split: HeldOut) -> JSONObject:
        """The accuracy at each distance, and some questions with the model's answers. Cost: a pass over the split."""
        # --- the answers ---
        device, batches = next(model.parameters()).device, list(self.batches(split, ROWS))
        with evaluating(model), torch.inference_mode():
            answers = torch.cat([model(batch.inputs.to(device))[0][:, -1].argmax(-1).cpu() for batch in batches])
        inputs, places = torch.cat([b.inputs for b in batches]), torch.cat([b.targets[:, -1] for b in batches])
        distance, right = self.distances(inputs), answers == places
        by_distance = {at: one for at in sorted(self.config.distances) if len(one := right[distance == at])}
        # --- by distance, and the first ones as text ---
        along = {
            "metric": "accuracy",
            "x": "words from the fact to the question",
            "chance": 1 / len(PLACES),
            "values": [[at, float(one.double().mean())] for at, one in by_distance.items()],
            "rows": [len(one) for one in by_distance.values()],
        }
        questions = [
            {
                "told and asked": self._shortened(inputs[i].tolist()),
                "the right answer": f"{self.names[int(places[i])]}, {int(distance[i])} words ago",
                "answered": self.names[int(answers[i])],
            }
            for i in range(min(SHOWN, len(places)))
        ]
        about = {
            "title": f"Answers to “{ASKED} … ?”",
            "given": "the right answer",
            "found": "answered",
            "about": f"“{OTHER}”: a word that the task does not have.",
            "exact": False,
            "beside": "told and asked",
        }
        return {"along": along, "questions": questions, "examples": {"questions": about}}

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        return [(self.names[token], 1) for token in tokens]

    def encode(self, text: bytes, where: str) -> list[int]:
        """Words in any case; those that the task does not have are its word for others."""
        tokens = {name.lower(): i for i, name in enumerate(self.names)}
        phrases = "|".join(name.lower() for name in (TOLD, ASKED))
        words = re.findall(rf"\b(?:{phrases})\b|[a-z]+|[.?…]", " ".join(text.decode(errors="replace").lower().split()))
        return [tokens.get(word, self._other) for word in words if word not in ".?" or word in tokens]

    def question(self, tokens: Sequence[int]) -> Question | None:
        """Who is asked for at the end of the row, and where the row says where they are."""
        ask = tuple(tokens[-QUESTION:])
        if len(tokens) < FACT + QUESTION or ask[0] != self._asked or ask[2] != self._mark:
            return None
        facts = [i for i in range(len(tokens) - FACT) if tuple(tokens[i : i + 2]) == (ask[1], self._told)]
        return Question((facts[-1], facts[-1] + FACT), ask, int(tokens[facts[-1] + 2])) if facts else None

    def _shortened(self, row: list[int]) -> str:
        """A row as text: a few words, the facts, the number of words that follow, and the question."""
        begin = max(0, row.index(self._told) - 1 - BESIDE)
        end, question = len(row) - row[::-1].index(self._stop), len(row) - QUESTION
        if question - end <= 2 * BESIDE:
            return f"… {self.written(row[begin:])}"
        between = f"… ({plural(question - end - 2 * BESIDE, 'more word')}) …"
        return f"… {self.written(row[begin : end + BESIDE])} {between} {self.written(row[question - BESIDE :])}"

    def written(self, row: Sequence[int]) -> str:
        return " ".join(self.names[i] for i in row)


def _split_words() -> dict[Split, list[bytes]]:
    words = _WORD.findall(" ".join(text for _, text in sorted(topics.topics.items())).encode().lower())
    count = int(len(words) * HELD_OUT)
    first, second = len(words) - 2 * count, len(words) - count
    return {"train": words[:first], "valid": words[first:second], "test": words[second:]}
