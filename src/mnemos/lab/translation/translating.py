"""Sentences translated by a trained encoder-decoder: batches of similar length, beam search, text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mnemos.generate.beam import BeamConfig, Hypothesis, Step, beam_search, stepping
from mnemos.lab.tasks.token_batches import TokenBatches
from mnemos.modes import evaluating
from mnemos.types import InputError

from .parallel_corpus import Vocabularies
from .translation_vocabulary import END, PAD, START, UNKNOWN

BATCH = 4096  # tokens of the sentences that are translated together


class Translation(NamedTuple):
    """A translation and its score: the log-probability of its sub-words / length^length_penalty (`BeamConfig`)."""

    text: str
    score: float


@dataclass(frozen=True)
class Decoding:
    """How sentences are translated: hypotheses that beam search keeps, and how many of them are returned.

    length_penalty: the power of the length by which a hypothesis' log-probability is divided. A translation has at most
    1.2 times as many sub-words as its own source, and ten more, so it does not depend on the sentences beside it.
    """

    beams: int = 5
    n_best: int = 1
    length_penalty: float = 1.0

    def search(self, most: int) -> BeamConfig:
        """The beam search by a model that writes at most `most` tokens."""
        return BeamConfig(
            eos=END,
            beams=self.beams,
            n_best=self.n_best,
            max_length=most,
            length_penalty=self.length_penalty,
            forbidden=(PAD, START, UNKNOWN),
        )


def padded(rows: Sequence[Sequence[int]], last: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows of tokens as ([B, S] int64, padded with <pad> on the right; mask [B, S], None without padding).

    last: a token that is added to each row.
    """
    whole = [[*row, last] if last is not None else list(row) for row in rows]
    longest = max(map(len, whole))
    tokens = torch.tensor([row + [PAD] * (longest - len(row)) for row in whole])
    lengths = torch.tensor([len(row) for row in whole])
    mask = torch.arange(longest) < lengths[:, None]
    return tokens, None if bool(mask.all()) else mask


def decoded(
    model: Any, source: Tensor, mask: Tensor | None, decoding: Decoding, longest: int, step: Step | None = None
) -> list[list[Hypothesis]]:
    """The best hypotheses for each row of sources [B, S].

    longest: tokens that the model may write; step: see `beam_search`.
    """
    state = model.encode(source, mask)
    start = torch.full((len(source), 1), START, device=source.device)
    lengths = torch.full_like(source[:, 0], source.shape[1]) if mask is None else mask.sum(1)
    limits = (6 * lengths // 5 + 10).clamp(max=longest)
    return beam_search(model, state, start, decoding.search(longest), step=step, limits=limits)


@dataclass(frozen=True)
class Translator:
    """A model with its sub-words: what `mnemos.translate` and `mnemos translate` use.

    The model's weights must not change between translations: make another translator after training.
    """

    model: Any
    vocabularies: Vocabularies
    longest: int  # sub-words of a source

    def encode(self, sentences: Sequence[str], where: Callable[[int], str]) -> list[list[int]]:
        """The sub-words of sentences. Raises InputError, with `where` of its number, for one that is too long."""
        rows = self.vocabularies.source.encode([" ".join(sentence.split()) for sentence in sentences])
        for number, row in enumerate(rows):
            if len(row) > self.longest:
                raise InputError(
                    f"{where(number)}: expected a sentence of at most {self.longest:,} sub-words, which the model "
                    f"reads, found {len(row):,}; divide the sentence"
                )
        return rows

    def translate(self, rows: Sequence[Sequence[int]], decoding: Decoding) -> Iterator[tuple[int, list[Translation]]]:
        """(number of the row, its translations, best first), the longest rows first; an empty row has empty ones."""
        full = [number for number, row in enumerate(rows) if row]
        yield from ((number, [Translation("", 0.0)]) for number, row in enumerate(rows) if not row)
        if not full:
            return
        device = next(self.model.parameters()).device
        lengths = np.array([[len(rows[number]) + 1] * 2 for number in full], np.int32)
        batches = TokenBatches(lengths, max(BATCH, int(lengths.max())), BATCH).once()
        with torch.no_grad(), evaluating(self.model):
            for batch in batches:
                chosen = [full[place] for place in batch]
                tokens, mask = padded([rows[number] for number in chosen], END)
                mask = None if mask is None else mask.to(device)
                found = decoded(self.model, tokens.to(device), mask, decoding, self.longest + 1, self._step)
                for number, best in zip(chosen, found, strict=True):
                    yield number, [self._text(one) for one in best]

    @cached_property
    def _step(self) -> Step:
        return stepping(self.model)

    def _text(self, found: Hypothesis) -> Translation:
        return Translation(self.vocabularies.target.decode(found.tokens.tolist()), found.score)
