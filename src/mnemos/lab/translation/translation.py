"""Translation: parallel text in sub-words, batches by tokens, label smoothing, and BLEU by beam search."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.atomic import write_text
from mnemos.lab.tasks.batch import IGNORE, counted
from mnemos.lab.tasks.files import first_names
from mnemos.lab.tasks.metrics import PERPLEXITY, CorpusMetric, negative_log_likelihood
from mnemos.lab.tasks.task import DataConfig, HeldOut, Split, Task
from mnemos.models.encoder_decoder import Pair
from mnemos.registry import register
from mnemos.types import InputError, JSONObject

from .parallel_corpus import Corpus, TokenBatches, Vocabularies
from .parallel_text import STEMS, PairedFiles, SentencePair, find_pairs, pairs
from .translate import TranslationPreprocessing, Translator, beam_config, pad, search
from .translation_scores import BLEU, CHRF, TOKENISED, TRANSLATIONS, Scorer
from .translation_vocabulary import END, START, SubWordTokens

SHOWN = 8
_ABOUT = {
    BLEU: "Share of common word sequences with the reference, 0 to 100, of detokenised text.",
    CHRF: "F-score of common sequences of characters, 0 to 100.",
    TOKENISED: "BLEU of Moses tokens, as in fairseq's tables; not comparable with other tokenisations.",
}


@register
@dataclass(frozen=True)
class TranslationConfig(DataConfig):
    """Translation from one language to another, learned from parallel text in a folder.

    `path`: a folder with files of each split in both languages, STEM.en and STEM.de, one sentence per line and equally
    many lines; or IWSLT's files, such as train.tags.de-en.en and
    IWSLT14.TED.dev2010.de-en.en.xml; each may be gzipped. The texts are UTF-8. `train`, `valid`, `test`: the stems of
    the splits' files, such as test_2016_flickr; * joins several. "" finds the usual names (`parallel_text.STEMS`).
    `held_out`: every n-th pair of the training files is for validation, instead of files of its own, as fairseq's
    scripts take every 23rd. 0: none.
    `tokenizer`: a tokenizer.json, as `mnemos tokenizer` writes it, for both languages. "": byte-pair encoding with
    `subwords` sub-words is learned from the training split, one for both languages (`joint`) or one each. `lowercase`:
    of such a tokenizer; a file's tokenizer must then lower-case too. Scores ignore case if the tokenizer lower-cases.
    Of the training pairs those with an empty side, with more than `longest` sub-words, or with more than `ratio` times
    as many sub-words on one side (0: any) are left out and counted. A held-out pair that is empty or too long is an
    error.
    A batch has at most `batch_tokens` tokens (`TokenBatches`) and at most train.batch_size rows.
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
    subwords: int = 10_000
    joint: bool = True
    lowercase: bool = False
    longest: int = 250
    ratio: float = 9.0
    batch_tokens: int = 4096
    label_smoothing: float = 0.1
    beams: int = 5
    length_penalty: float = 1.0
    valid_translated: int = 200

    def files(self) -> list[Path]:
        sides = [side for split in STEMS for text in self._find(split) for side in (text.source, text.target)]
        return [*dict.fromkeys(sides), *([Path(self.tokenizer)] if self.tokenizer else [])]

    def build(self) -> "TranslationTask":
        """Read the texts, learn the sub-words if no tokenizer is given, and return the task.

        Raises InputError for settings out of range, missing files, and text that is not as it must be, with its line.
        """
        self._check()
        texts = {split: self._find(split, needed=True) for split in STEMS}
        vocabularies = self._vocabularies(texts["train"])
        limits = vocabularies, self.longest, self.ratio
        train, every_nth = _divide(texts["train"], self.held_out)
        valid = every_nth if self.held_out else pairs(texts["valid"])
        corpora: dict[Split, Corpus] = {
            "train": Corpus(train, *limits, texts=False, strict=False),
            "valid": Corpus(valid, *limits, strict=not self.held_out),
            "test": Corpus(pairs(texts["test"]), *limits),
        }
        return TranslationTask(self, texts, corpora, vocabularies)

    def unscored(self) -> frozenset[str]:
        """The size of batches, the sentences translated in training, and what a given tokenizer decides instead."""
        unused = {"subwords", "joint", "lowercase"} if self.tokenizer else set()
        return frozenset({"batch_tokens", "valid_translated"} | unused)

    def build_to_score(self, split: HeldOut, trained: Any = None) -> "TranslationTask":
        """The task with the run's sub-words, that scores `split` of other parallel text.

        A folder that has no files of the split by the usual names must be scored by their stem, data.test STEM.
        """
        self._check()
        texts = self._find(split, needed=True)
        if isinstance(trained, TranslationPreprocessing) and not self.tokenizer:
            vocabularies = trained.vocabularies()
        else:
            vocabularies = self._vocabularies(texts)
        corpus = Corpus(pairs(texts), vocabularies, self.longest, self.ratio)
        return TranslationTask(self, {split: texts}, dict.fromkeys(STEMS, corpus), vocabularies)

    def _check(self) -> None:
        self.require(
            *(f"{name} >= 1" for name in ("longest", "batch_tokens", "beams", "valid_translated")),
            "0 <= label_smoothing < 1",
            "ratio == 0 or ratio >= 1",
            "held_out == 0 or held_out >= 2",
            "not (valid and held_out)",  # which takes training pairs
            "target != source",
        )

    def _find(self, split: Split, needed: bool = False) -> list[PairedFiles]:
        """The texts of a split; [] for a validation split that is taken from the training split."""
        if split == "valid" and self.held_out:
            return []
        texts = find_pairs(self.path, split, (self.source, self.target), getattr(self, split))
        if texts or not needed:
            return texts
        stem = getattr(self, split) or STEMS[split][0]
        names = first_names(sorted(os.listdir(self.path)))
        more = ", or set data.held_out" if split == "valid" else ""
        raise InputError(
            f"{self.path}: expected {stem}.{self.source} and {stem}.{self.target} (or .xml, with or without .gz), "
            f"found no {split} split of these languages among {names or 'no files'}; name its files with "
            f"data.{split}, or correct data.source and data.target{more}"
        )

    def _vocabularies(self, texts: Sequence[PairedFiles]) -> Vocabularies:
        if not self.tokenizer:
            state = tuple((file, file.stat().st_mtime_ns) for text in texts for file in (text.source, text.target))
            sides = [(0, 1)] if self.joint else [(0,), (1,)]
            learned = [_learn((*texts,), state, side, self.subwords, self.lowercase, self.held_out) for side in sides]
            return Vocabularies(learned[0], learned[-1])
        read = SubWordTokens.read(self.tokenizer)
        if self.lowercase and not read.lowercase:
            raise InputError(
                f"data.lowercase: expected a tokenizer that lower-cases, found {self.tokenizer}, which keeps the case; "
                "make it with mnemos tokenizer --lowercase, or set data.lowercase False"
            )
        return Vocabularies(read, read)


@lru_cache(maxsize=4)  # runs that are compared open the same data one after the other
def _learn(
    texts: tuple[PairedFiles, ...],
    state: tuple[Any, ...],
    sides: tuple[int, ...],
    size: int,
    lowercase: bool,
    held_out: int,
) -> SubWordTokens:
    """The sub-words of the training split's sides. state: when the files were changed, so that they are read again."""
    training, _ = _divide(texts, held_out)
    return SubWordTokens.train((pair[:2][side] for pair in training for side in sides), size, lowercase)


def _divide(texts: Sequence[PairedFiles], every: int) -> tuple[Iterator[SentencePair], Iterator[SentencePair]]:
    """(all pairs but every n-th, every n-th); 0: all, and none."""
    others = (pair for number, pair in enumerate(pairs(texts), start=1) if not every or number % every)
    return others, (pair for number, pair in enumerate(pairs(texts), start=1) if every and number % every == 0)


class PairBatch(NamedTuple):
    """A batch of sentence pairs.

    inputs: the source with its </s>, and the target behind <s>. targets: the target with its </s> [B, T], IGNORE where
    it ended. mask: [B, T] bool, of the target, or None. rows: [B], the pairs' numbers in the held-out splits. beams:
    [B], how many hypotheses the evaluation's translation keeps; 0: the row is not translated.
    """

    inputs: Pair
    targets: Tensor
    mask: Tensor | None
    rows: Tensor
    beams: Tensor


def _repeated(corpora: Mapping[Split, Corpus]) -> Iterator[str]:
    """A line for each held-out split with pairs of the training split, which say nothing of new sentences."""
    train = corpora["train"]
    for split in ("valid", "test"):
        own = [(a.tobytes(), b.tobytes()) for a, b in zip(corpora[split].source, corpora[split].target, strict=True)]
        # One by one: the training split may have millions.
        known = set(own).intersection(
            (a.tobytes(), b.tobytes()) for a, b in zip(train.source, train.target, strict=True)
        )
        if same := sum(pair in known for pair in own):
            yield (
                f"warning: {same:,} of {len(own):,} {split} pairs are in the training split too: these say nothing of "
                "new sentences"
            )


class TranslationTask(Task):
    """A `Task` over parallel text; see `TranslationConfig`. The first metric is BLEU.

    The model is called as model(Pair(source, target, mask), None, mask=mask), and has `encode`
    (`mnemos.EncoderDecoder`). Training batch i is a pure function of (i, batch_size, seed).
    """

    inputs = "pairs"

    def __init__(
        self,
        config: TranslationConfig,
        texts: Mapping[Split, Sequence[PairedFiles]],
        corpora: Mapping[Split, Corpus],
        vocabularies: Vocabularies,
    ) -> None:
        for split in texts:
            if not len(corpora[split]):
                raise InputError(
                    f"{config.path}: expected a {split} split of at least one pair, found that none of its "
                    f"{corpora[split].cleaning['read']:,} is left; give more text, or raise data.longest and data.ratio"
                )
        self.corpora, self.vocabularies, self.config = corpora, vocabularies, config
        self.decoding = beam_config(config.longest, config.beams, 1, config.length_penalty)
        self.vocab_size, self.max_length = vocabularies.target.size, config.longest + 1
        self._plan = cache(lambda split, rows: TokenBatches(corpora[split].lengths, config.batch_tokens, rows))
        self.scorer = Scorer(config.target, vocabularies.target.lowercase)
        held_out = len(corpora["valid"])
        self._some = {*np.linspace(0, held_out - 1, min(held_out, config.valid_translated)).astype(int).tolist()}

        # --- the metrics, and the lines that say what was read ---
        some = f"at most {config.valid_translated:,} sentences, greedy"
        how = f"Test split: beam {config.beams}; validation split: {some}."
        signed = {name: f"{about} {how} {self.scorer.signatures[name]}" for name, about in _ABOUT.items()}
        self.metrics = (
            *(
                CorpusMetric(
                    name,
                    True,
                    about,
                    "{name} {value:.2f}",
                    self.translated,
                    partial(self._score, name),
                    bounds=(0, 100),
                )
                for name, about in signed.items()
            ),
            PERPLEXITY,
        )
        lines = []
        for split, parts in texts.items():
            stems = ", ".join(text.stem for text in parts) or f"one pair in {config.held_out} of train"
            lines.append(f"{split}: {stems}, {corpora[split].describe()}")
        source, target = vocabularies
        size = f"{source.size:,}, shared" if vocabularies.joint else f"{source.size:,} and {target.size:,}"
        origin = config.tokenizer or "learned from the training split"
        lines += _repeated(corpora) if corpora["test"] is not corpora["train"] else ()
        self.about = (*lines, f"{config.source}-{config.target}, sub-words: {size}, {origin}")

    @property
    def sizes(self) -> dict[str, int]:
        """Sub-words of the target, of the source where it has others, and the tokens of the longest sentence."""
        sizes = {"vocab_size": self.vocab_size, "max_length": self.max_length}
        return sizes if self.vocabularies.joint else sizes | {"source_vocab_size": self.vocabularies.source.size}

    # ---- data ----

    def train_batch(self, index: int, batch_size: int, seed: int) -> PairBatch:
        """Training batch `index`. Cost: O(tokens)."""
        return self._batch("train", self._plan("train", batch_size).batch(index, seed))

    def batches(self, split: HeldOut, batch_size: int) -> Iterator[PairBatch]:
        return (self._batch(split, rows) for rows in self._plan(split, batch_size).once())

    def _batch(self, split: Split, rows: Any) -> PairBatch:
        """The pairs with these numbers."""
        corpus, numbers = self.corpora[split], torch.as_tensor(rows)
        source, source_mask = pad([corpus.source[row] for row in numbers.tolist()], END)
        targets, mask = pad([corpus.target[row] for row in numbers.tolist()], END)
        shown = torch.cat([torch.full((len(targets), 1), START), targets[:, :-1]], 1)
        if mask is not None:
            targets = torch.where(mask, targets, IGNORE)
        beams = torch.zeros_like(numbers)
        if split == "test":
            # Pairs of both held-out splits have numbers of their own: records of a metric name them alone.
            numbers, beams = numbers + len(self.corpora["valid"]), torch.full_like(numbers, self.decoding.beams)
        elif split == "valid":  # some of them, greedily
            beams = torch.tensor([int(row in self._some) for row in numbers.tolist()])
        return PairBatch(Pair(source, shown, source_mask), targets, mask, numbers, beams)

    def size(self, split: Split) -> int:
        """The number of target tokens, each sentence with its </s>."""
        return int(self.corpora[split].lengths[:, 1].sum(dtype=np.int64))

    def epoch(self, batch_size: int) -> float:
        return float(len(self._plan("train", batch_size)))

    def fewest_rows(self, batch_size: int) -> int:
        """See the base class: `data.batch_tokens` limits the batches of the longest sentences."""
        return self._plan("train", batch_size).fewest

    def mean_rows(self, batch_size: int) -> float:
        return len(self.corpora["train"]) / self.epoch(batch_size)

    def example(self) -> PairBatch:
        row = torch.full((1, self.max_length), START)
        number = torch.zeros(1, dtype=torch.int64)
        return PairBatch(Pair(row, row.clone(), None), row.clone(), None, number, number)

    # ---- loss and metrics ----

    def loss(self, model: nn.Module, outputs: Any, batch: PairBatch) -> Tensor:
        """The sum of −log p(target), in nats; in training with label smoothing (Szegedy et al. 2016).

        With smoothing ε and V sub-words, a target's loss is −(1 − ε) log p(target) − ε/V Σ log p. Evaluations have
        none, so that their loss is a likelihood.
        """
        smoothing = self.config.label_smoothing if model.training else 0.0
        if not smoothing:
            return negative_log_likelihood(model, outputs, batch)  # type: ignore[arg-type]
        logits, targets = outputs.flatten(0, -2), batch.targets.flatten()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)

    def count(self, batch: PairBatch) -> int:
        return int(counted(batch.targets))

    def tokens(self, batch: PairBatch) -> int:
        mask = batch.inputs.mask
        return self.count(batch) + (batch.inputs.source.numel() if mask is None else int(mask.sum()))

    def translated(self, model: nn.Module, outputs: Any, batch: PairBatch) -> list[tuple[int, str]]:
        """(number of the pair, translation) of the batch's rows that are translated: the records of BLEU and chrF."""
        chosen = batch.beams.nonzero().flatten()
        if not len(chosen):
            return []
        mask = batch.inputs.mask
        source, mask = batch.inputs.source[chosen], None if mask is None else mask[chosen]
        best = search(model, source, mask, replace(self.decoding, beams=int(batch.beams[chosen[0]])))
        texts = [self.vocabularies.target.decode(one[0].tokens.tolist()) for one in best]
        return list(zip(batch.rows[chosen].tolist(), texts, strict=True))

    def _score(self, name: str, records: list[tuple[int, str]]) -> float:
        references = [*self.corpora["valid"].references, *self.corpora["test"].references]
        return self.scorer.score(name, [text for _, text in records], [references[number] for number, _ in records])

    # ---- results ----

    def preprocessing(self) -> TranslationPreprocessing:
        c, (source, target) = self.config, self.vocabularies
        other = "" if self.vocabularies.joint else target.content
        return TranslationPreprocessing(c.source, c.target, source.content, other, c.longest, c.beams, c.length_penalty)

    def artifacts(self, model: nn.Module, folder: Path, split: HeldOut) -> JSONObject:
        """translations.jsonl, the split with its translations; how many pairs were left out; the scores' signatures."""
        rows = list(self._translations(model, split, range(len(self.corpora[split]))))
        write_text(folder / TRANSLATIONS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        about = {
            "title": "Translations",
            "given": "wanted",
            "found": "wrote",
            "beside": "source",
            "compared": True,
            "about": f"Sentences of the {split} split, evenly spaced, translated with beam {self.decoding.beams}.",
            "exact": False,
        }
        cleaning = {name: corpus.cleaning | {"kept": len(corpus)} for name, corpus in self.corpora.items()}
        shown = [
            {"source": r["source"], "wanted": r["reference"], "wrote": r["translation"]}
            for r in (rows[i] for i in _spread(len(rows)))
        ]
        return {
            "translations": shown,
            "examples": {"translations": about},
            "cleaning": cleaning,
            "signatures": self.scorer.signatures,
        }

    def show(self, model: nn.Module, split: HeldOut) -> list[str]:
        """Some sentences of the split: source, reference and translation; and how the scores but BLEU are computed."""
        rows = self._translations(model, split, _spread(len(self.corpora[split])))
        names = ("source", "reference", "translation")
        lines = ["\n".join(f"  {name:11} {one[name]}" for name in names) for one in rows]
        others = ((name, signature) for name, signature in self.scorer.signatures.items() if name != BLEU)
        return [*lines, *(f"  {name}: {signature}" for name, signature in others)]

    def _translations(self, model: nn.Module, split: HeldOut, numbers: Sequence[int]) -> Iterator[JSONObject]:
        """{"source", "reference", "translation", "score"} of pairs of a split, in the order of `numbers`."""
        corpus = self.corpora[split]
        rows = [corpus.source[number] for number in numbers]
        done = dict(Translator(model, self.vocabularies, self.config.longest).translate_rows(rows, self.decoding))
        for i, number in enumerate(numbers):
            text, score = done[i][0]
            yield {
                "source": corpus.sources[number],
                "reference": corpus.references[number],
                "translation": text,
                "score": round(score, 4),
            }


def _spread(rows: int) -> list[int]:
    """The numbers of the rows that are shown."""
    return np.linspace(0, rows - 1, min(rows, SHOWN)).astype(int).tolist()
