"""Sentences translated by a trained encoder-decoder: `mnemos.translate` and `mnemos translate`.

A `Translator` searches batches of similar length by beam search; `TranslationPreprocessing` is what a run keeps of its
task: languages, sub-words, and how it searches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mnemos.errors import near_arguments
from mnemos.generate.beam import BeamConfig, DecoderStep, Hypothesis, beam_search
from mnemos.generate.fused import DecodeStep
from mnemos.lab.evaluate.predict import read_preprocessing
from mnemos.lab.tasks.preprocessing import Preprocessing
from mnemos.models.store import load
from mnemos.modes import evaluating
from mnemos.registry import register
from mnemos.types import InputError

from .parallel_corpus import TokenBatches, Vocabularies
from .translation_vocabulary import END, PAD, START, UNKNOWN, SubWordTokens

BATCH = 4096  # tokens of the sentences that are translated together
CHUNK = 1000  # sentences that are translated, the longest first, before the first of them is returned
Progress = Callable[[int, int], None]  # (sentences that are translated, all sentences)


class Translation(NamedTuple):
    """A translation and its score: the log-probability of its sub-words / length^length_penalty (`BeamConfig`)."""

    text: str
    score: float


def beam_config(longest: int, beams: int = 5, n_best: int = 1, length_penalty: float = 1.0) -> BeamConfig:
    """The beam search by a model that reads and writes at most `longest` sub-words, and the end.

    beams: hypotheses that it keeps; n_best: how many of them are returned. length_penalty: the power of the length by
    which a hypothesis' log-probability is divided.
    """
    return BeamConfig(
        eos=END,
        beams=beams,
        n_best=n_best,
        max_length=longest + 1,
        length_penalty=length_penalty,
        forbidden=(PAD, START, UNKNOWN),
    )


class Translator:
    """A model with its sub-words, which reads sources of at most `longest`.

    The model's weights must not change between translations: make another translator after training.
    """

    def __init__(self, model: Any, vocabularies: Vocabularies, longest: int) -> None:
        self.model, self.vocabularies, self.longest = model, vocabularies, longest

    @cached_property
    def _step(self) -> DecodeStep:
        return DecoderStep(self.model)

    def translate(
        self, sentences: Sequence[str], decoding: BeamConfig, where: str = "sentence", progress: Progress | None = None
    ) -> Iterator[list[Translation]]:
        """The translations of each sentence, best first, in order. All sentences are checked before the first one.

        where: what a sentence is called in errors, before its number from 1. Raises InputError for one that is too
        long. `mnemos.translate(translator, sentences)` calls `TrainedTranslator.decoding` and this.
        """
        rows = self.vocabularies.source.encode([" ".join(sentence.split()) for sentence in sentences])
        for number, row in enumerate(rows, start=1):
            if len(row) > self.longest:
                raise InputError(
                    f"{where} {number:,}: expected a sentence of at most {self.longest:,} sub-words, which the model "
                    f"reads, found {len(row):,}; divide the sentence"
                )
        for first in range(0, len(rows), CHUNK):
            chunk: dict[int, list[Translation]] = {}
            for number, translations in self.translate_rows(rows[first : first + CHUNK], decoding):
                chunk[number] = translations
                if progress is not None:
                    progress(first + len(chunk), len(rows))
            yield from (chunk[number] for number in range(len(chunk)))

    def translate_rows(
        self, rows: Sequence[Sequence[int]], decoding: BeamConfig
    ) -> Iterator[tuple[int, list[Translation]]]:
        """(number of the row, its translations, best first), the longest rows first; an empty row has empty ones."""
        full = [number for number, row in enumerate(rows) if row]
        yield from ((number, [Translation("", 0.0)]) for number, row in enumerate(rows) if not row)
        if not full:
            return
        device = next(self.model.parameters()).device
        lengths = np.array([[len(rows[number]) + 1] * 2 for number in full], np.int32)
        with torch.no_grad(), evaluating(self.model):
            for batch in TokenBatches(lengths, max(BATCH, int(lengths.max())), BATCH).once():
                chosen = [full[i] for i in batch]
                tokens, mask = pad([rows[number] for number in chosen], END)
                mask = None if mask is None else mask.to(device)
                best = search(self.model, tokens.to(device), mask, decoding, self._step)
                for number, hypotheses in zip(chosen, best, strict=True):
                    texts = [self.vocabularies.target.decode(one.tokens.tolist()) for one in hypotheses]
                    yield number, [Translation(text, h.score) for text, h in zip(texts, hypotheses, strict=True)]


def pad(rows: Sequence[Sequence[int]], *last: int) -> tuple[Tensor, Tensor | None]:
    """Rows of tokens, each with `last` behind it, as ([B, S] int64, <pad> on the right; mask [B, S], None if whole)."""
    whole = [torch.tensor([*row, *last]) for row in rows]
    tokens = pad_sequence(whole, batch_first=True, padding_value=PAD)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in whole])[:, None]
    return tokens, None if bool(mask.all()) else mask


def search(
    model: Any, source: Tensor, mask: Tensor | None, decoding: BeamConfig, step: DecodeStep | None = None
) -> list[list[Hypothesis]]:
    """The best hypotheses for each row of sources [B, S]. step: see `beam_search`."""
    state = model.encode(source, mask)
    start = torch.full((len(source), 1), START, device=source.device)
    # A row's limit is of its own source, and not of the longest in the batch: so its translation does not depend on the
    # sentences beside it.
    lengths = torch.full_like(source[:, 0], source.shape[1]) if mask is None else mask.sum(1)
    limits = (6 * lengths // 5 + 10).clamp(max=decoding.max_length)
    return beam_search(model, state, start, decoding, step=step, limits=limits)


@register
@dataclass(frozen=True)
class TranslationPreprocessing(Preprocessing):
    """What a run keeps of its task, for `mnemos translate`.

    source, target: the languages. tokenizer: the content of the tokenizer.json of the source, and of both languages if
    `target_tokenizer` is "". longest: sub-words of a sentence. The others: see `beam_config`.
    """

    name: ClassVar[str] = "translation"

    source: str
    target: str
    tokenizer: str
    target_tokenizer: str = ""
    longest: int = 250
    beams: int = 5
    length_penalty: float = 1.0

    def vocabularies(self, model: Any = None) -> Vocabularies:
        """The run's sub-words. Raises InputError for a model that has others, as far as their number shows."""
        source = SubWordTokens(self.tokenizer, "the run's tokenizer")
        target = SubWordTokens(self.target_tokenizer, "the run's tokenizer") if self.target_tokenizer else source
        config = getattr(model, "config", None)
        of_target = getattr(config, "vocab_size", target.size)
        of_source = getattr(config, "source_vocab_size", 0) or of_target  # 0: those of the target
        for side, size, own in (("source", of_source, source), ("target", of_target, target)):
            if model is not None and own.size != size:
                raise InputError(
                    f"preprocessing.json: expected {size:,} sub-words of the {side}, as the model has, found a "
                    f"tokenizer of {own.size:,}; restore the file that the run wrote"
                )
        return Vocabularies(source, target)

    def difference(self, other: Preprocessing) -> str | None:
        """See the base class: languages and sub-words must be those of the run."""
        if not isinstance(other, TranslationPreprocessing):
            return super().difference(other)
        if (self.source, self.target) != (other.source, other.target):
            return (
                f"expected text from {self.source} to {self.target}, as the run has, found {other.source} to "
                f"{other.target}; set data.source and data.target"
            )
        if (self.tokenizer, self.target_tokenizer) != (other.tokenizer, other.target_tokenizer):
            return "expected the run's sub-words, found another tokenizer; leave data.tokenizer and data.subwords out"
        return None

    def start_problem(self, other: Preprocessing) -> str | None:
        """See the base class: as many other sub-words would take over the embeddings of these."""
        if isinstance(other, TranslationPreprocessing):
            for one, two in zip(self.vocabularies(), other.vocabularies(), strict=True):
                if one.size == two.size and one.content != two.content:
                    return (
                        f"expected a run with the {two.size:,} sub-words of the data, found one with as many others; "
                        "train both with one data.tokenizer"
                    )
        return None

    def reader(self, model: Any) -> Any:
        raise InputError(
            "expected a run that predict reads files with, found one that translates; use mnemos translate"
        )


class TrainedTranslator(Translator):
    """The model and the sub-words of a finished run, or of the folder of its model, and how the run searches.

    Raises InputError for a path that is no folder, or whose task is not translation.
    """

    def __init__(self, folder: str | Path) -> None:
        about = read_preprocessing(Path(folder))
        if not isinstance(about, TranslationPreprocessing):
            raise InputError(
                f"{folder}: expected a run whose task is translation, found one of {about.name}; use mnemos predict"
            )
        self.about, model = about, load(folder)
        super().__init__(model, about.vocabularies(model), about.longest)

    def decoding(self, beams: int | None, n_best: int, length_penalty: float | None) -> BeamConfig:
        """The search; None: as the run's test split was translated. Raises InputError for numbers out of range."""
        beams = self.about.beams if beams is None else beams
        penalty = self.about.length_penalty if length_penalty is None else length_penalty
        return beam_config(self.longest, beams, n_best, penalty)


@near_arguments
def translate(
    run: str | Path | TrainedTranslator,
    sentences: Sequence[str],
    beams: int | None = None,
    n_best: int = 1,
    length_penalty: float | None = None,
    progress: Progress | None = None,
) -> list[list[Translation]]:
    """Translate sentences with a trained run: a list of `n_best` (text, score) for each sentence, best first.

        mnemos.translate("runs/multi30k", ["Two dogs play."])[0][0].text

    run: the folder of a finished run or of its model; to translate again and again, a `TrainedTranslator`, which loads
    them once. sentences: as people write them; an empty one has an empty translation. beams, length_penalty: by default
    those with which the run's test split was scored. progress(done, all) is called after each sentence. Sentences of
    similar length are searched together, at most 4,096 tokens at once.
    score: the sum of the log-probabilities of the sub-words and of the end, divided by their number to the power of
    `length_penalty`, in nats. Raises InputError for a run of another task, and for a sentence that is too long.
    """
    if isinstance(sentences, str):
        raise InputError("mnemos.translate: expected a list of sentences, found a text; put it in a list")
    opened = run if isinstance(run, TrainedTranslator) else TrainedTranslator(run)
    return list(opened.translate(list(sentences), opened.decoding(beams, n_best, length_penalty), progress=progress))
