"""Language modelling of text as bytes, words or sub-words: any file or folder, or Python's standard library."""

import codecs
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mnemos.errors import plural, say
from mnemos.generate.stream import Stream
from mnemos.modes import evaluating
from mnemos.registry import register
from mnemos.types import InputError, JSONObject, RecurrentModel

from .batch import Batch
from .files import check_text, first_names, read_bytes, repeated
from .metrics import ACCURACY, BITS_PER_BYTE, PERPLEXITY, bits_per_byte
from .no_learning import text_scores
from .preprocessing import Predicted, Preprocessing
from .task import SPLITS, DataConfig, HeldOut, Sampling, Split, Task
from .text_files import Document, TextFiles, choose_split, find_text, nothing_found, read_documents, split_documents
from .token_task import Documents, SegmentedTask, sampling_options
from .vocabulary import Bytes, SubWords, Tokens, Vocabulary, Words

Encoded = dict[str, Tokens]  # the tokens of documents by their names
SCORED = 1_000  # bytes: with fewer, the loss per byte has a standard error of about 0.1 nat
_STDIN = "-"
TEXTS, GIVEN, WRITTEN = 3, 120, 280  # documents of a report, and tokens of each before and after the model goes on
TEMPERATURE = 0.8


@register
@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Language modelling of text: bytes, words or sub-words. Each file is a document; empty ones are ignored.

    `path` is a file or a folder; files may be gzipped. None: the *.py files of Python's standard library, as of its
    version.
    A folder gives the splits itself by folders train, valid (validation, val, dev) and test, or by official names such
    as wiki.train.tokens and wiki.valid.tokens, or train.txt and test.txt, or the folders in it do. Other files beside
    them are left out. Of any other folder, every file at any depth that is text is read, except hidden files, licences,
    checksums and a README at the top.
    `path` may also be a table (.jsonl, .csv, .tsv, .parquet), a folder of such, or one that `save_to_disk` of the
    library `datasets` wrote: each row is a document, whose text is in `column`. Needs the extra `data`.
    A split that the folder does not give takes a share `held_out` of the documents, at least one, by the hashes of
    their names; where there is none to spare, each is cut, and the held-out splits take shares of its end.
    `tokens` says what a token is. "bytes": the start token is byte 0. "words": what white space separates, and <eos>
    for a line end; the vocabulary is that of the training split, the most frequent words first, at most `words` of them
    (0: all), and any other word is <unk>. FILE.json: sub-words, by a tokenizer.json of the library tokenizers. Text
    that is not read as bytes must be UTF-8, cut at line ends.
    A document longer than `longest` tokens is divided into several documents, each with a new state, so that one long
    file does not occupy one row of an evaluation while the others wait. `segment` is T.
    """

    name: ClassVar[str] = "text"

    path: str | None = None
    segment: int = 512
    held_out: float = 0.05
    longest: int = 65_536
    tokens: str = "bytes"
    words: int = 0
    column: str | None = None

    def files(self) -> list[Path]:
        named = [] if self.tokens in ("bytes", "words") else [Path(self.tokens)]
        return [*self._find().read, *named]

    def build(self) -> "TextTask":
        corpus = self._find()
        splits = split_documents(corpus, self.held_out, self.tokens != "bytes")
        for split in SPLITS[1:]:
            if 0 < (size := sum(map(len, splits[split].values()))) < SCORED:
                fix = "add text to it" if split in corpus.splits else "add text, or raise data.held_out"
                raise InputError(
                    f"{corpus.folder}: expected a {split} split of at least {SCORED:,} bytes, because a smaller one "
                    f"cannot be scored, found {size:,}; {fix}"
                )
        vocabulary = self._vocabulary(splits["train"])
        about = []
        if self.path is None:
            about += ["text   Python's standard library, the default: --data.path names a text of your own"]
        whole = "train" if corpus.splits else "the documents" if corpus.has_tables else "the files"
        for split in SPLITS:
            source = f", a share of {whole}" if split != "train" and split not in corpus.splits else ""
            about.append(f"{split:5}  {_described(corpus, splits[split], source)}")
        if corpus.left_out:
            about.append(f"left out: {first_names([corpus.name(file) for file in corpus.left_out])}")
        about += repeated(
            {s: {name: hashlib.sha256(text.tobytes()).digest() for name, text in splits[s].items()} for s in SPLITS}
        )
        encoded = {split: _encode(splits[split], vocabulary) for split in SPLITS}
        return self._task(encoded, vocabulary, [*about, *_about_tokens(encoded, vocabulary)])

    def build_to_score(self, split: HeldOut, trained: Any = None) -> "TextTask":
        """The task that scores other text than a run was trained on: the split if the folder gives it, else all text.

        The vocabulary is that of the run, whose preprocessing is `trained`; without it, that of the text.
        """
        corpus = self._find(scoring=True)
        documents = read_documents(choose_split(corpus, split), self.tokens != "bytes")
        same = isinstance(trained, TextPreprocessing) and self.tokens == trained.tokens
        vocabulary = trained.vocabulary() if same else self._vocabulary(documents)
        encoded = _encode(documents, vocabulary)
        what = f"the {split} split" if corpus.splits else "the whole text"
        left = f"; left out: {first_names([corpus.name(file) for file in corpus.left_out])}" if corpus.left_out else ""
        about = [f"scored: {what}, {_described(corpus, documents)}{left}", *_about_tokens({split: encoded}, vocabulary)]
        task = self._task(dict.fromkeys(SPLITS, encoded), vocabulary, about)  # a task has no empty split
        task.whole, task.fitted = not corpus.splits, False
        return task

    def _find(self, scoring: bool = False) -> TextFiles:
        words = "words == 0 or (words >= 3 and tokens == 'words')"  # <eos> and <unk> are two of them
        self.require("0 < held_out < 0.5", "longest >= 1", "segment >= 1", words)
        return find_text(self.path, scoring, tables=True, column=self.column)

    def _vocabulary(self, train: Mapping[str, Document]) -> Vocabulary:
        if self.tokens == "bytes":
            return Bytes()
        if self.tokens == "words":
            return Words.count(((name, text.tobytes()) for name, text in train.items()), self.words)
        if not Path(self.tokens).is_file():
            raise InputError(
                f'data.tokens: expected "bytes", "words" or the file of a tokenizer.json, found {self.tokens!r}, which '
                "is no file; check the path"
            )
        return SubWords.read(self.tokens)

    def _task(self, encoded: Mapping[Split, Encoded], vocabulary: Vocabulary, about: Sequence[str]) -> "TextTask":
        splits = {
            split: [text[i : i + self.longest] for text in own.values() for i in range(0, len(text), self.longest)]
            for split, own in encoded.items()
        }
        task = TextTask(splits, self.segment, vocabulary, self.tokens)
        task.about = tuple(about)
        return task


def _described(corpus: TextFiles, documents: Mapping[str, Document], source: str = "") -> str:
    count = plural(len(documents), "document" if corpus.has_tables else "file")
    return f"{count}, {sum(map(len, documents.values())):,} bytes{source}: {first_names(list(documents))}"


def _encode(documents: Mapping[str, Document], vocabulary: Vocabulary) -> Encoded:
    encoded = {name: vocabulary.encode(text.tobytes(), name) for name, text in documents.items()}
    return {name: tokens for name, tokens in encoded.items() if len(tokens)}  # a blank without a line end has none


def _about_tokens(encoded: Mapping[Split, Encoded], vocabulary: Vocabulary) -> list[str]:
    """How much of each split the vocabulary has; nothing for bytes."""
    if isinstance(vocabulary, Bytes):
        return []
    parts = []
    for split, documents in encoded.items():
        count = sum(map(len, documents.values()))
        unknown = sum(int((text == vocabulary.unknown).sum()) for text in documents.values())
        parts.append(f"{split} {count:,} ({unknown / max(1, count):.2%} unknown)")
    return [f"{vocabulary.unit}  {vocabulary.size:,} in the vocabulary: {', '.join(parts)}"]


class TextTask(SegmentedTask):
    """A `SegmentedTask` over text. The first metric is the loss in bits per byte of text, whatever a token is.

    tokens: `TextConfig.tokens`. fitted: the training split is one to train on, and not the text that is scored.
    """

    writes_text = True

    def __init__(
        self,
        splits: Mapping[Split, Documents],
        segment: int,
        vocabulary: Vocabulary | None = None,
        tokens: str = "bytes",
    ) -> None:
        self.vocabulary, self.tokens_from, self.fitted = vocabulary or Bytes(), tokens, True
        super().__init__(splits, self.vocabulary.size, segment, self.vocabulary.start)
        if tokens == "bytes":
            self.metrics = (BITS_PER_BYTE, PERPLEXITY, ACCURACY)
        else:
            # The accuracy needs a second pass over all words, so it is left out in training.
            self.metrics = (
                bits_per_byte(self.vocabulary.lengths, self.vocabulary.unknown is not None),
                PERPLEXITY,
                replace(ACCURACY, training=False),
            )

    @cached_property
    def reference(self) -> Mapping[str, float]:  # type: ignore[override]
        """Bits per byte of the test split by n-grams of the training split, if any, and a compressor."""
        return text_scores(self._splits["train"] if self.fitted else [], self._splits["test"], self.vocabulary)

    def example(self) -> Batch:
        """One row of the greatest length; of real text where tokens are words, whose frequency decides the cost."""
        return super().example() if self.tokens_from == "bytes" else Task.example(self)

    def artifacts(self, model: nn.Module, folder: Path, split: HeldOut) -> JSONObject:
        texts = written_texts(model, self._splits["valid"], self.vocabulary)
        about = {
            "title": "Written text",
            "given": "given",
            "found": "wrote",
            "about": f"Beginnings of validation documents, and how the model goes on from them: {self.vocabulary.unit} "
            f"drawn at temperature {TEMPERATURE:g}.",
            "exact": False,
        }
        return {"texts": texts, "examples": {"texts": about}} if texts else {}

    def preprocessing(self) -> "TextPreprocessing":
        return TextPreprocessing.of(self.max_length, self.tokens_from, self.vocabulary)

    def sample_outputs(self, model: nn.Module, sampling: Sampling, folder: Path) -> bool:
        """Print texts that go on from the prompt, or begin as documents do."""
        vocabulary, stop = self.vocabulary, (sampling.stop or "").encode()
        prompt = vocabulary.encode((sampling.prompt or "").encode(), "--prompt").tolist()
        rows = torch.tensor([[vocabulary.start, *prompt]]).expand(sampling.count or 1, -1)
        settings = {"generator": torch.Generator().manual_seed(sampling.seed), **sampling_options(sampling)}
        tokens: list[torch.Tensor] = []
        for token in Stream(model).prefill(rows).tokens(sampling.length, **settings):
            tokens.append(token)
            if stop and all(stop in vocabulary.decode(row) for row in torch.stack(tokens, 1).tolist()):
                break
        for i, row in enumerate(torch.stack(tokens, 1).tolist()):
            written = vocabulary.decode(row)
            if stop and stop in written:
                written = written.partition(stop)[0] + stop
            text = (vocabulary.decode(prompt) + written).decode(errors="replace")
            say(("\n" + "─" * 40 + "\n") * bool(i) + text)
        return False

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        return self.vocabulary.words(tokens)

    def encode(self, text: bytes, where: str) -> list[int]:
        return [self.vocabulary.start, *(int(token) for token in self.vocabulary.encode(text, where))]


def written_texts(
    model: nn.Module, documents: Sequence[Sequence[int] | NDArray[np.integer]], vocabulary: Vocabulary
) -> list[dict[str, str]]:
    """What the model writes after the first tokens of some documents: [{"given", "wrote"}].

    The documents are evenly spaced among those of at least `GIVEN` tokens. [] without any, and for a model that cannot
    write (not autoregressive, or without a state). Cost: `WRITTEN` steps of the model, with `TEXTS` rows.
    """
    long = [document for document in documents if len(document) >= GIVEN]
    writes = isinstance(model, RecurrentModel) and model.autoregressive and model.state_kind != "none"
    if not long or not writes:
        return []
    count = min(TEXTS, len(long))
    prompts = [[int(token) for token in long[i * (len(long) - 1) // max(1, count - 1)][:GIVEN]] for i in range(count)]
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(0)
    with evaluating(model):
        stream = Stream(model).prefill(torch.tensor([[vocabulary.start, *text] for text in prompts], device=device))
        tokens, _ = stream.generate(WRITTEN, temperature=TEMPERATURE, generator=generator)
    texts = []
    for prompt, row in zip(prompts, tokens.tolist(), strict=True):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character that is cut belongs to what is written
        given = decoder.decode(vocabulary.decode(prompt))
        texts.append({"given": given, "wrote": decoder.decode(vocabulary.decode(row), final=True)})
    return texts


@register
@dataclass(frozen=True)
class TextPreprocessing(Preprocessing):
    """The most probable continuation of texts, token by token; - is the standard input, a folder the texts in it.

    Each file is read as a document of the training data: after the token `start`, in segments of `segment` tokens.
    tokens: what a token is, as the run's `TextConfig.tokens` says. words: the vocabulary of words, tokenizer: the
    content of the file of sub-words; at most one of the two is there, and without them tokens are bytes.
    """

    name: ClassVar[str] = "text"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"length": 200})

    segment: int
    start: int = 0
    tokens: str = "bytes"
    words: tuple[str, ...] = ()
    tokenizer: str = ""

    @classmethod
    def of(cls, segment: int, tokens: str, vocabulary: Vocabulary) -> "TextPreprocessing":
        words = vocabulary.list if isinstance(vocabulary, Words) else ()
        tokenizer = vocabulary.content if isinstance(vocabulary, SubWords) else ""
        return cls(segment, vocabulary.start, tokens, words, tokenizer)

    def vocabulary(self) -> Vocabulary:
        if self.tokenizer:
            return SubWords(self.tokenizer, self.tokens)
        return Words(self.words) if self.words else Bytes()

    def difference(self, other: Preprocessing) -> str | None:
        if not isinstance(other, TextPreprocessing):
            return super().difference(other)
        if (self.words, self.tokenizer) == (other.words, other.tokenizer):
            return None
        vocabulary = f"{len(other.words):,} words" if other.words else "sub-words" if other.tokenizer else "bytes"
        return (
            f"expected the vocabulary that the run's model was trained with ({self.tokens}), found another one of "
            f"{vocabulary}; leave data.tokens and data.words out"
        )

    def paths(self, files: Sequence[Path]) -> Sequence[Path]:
        paths = []
        for path in files:
            corpus = find_text(path) if path.is_dir() else None
            if corpus is not None and not corpus.read:
                raise nothing_found(path, corpus.left_out)
            paths += [path] if corpus is None else corpus.read
        return paths

    def reader(self, model: Any) -> tuple[Any, Vocabulary]:
        return model, self.vocabulary()

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
        data = sys.stdin.buffer.read() if str(path) == _STDIN else read_bytes(path)
        if not check_text(data, str(path)):
            raise InputError(f"{path}: expected text that the model continues, found 0 bytes; add text to it")
        model, vocabulary = reader
        text = vocabulary.encode(data, str(path)).tolist()
        stream = Stream(model).prefill(torch.tensor([[self.start, *text]]), self.segment)
        tokens, _ = stream.generate(options["length"], temperature=0.0)
        return Predicted(str(path), vocabulary.decode(tokens[0].tolist()).decode(errors="replace"))
