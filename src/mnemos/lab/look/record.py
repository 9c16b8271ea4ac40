"""Record what a model's memories do while it reads a document, segment by segment."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos.attention.gated import GatedBranch
from mnemos.attention.softmax import SoftmaxAttention
from mnemos.hosts.linearised import Linearised
from mnemos.lab.tasks.task import Question
from mnemos.modes import evaluating
from mnemos.types import InputError, State

from .effects import (
    KNOWN,
    LOST,
    Prediction,
    check_finite,
    choose_targets,
    emptied_by_kind,
    log_probabilities,
    look_at_targets,
    read_segments,
)
from .memories import Array, Kind, Memory, Reader, Sources
from .observe import observing
from .readers import WindowReader, readers_of

LAYERS = 6  # with a memory, that are recorded, evenly spaced
SEGMENT = 32  # tokens, of a model that has no segments, blocks or window
PARTS = 4  # parts of a segment; the question is asked after each of them


@dataclass(frozen=True)
class Document:
    """What a model reads, and what is asked."""

    tokens: tuple[int, ...]
    words: tuple[tuple[str, int], ...]  # (text, number of tokens)
    targets: tuple[int, ...]  # that each token predicts, below 0 where none counts
    about: str = ""  # where it is from, and why it was chosen
    question: Question | None = None
    name: Callable[[int], str] = str  # the text of a token
    guess: float | None = None  # the probability of an answer that is picked at random, if known
    other: str = ""  # how a word outside the vocabulary is written, if all are written alike

    @staticmethod
    def of_text(
        tokens: Sequence[int],
        words: Callable[[Sequence[int]], Sequence[tuple[str, int]] | None] = lambda tokens: None,
        about: str = "",
        other: str = "",
    ) -> "Document":
        """A text whose every next token counts. words: groups tokens into words (`Task.words`); None: their numbers."""
        return Document(
            *(tuple(tokens), shown_words(tokens, words), (*tokens[1:], -1)[: len(tokens)], about),
            name=lambda token: shown_words([token], words)[0][0],
            other=other,
        )


def shown_words(
    tokens: Sequence[int], words: Callable[[Sequence[int]], Sequence[tuple[str, int]] | None]
) -> tuple[tuple[str, int], ...]:
    """The words of tokens, control characters as escapes; where they are no text, their numbers."""

    def escaped(character: re.Match[str]) -> str:
        return "\\0" if character.group() in "\0\u2400" else f"\\x{ord(character.group()):02x}"

    text = words(tokens)
    if text is None:
        return tuple((str(token), 1) for token in tokens)
    control = "[\0-\x08\x0e-\x1f\x7f-\x9f\u2400]"  # and ␀, a start token's, which many fonts lack
    return tuple((re.sub(control, escaped, word), count) for word, count in text)


class Asked(NamedTuple):
    """The probability of the answer if the question came after so many tokens."""

    after: list[int]
    probability: list[float]

    def known(self, probability: float) -> bool:
        """Whether the answer with a probability is known: half of the greatest that it has, if that is an answer."""
        return max(self.probability) >= KNOWN and probability >= LOST * max(self.probability)

    @property
    def known_at_end(self) -> bool:
        return self.known(self.probability[-1])

    @property
    def lost(self) -> int | None:
        """The first of `after` at which the answer was known before and is not now; None: it is not lost."""
        until = (Asked(self.after[: i + 1], self.probability[: i + 1]) for i in range(len(self.after)))
        return next(
            (i for i, one in enumerate(until) if one.known(max(one.probability)) and not one.known_at_end), None
        )


@dataclass
class Recording:
    """What a model's memories did over a document of N tokens in S segments of `length`."""

    name: str
    about: str
    document: Document
    length: int
    memories: list[Memory]  # at most `LAYERS`
    sources: list[Sources]
    surprise: Array  # [N], −ln p of each token given those before, NaN where it does not count
    emptied: dict[str, Array]  # the same with all memories of a kind emptied before the token's segment
    predictions: list[Prediction] = field(default_factory=list)
    asked: Asked | None = None
    layers: Mapping[Kind, int] = field(default_factory=dict)  # with a memory of each kind, in the model

    @property
    def segments(self) -> int:
        return -(-len(self.document.tokens) // self.length)


def segment_length(model: nn.Module, trained: int = 0) -> int:
    """The tokens of a segment: the model's own, else those of its training, its blocks, its window, else `SEGMENT`."""
    config = getattr(model, "config", None)
    if isinstance(length := getattr(config, "segment", None), int):
        return length
    if trained:
        return trained
    modules = list(model.modules())
    branches = [one for one in modules if isinstance(one, GatedBranch) and getattr(one, "causal", True)]
    lengths = [getattr(one, "block", None) for one in branches]
    blocks = {length for length in lengths if isinstance(length, int)}
    windows = {one.settings.window for one in modules if isinstance(one, Linearised)}
    windows |= {one.window for one in modules if isinstance(one, SoftmaxAttention) and one.window is not None}
    return max(blocks or windows or {SEGMENT})


@torch.no_grad()
def record(
    model: nn.Module, document: Document, name: str = "", about: str = "", length: int = 0, state: State = None
) -> Recording:
    """Read a document with a causal model y, state = model(x, state), and record what its memories did.

    length: tokens of a segment; 0: `segment_length`. state: where the reading starts, of one row; None: afresh. The
    model and all random generators are unchanged. Cost: three forwards of the document, and `effects.look_at_targets`.
    Raises InputError for a model without a causal state or with outputs that are not finite, and for a document without
    tokens.
    """
    if getattr(model, "state_kind", "none") == "none" or not getattr(model, "autoregressive", False):
        raise InputError(
            "look: expected a model that reads tokens with a state and predicts the next one, found another; "
            "mnemos report RUN shows what its memory is worth"
        )
    if not document.tokens:
        raise InputError("look: expected a document of at least one token, found none; add text to it")
    length = length or segment_length(model)
    device = next(model.parameters()).device
    tokens = torch.tensor([document.tokens], device=device)
    targets = torch.tensor(document.targets)
    readers, every = readers_of(model, LAYERS), readers_of(model, sys.maxsize)
    with generators.preserve(), evaluating(model):
        surprise, emptied = _read(model, readers, every, tokens, targets, length, state)
        recording = Recording(
            *(name, about, document, length),
            memories=[reader.memory() for reader in readers],
            sources=[one for reader in readers for one in reader.sources()],
            surprise=surprise,
            emptied=emptied,
            layers=Counter(reader.kind for reader in every),
        )
        if document.question is not None:
            recording.asked = _ask(model, tokens, document.question, length, state)
        # Words that keys and values alone helped are of interest where there is no other memory.
        own = {kind: array for kind, array in emptied.items() if kind != WindowReader.plural} or emptied
        helped = np.max([array - surprise for array in own.values()] or [np.full(len(surprise), np.nan)], 0)
        wanted = choose_targets(document.targets, helped, length)
        known = recording.asked is None or recording.asked.known_at_end  # what is not known cannot be lost
        recording.predictions = look_at_targets(
            model, readers, every, recording.memories, tokens, targets, wanted, length, state, known
        )
        for one in recording.predictions:
            one.answer_text, one.guess_text = document.name(one.answer), document.name(one.guess)
    return recording


def _read(
    model: nn.Module,
    readers: Sequence[Reader],
    every: Sequence[Reader],
    tokens: Tensor,
    targets: Tensor,
    length: int,
    state: State,
) -> tuple[Array, dict[str, Array]]:
    n = tokens.shape[1]
    surprise = np.full(n, np.nan)
    emptied: dict[str, Array] = {}

    def surprises(outputs: Tensor, targets: Tensor) -> Array:  # of one row, [T]
        scores = log_probabilities(model, outputs[0])
        of_targets: Tensor = scores.gather(-1, targets.clamp(min=0).to(scores.device)[:, None])[:, 0]
        return -of_targets.cpu().numpy()

    with observing(model) as calls:
        for first in range(0, n, length):
            x = tokens[:, first : first + length]
            calls.clear()
            outputs, after = model(x, state)
            check_finite(outputs)
            of_segment = dict(calls)  # further forwards add to `calls`
            for reader in readers:
                reader.read(of_segment, state, after, x.shape[1])
            wanted = targets[first : first + length]
            counts = ((wanted >= 0) & (torch.arange(first, first + x.shape[1]) < n - 1)).numpy()
            at = counts.nonzero()[0] + first + 1
            surprise[at] = surprises(outputs, wanted)[counts]
            without = {} if state is None else emptied_by_kind(every, state)
            for kind in emptied | without:
                # Before the first segment, and where nothing was written yet, there is nothing to empty.
                emptied.setdefault(kind, surprise.copy())[at] = surprise[at]
                if kind in without:
                    emptied[kind][at] = surprises(model(x, without[kind])[0], wanted)[counts]
            state = after
    return surprise, emptied


def _ask(model: nn.Module, tokens: Tensor, question: Question, length: int, state: State) -> Asked:
    """Ask after every part of a segment from the told words on: each time as of a row that ends with this question."""
    step, ask = max(1, length // PARTS), torch.tensor([question.ask], device=tokens.device)
    after, probability = [], []
    end = tokens.shape[1] - len(question.ask)
    first = 0  # what `state` has read, whole segments
    for position in [question.fact[1], *(i for i in range(step, end, step) if i > question.fact[1]), end]:
        whole = position // length * length
        if whole > first:
            _, state = read_segments(model, tokens[:, first:whole], state, length)
            first = whole
        outputs, _ = read_segments(model, torch.cat([tokens[:, first:position], ask], 1), state, length)
        probability.append(float(log_probabilities(model, outputs[0, -1])[question.answer].exp()))
        after.append(position)
    return Asked(after, probability)
