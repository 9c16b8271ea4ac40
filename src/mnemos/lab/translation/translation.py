"""Translation: parallel text in sub-words, batches by tokens, label smoothing, and BLEU by beam search."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from mnemos.config import DataConfig
from mnemos.lab.tasks.task import Split
from mnemos.registry import register
from mnemos.types import InputError

from .parallel_corpus import Corpus, Limits, Vocabularies
from .parallel_files import STEMS, PairedFiles, find_pairs
from .parallel_text import SentencePair, pairs
from .translating import Decoding
from .translation_preprocessing import TranslationPreprocessing
from .translation_task import TranslationTask
from .translation_vocabulary import SubWordTokens


@register
@dataclass(frozen=True)
class TranslationConfig(DataConfig):
    """Translation from one language to another, learned from parallel text in a folder.

    `path`: a folder with files of each split in both languages, STEM.en and STEM.de, one sentence per line and equally
    many lines; or STEM.tsv with two columns; or IWSLT's files, such as train.tags.de-en.en and
    IWSLT14.TED.dev2010.de-en.en.xml; each may be gzipped. The texts are UTF-8. `train`, `valid`, `test`: the stems of
    the splits' files, such as test_2016_flickr; * joins several. "" finds the usual names (`parallel_files.STEMS`).
    `held_out`: every n-th pair of the training files is for validation, instead of files of its own, as fairseq's
    scripts take every 23rd. 0: none.
    `tokenizer`: a tokenizer.json, as `mnemos tokenizer` writes it, or a .model of sentencepiece, for both languages, or
    for the source where `target_tokenizer` names another. "": byte-pair encoding with `subwords` sub-words is learned
    from the training split, one for both languages (`joint`) or one each. `lowercase`: of such a tokenizer; a file's
    tokenizer must then lower-case too. Scores ignore case if the tokenizer of the target lower-cases.
    `bpe_dropout`: the share of merges that are left out in training (`bpe_dropout.BPEDropout`).
    Of the training pairs those with an empty side, with more than `longest` sub-words, or with more than `ratio` times
    as many sub-words on one side (0: any) are left out and counted. A held-out pair that is empty or too long is an
    error.
    A batch has at most `batch_tokens` tokens (`TokenBatches`) and at most train.batch_size rows. Batches are planned
    before BPE dropout, which makes sentences longer: with it a training batch may have more tokens.
    `label_smoothing`: the share of the probability that training spreads over all sub-words.
    `beams`, `length_penalty`: of the translations that are scored. In training `valid_translated` sentences of the
    validation split are translated greedily at each evaluation.
    """

    name: ClassVar[str] = "translation"

    path: str = "multi30k-en-de"
    source: str = "en"
    target: str = "de"
    train: str = ""
    valid: str = ""
    test: str = ""
    held_out: int = 0
    tokenizer: str = ""
    target_tokenizer: str = ""
    subwords: int = 10_000
    joint: bool = True
    lowercase: bool = False
    bpe_dropout: float = 0.0
    longest: int = 250
    ratio: float = 9.0
    batch_tokens: int = 4096
    label_smoothing: float = 0.1
    beams: int = 5
    length_penalty: float = 1.0
    valid_translated: int = 200

    def files(self) -> list[Path]:
        """The texts, and the tokenizers that are given."""
        splits = [split for split in STEMS if not (split == "valid" and self.held_out)]
        texts = [file for split in splits for found in self._find(split) for file in dict.fromkeys(found[1:3])]
        return [*dict.fromkeys(texts), *(Path(name) for name in (self.tokenizer, self.target_tokenizer) if name)]

    def build(self) -> TranslationTask:
        """Read the texts, learn the sub-words if no tokenizer is given, and return the task.

        Raises InputError for settings out of range, missing files, and text that is not as it must be, with its line.
        """
        self._check()
        texts = {split: self._needed(split) for split in STEMS}
        vocabularies = self._vocabularies(tuple(texts["train"]))
        limits = Limits(self.longest, self.ratio)
        corpora = {split: Corpus() for split in STEMS}
        corpora["train"].add(_others(pairs(texts["train"]), self.held_out), vocabularies, limits, False, False)
        taken = bool(self.held_out)
        valid = _every(pairs(texts["train"]), self.held_out) if taken else pairs(texts["valid"])
        corpora["valid"].add(valid, vocabularies, limits, texts=True, strict=not taken)
        corpora["test"].add(pairs(texts["test"]), vocabularies, limits, texts=True, strict=True)
        return self._task(texts, corpora, vocabularies)

    def unscored(self) -> frozenset[str]:
        """The size of batches, the sentences translated in training, and what a given tokenizer decides instead."""
        unused = {"subwords", "joint", "lowercase"} if self.tokenizer else set()
        return frozenset({"batch_tokens", "valid_translated"} | unused)

    def build_to_score(self, split: Literal["valid", "test"], trained: Any = None) -> TranslationTask:
        """The task with the run's sub-words, that scores `split` of other parallel text.

        A folder that has no files of the split by the usual names must be scored by their stem, data.test STEM.
        """
        self._check()
        texts = self._needed(split)
        if isinstance(trained, TranslationPreprocessing) and not self.tokenizer:
            vocabularies = trained.vocabularies()
        else:
            vocabularies = self._vocabularies(tuple(texts))
        corpus, limits = Corpus(), Limits(self.longest, self.ratio)
        corpus.add(pairs(texts), vocabularies, limits, texts=True, strict=True)
        return self._task({split: texts}, dict.fromkeys(STEMS, corpus), vocabularies)

    def _check(self) -> None:
        for name in ("longest", "batch_tokens", "beams", "valid_translated"):
            if getattr(self, name) < 1:
                raise InputError(f"data.{name} must be at least 1, found {getattr(self, name)}")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"data.label_smoothing must be at least 0 and below 1, found {self.label_smoothing}")
        if not (self.ratio == 0 or self.ratio >= 1):
            raise InputError(f"data.ratio must be 0 (any) or at least 1, found {self.ratio}")
        if self.held_out < 0 or self.held_out == 1:
            raise InputError(f"data.held_out must be 0, or at least 2 for every second pair, found {self.held_out}")
        if self.held_out and self.valid:
            raise InputError(
                f"data.valid: expected none with data.held_out, which takes training pairs, found {self.valid!r}; "
                "leave one of the two out"
            )
        if self.source == self.target:
            raise InputError(
                f"data.target: expected another language than data.source, found {self.target!r} for both; change one"
            )
        if self.target_tokenizer and not self.tokenizer:
            raise InputError(
                f"data.target_tokenizer: expected data.tokenizer beside it, found {self.target_tokenizer!r} alone; "
                "name the tokenizer of the source"
            )

    def _find(self, split: Split) -> list[PairedFiles]:
        return find_pairs(self.path, split, (self.source, self.target), getattr(self, split))

    def _needed(self, split: Split) -> list[PairedFiles]:
        """The texts of a split; [] for a validation split that is taken from the training split."""
        if split == "valid" and self.held_out:
            return []
        found = self._find(split)
        if found:
            return found
        stem = STEMS[split][0]
        more = ", or set data.held_out" if split == "valid" else ""
        raise InputError(
            f"{self.path}: expected {stem}.{self.source} and {stem}.{self.target} (or .tsv, .xml, with or without "
            f".gz), found no {split} split of these languages; name its files with data.{split}{more}"
        )

    def _vocabularies(self, texts: tuple[PairedFiles, ...]) -> Vocabularies:
        if self.tokenizer:
            made = [SubWordTokens.read(name) for name in (self.tokenizer, self.target_tokenizer) if name]
            for name, one in zip((self.tokenizer, self.target_tokenizer), made, strict=False):
                if self.lowercase and not one.lowercase:
                    raise InputError(
                        f"data.lowercase: expected a tokenizer that lower-cases, found {name}, which keeps the case; "
                        "make it with mnemos tokenizer --lowercase (sentencepiece: nmt_nfkc_cf), or set data.lowercase "
                        "False"
                    )
            return Vocabularies(made[0], made[-1])
        state = tuple((file, file.stat().st_mtime_ns) for text in texts for file in text[1:3])
        sides = [(0, 1)] if self.joint else [(0,), (1,)]
        made = [_learned(texts, state, side, self.subwords, self.lowercase, self.held_out) for side in sides]
        return Vocabularies(made[0], made[-1])

    def _task(
        self, texts: dict[Split, list[PairedFiles]], corpora: dict[Split, Corpus], vocabularies: Vocabularies
    ) -> TranslationTask:
        for split in STEMS:
            if not len(corpora[split]):
                raise InputError(
                    f"{self.path}: expected a {split} split of at least one pair, found that none of its "
                    f"{corpora[split].cleaning.read:,} is left; give more text, or raise data.longest and data.ratio"
                )
        about = TranslationPreprocessing(
            self.source,
            self.target,
            vocabularies.source.content,
            "" if vocabularies.joint else vocabularies.target.content,
            self.longest,
            self.beams,
            self.length_penalty,
        )
        task = TranslationTask(corpora, vocabularies, self, about, Decoding(self.beams, 1, self.length_penalty))
        task.about = tuple(self._about(texts, corpora, vocabularies))
        return task

    def _about(
        self, texts: dict[Split, list[PairedFiles]], corpora: dict[Split, Corpus], vocabularies: Vocabularies
    ) -> Iterator[str]:
        """What the splits hold, and how many pairs were left out."""
        for split, found in texts.items():
            stems = ", ".join(text.stem for text in found) or f"every {_ordinal(self.held_out)} pair of train"
            yield f"{split}: {stems}, {corpora[split].cleaning.said(Limits(self.longest, self.ratio))}"
        source, target = vocabularies
        where = self.tokenizer or "learned from the training split"
        size = f"{source.size:,}, shared" if vocabularies.joint else f"{source.size:,} and {target.size:,}"
        yield f"{self.source}-{self.target}, sub-words: {size}, {where}"


@lru_cache(maxsize=4)  # runs that are compared open the same data one after the other
def _learned(
    texts: tuple[PairedFiles, ...],
    state: tuple[Any, ...],
    sides: tuple[int, ...],
    size: int,
    lowercase: bool,
    held_out: int,
) -> SubWordTokens:
    """The sub-words of the training split's sides. state: when the files were changed, so that they are read again."""
    found = _others(pairs(texts), held_out)
    return SubWordTokens.train(((pair.source, pair.target)[side] for pair in found for side in sides), size, lowercase)


def _ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, … 11th, … 21st."""
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(last, 'th') }"


def _others(found: Iterator[SentencePair], every: int) -> Iterator[SentencePair]:
    """All pairs but every n-th; all for 0."""
    return (pair for number, pair in enumerate(found, start=1) if not every or number % every)


def _every(found: Iterator[SentencePair], every: int) -> Iterator[SentencePair]:
    """Every n-th pair."""
    return (pair for number, pair in enumerate(found, start=1) if number % every == 0)
