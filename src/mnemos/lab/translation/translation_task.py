"""The task of translation: batches of pairs, a loss with label smoothing, and BLEU of what the model writes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.atomic import write_text
from mnemos.generators import AUGMENT, generator
from mnemos.lab.tasks.batch import IGNORE, counted
from mnemos.lab.tasks.metrics import PERPLEXITY, CorpusMetric, negative_log_likelihood
from mnemos.lab.tasks.source_attention import source_attention
from mnemos.lab.tasks.task import Split, Task
from mnemos.lab.tasks.token_batches import TokenBatches
from mnemos.models.encoder_decoder import Pair
from mnemos.modes import evaluating
from mnemos.types import InputError, JSONObject, likelihood_of

from .bpe_dropout import BPEDropout
from .parallel_corpus import Corpus, Vocabularies
from .translating import Decoding, Translator, decoded, padded
from .translation_preprocessing import TranslationPreprocessing
from .translation_scores import BLEU, CHRF, NAMES, TOKENISED, Scorer
from .translation_vocabulary import END, START

if TYPE_CHECKING:
    from .translation import TranslationConfig

TRANSLATIONS = "translations.jsonl"  # in a run's folder: the test split, translated
SHOWN = 8
_GREEDY = 1
_ABOUT = {
    BLEU: "Share of common word sequences with the reference, 0 to 100, of detokenised text.",
    CHRF: "F-score of common sequences of characters, 0 to 100.",
    TOKENISED: "BLEU of Moses tokens, as in fairseq's tables; not comparable with other tokenisations.",
}


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


class TranslationTask(Task):
    """A `Task` over parallel text; see `TranslationConfig`. The first metric is BLEU.

    The model is called as model(Pair(source, target, mask), None, mask=mask), and has `encode`
    (`mnemos.EncoderDecoder`). Training batch i is a pure function of (i, batch_size, seed).
    """

    inputs = "pairs"

    def __init__(
        self,
        corpora: Mapping[Split, Corpus],
        vocabularies: Vocabularies,
        config: "TranslationConfig",
        preprocessing: TranslationPreprocessing,
        decoding: Decoding,
    ) -> None:
        self.corpora, self.vocabularies, self.config, self.decoding = corpora, vocabularies, config, decoding
        self._preprocessing = preprocessing
        self.vocab_size, self.max_length = vocabularies.target.size, config.longest + 1
        self._dropouts = [BPEDropout(one, config.bpe_dropout) for one in vocabularies] if config.bpe_dropout else []
        self._batches: dict[tuple[Split, int], TokenBatches] = {}
        self.scorer = Scorer(config.target, vocabularies.target.lowercase)
        self.metrics = (*(self._metric(name) for name in NAMES), PERPLEXITY)
        known = len(corpora["valid"])
        self._some = set(np.linspace(0, known - 1, min(known, config.valid_translated)).astype(int).tolist())

    def _metric(self, name: str) -> CorpusMetric:
        signature = self.scorer.signatures[name]
        some = f"at most {self.config.valid_translated:,} sentences, greedy"
        how = f"{_ABOUT[name]} Test split: beam {self.decoding.beams}; validation split: {some}. {signature}"
        return CorpusMetric(
            name,
            True,
            how,
            "{name} {value:.2f}",
            collect=self.translated,
            value=lambda records: self.scorer.score(name, *self._texts(records)),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Sub-words of the target, of the source where it has others, and the tokens of the longest sentence."""
        found = {"vocab_size": self.vocab_size, "max_length": self.max_length}
        return found if self.vocabularies.joint else found | {"source_vocab_size": self.vocabularies.source.size}

    # The data.

    def train_batch(self, index: int, batch_size: int, seed: int) -> PairBatch:
        """Training batch `index`. Cost: O(tokens); with BPE dropout about 30 µs per word more.

        BPE dropout divides the words of a planned batch, which may then have more than `data.batch_tokens` tokens.
        """
        rows = self._plan("train", batch_size).batch(index, seed)
        if not self._dropouts:
            return self._batch("train", rows)
        random = generator(seed, AUGMENT, index)
        return self._batch("train", rows, lambda side, row: self._dropouts[side](row, random))

    def batches(self, split: Literal["valid", "test"], batch_size: int) -> Iterator[PairBatch]:
        """Every pair of a held-out split once, the longest first."""
        return (self._batch(split, rows) for rows in self._plan(split, batch_size).once())

    def _plan(self, split: Split, batch_size: int) -> TokenBatches:
        key = split, batch_size
        if key not in self._batches:
            self._batches[key] = TokenBatches(self.corpora[split].lengths, self.config.batch_tokens, batch_size)
        return self._batches[key]

    def _batch(self, split: Split, rows: Sequence[int] | Any, divide: Any = None) -> PairBatch:
        corpus = self.corpora[split]
        sides: list[list[list[int]]] = [[], []]
        for row in rows:
            for side, tokens in enumerate((corpus.source, corpus.target)):
                whole = tokens.row(int(row)).tolist()
                other = whole if divide is None else divide(side, whole)
                sides[side].append(other if len(other) <= self.config.longest else whole)
        source, source_mask = padded(sides[0], END)
        targets, mask = padded(sides[1], END)
        shown = torch.cat([torch.full((len(targets), 1), START), targets[:, :-1]], 1)
        if mask is not None:
            targets = torch.where(mask, targets, IGNORE)
        return PairBatch(Pair(source, shown, source_mask), targets, mask, *self._marks(split, rows))

    def _marks(self, split: Split, rows: Any) -> tuple[Tensor, Tensor]:
        """(numbers of the rows among the held-out pairs, beams of each row)."""
        numbers = torch.tensor([int(row) for row in rows])
        if split == "train":
            return numbers, torch.zeros_like(numbers)
        if split == "test":
            return numbers + len(self.corpora["valid"]), torch.full_like(numbers, self.decoding.beams)
        return numbers, torch.tensor([_GREEDY * (row in self._some) for row in numbers.tolist()])

    def size(self, split: Split) -> int:
        """The number of target tokens, each sentence with its </s>."""
        return int(self.corpora[split].lengths[:, 1].sum(dtype=np.int64))

    def epoch(self, batch_size: int) -> float:
        """The number of training batches in an epoch."""
        return float(len(self._plan("train", batch_size)))

    def fewest_rows(self, batch_size: int) -> int:
        """See the base class: `data.batch_tokens` limits the batches of the longest sentences."""
        return self._plan("train", batch_size).fewest

    def mean_rows(self, batch_size: int) -> float:
        """The mean number of pairs of a training batch, which data.batch_tokens may limit below batch_size."""
        return len(self.corpora["train"]) / self.epoch(batch_size)

    def example(self) -> PairBatch:
        """A pair of the greatest length."""
        row = torch.full((1, self.max_length), START)
        number = torch.zeros(1, dtype=torch.int64)
        return PairBatch(Pair(row, row.clone(), None), row.clone(), None, number, number)

    # Loss and metrics.

    def loss(self, model: nn.Module, outputs: Any, batch: PairBatch) -> Tensor:
        """The sum of −log p(target), in nats; in training with label smoothing (Szegedy et al. 2016).

        With smoothing ε and V sub-words, a target's loss is −(1 − ε) log p(target) − ε/V Σ log p. Evaluations have
        none, so that their loss is a likelihood.
        """
        smoothing = self.config.label_smoothing if model.training else 0.0
        if not smoothing:
            return negative_log_likelihood(model, outputs, batch)  # type: ignore[arg-type]
        if likelihood_of(model) is not None:
            raise InputError(
                f"data.label_smoothing: expected 0 for {type(model).__name__}, whose outputs are no logits, found "
                f"{smoothing}; use 0"
            )
        return F.cross_entropy(
            outputs.flatten(0, -2),
            batch.targets.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=smoothing,
        )

    def count(self, batch: PairBatch) -> int:
        """The number of target tokens."""
        return int(counted(batch.targets))

    def tokens(self, batch: PairBatch) -> int:
        """The tokens of both sides, without padding."""
        mask = batch.inputs.mask
        return self.count(batch) + (batch.inputs.source.numel() if mask is None else int(mask.sum()))

    def resets(self, batch: PairBatch) -> None:
        """None: no state is carried."""
        return None

    def check(self, batch: PairBatch, where: str) -> None:
        """Raise InputError for tokens that the vocabularies lack, or sentences that are too long."""
        sides = (batch.inputs.source, batch.inputs.target)
        for vocabulary, tokens in zip(self.vocabularies, sides, strict=True):
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= vocabulary.size or tokens.shape[1] > self.max_length:
                raise InputError(
                    f"{where}: expected at most {self.max_length} tokens 0 to {vocabulary.size - 1}, found "
                    f"{tokens.shape[1]} of {low} to {high}; check the data"
                )

    def translated(self, model: nn.Module, outputs: Any, batch: PairBatch) -> list[tuple[int, str]]:
        """(number of the pair, translation) of the batch's rows that are translated: the records of BLEU and chrF."""
        chosen = batch.beams.nonzero().flatten()
        if not len(chosen):
            return []
        mask = batch.inputs.mask
        source, mask = batch.inputs.source[chosen], None if mask is None else mask[chosen]
        decoding = Decoding(int(batch.beams[chosen[0]]), 1, self.decoding.length_penalty)
        found = decoded(model, source, mask, decoding, self.max_length)
        texts = [self.vocabularies.target.decode(one[0].tokens.tolist()) for one in found]
        return list(zip(batch.rows[chosen].tolist(), texts, strict=True))

    def _texts(self, records: list[tuple[int, str]]) -> tuple[list[str], list[str]]:
        """(translations, references) of records."""
        held = [*self.corpora["valid"].references, *self.corpora["test"].references]
        return [text for _, text in records], [held[number] for number, _ in records]

    # Results.

    def preprocessing(self) -> TranslationPreprocessing:
        """The languages, the sub-words and the search."""
        return self._preprocessing

    def artifacts(self, model: nn.Module, folder: Path, split: Literal["valid", "test"]) -> JSONObject:
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
        cleaning = {name: vars(corpus.cleaning) | {"kept": len(corpus)} for name, corpus in self.corpora.items()}
        some = [rows[i] for i in self._spread(len(rows))]
        shown = [{"source": r["source"], "wanted": r["reference"], "wrote": r["translation"]} for r in some]
        return {
            "translations": shown,
            "examples": {"translations": about},
            "cleaning": cleaning,
            "signatures": self.scorer.signatures,
            "alignment": self._alignment(model, split, rows),
        }

    def _alignment(self, model: nn.Module, split: Literal["valid", "test"], rows: Sequence[JSONObject]) -> JSONObject:
        """What the model attends to in the source of median length while it writes its translation."""
        corpus, vocabularies = self.corpora[split], self.vocabularies
        number = int(np.argsort(corpus.source.lengths, kind="stable")[len(corpus) // 2])
        source = [*corpus.source.row(number).tolist(), END]
        (written,) = vocabularies.target.encode([rows[number]["translation"]])
        device = next(model.parameters()).device
        pair = torch.tensor([source], device=device), torch.tensor([[START, *written]], device=device)
        weights = source_attention(model, *pair)
        return {
            "rows": vocabularies.target.names([*written, END]),
            "columns": vocabularies.source.names(source),
            "weights": [[round(weight, 3) for weight in row] for row in weights.tolist()],
            "about": "The attention of the last decoder layer to a source (columns) as it writes each sub-word (rows), "
            "the mean over heads.",
        }

    def show(self, model: nn.Module, split: Literal["valid", "test"]) -> list[str]:
        """Some sentences of the split: source, reference and translation; and how the scores but BLEU are computed."""
        found = self._translations(model, split, self._spread(len(self.corpora[split])))
        names = ("source", "reference", "translation")
        lines = ["\n".join(f"  {name:11} {one[name]}" for name in names) for one in found]
        others = ((name, signature) for name, signature in self.scorer.signatures.items() if name != BLEU)
        return [*lines, *(f"  {name}: {signature}" for name, signature in others)]

    @staticmethod
    def _spread(rows: int) -> list[int]:
        return np.linspace(0, rows - 1, min(rows, SHOWN)).astype(int).tolist()

    def _translations(
        self, model: nn.Module, split: Literal["valid", "test"], numbers: Sequence[int]
    ) -> Iterator[JSONObject]:
        """{"source", "reference", "translation", "score"} of pairs of a split, in the order of `numbers`."""
        corpus = self.corpora[split]
        rows = [corpus.source.row(number).tolist() for number in numbers]
        with evaluating(model):
            found = dict(Translator(model, self.vocabularies, self.config.longest).translate(rows, self.decoding))
        for place, number in enumerate(numbers):
            text, score = found[place][0]
            yield {
                "source": corpus.sources[number],
                "reference": corpus.references[number],
                "translation": text,
                "score": round(score, 4),
            }
