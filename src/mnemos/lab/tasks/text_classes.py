"""Classification of texts in class folders, of any length, in segments for an encoder."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from mnemos.generators import ORDER, generator
from mnemos.registry import register
from mnemos.types import InputError

from .arrays import ArrayTask, Rows
from .files import check_text, first_names, read_bytes, repeated
from .preprocessing import Predicted, Preprocessing, likely_classes
from .task import SPLITS, DataConfig, HeldOut, Split
from .text_files import SPLIT_OF, Document, TextFiles, choose_split, find_text, read_documents, split_documents
from .vocabulary import Bytes, SubWords, Tokens, Vocabulary


@register
@dataclass(frozen=True)
class TextClassesConfig(DataConfig):
    """Texts in class folders: FOLDER/CLASS/*.txt, or FOLDER/train/CLASS/*.txt with valid and test beside train.

    Classes are the folder names, sorted. FOLDER/CLASS/train.txt beside valid.txt and test.txt give the splits too. A
    split that the folder does not give takes a share `held_out` of the files of each class, or the ends of its files
    where there is none to spare. Files are UTF-8 and may be gzipped.
    A text becomes rows of `length` tokens, the last one shorter: each is classified by itself. A row consists of
    segments of `segment` tokens, with the special tokens of the vocabulary around each: [CLS] … [SEP] [CLS] … [SEP].
    `tokens`: "bytes", or a tokenizer.json of the library tokenizers.
    """

    name: ClassVar[str] = "text-classes"

    path: str = "texts"
    length: int = 512
    segment: int = 128
    held_out: float = 0.1
    tokens: str = "bytes"

    def files(self) -> list[Path]:
        named = [] if self.tokens == "bytes" else [Path(self.tokens)]
        return [*find_text(self.path).read, *named]

    def build(self) -> "TextClassesTask":
        """The task. Cost: all texts are encoded, which holds them and their tokens in memory."""
        self.require("0 < held_out < 0.5")
        classes = _by_class(found := find_text(self.path))
        layout = TextClassesPreprocessing.of(self, tuple(classes))
        vocabulary = layout.vocabulary()
        parts: dict[Split, list[Rows]] = {split: [] for split in SPLITS}
        hashes: dict[Split, dict[str, bytes]] = {split: {} for split in SPLITS}
        for label, corpus in enumerate(classes.values()):
            for split, texts in split_documents(corpus, self.held_out, characters=True).items():
                parts[split].append(layout.labelled(texts, label, f"{self.path}: {split} split", vocabulary))
                hashes[split] |= {file: hashlib.sha256(text.tobytes()).digest() for file, text in texts.items()}
        task = TextClassesTask({split: Rows.joined(own) for split, own in parts.items()}, layout, vocabulary)
        names = first_names(list(classes))
        about = [f"{split:5}  {task.size(split):,} rows of {len(classes)} classes: {names}" for split in SPLITS]
        if found.left_out:
            about.append(f"left out: {first_names([found.name(file) for file in found.left_out])}")
        task.about = (*about, *repeated(hashes))
        return task

    def build_to_score(self, split: HeldOut, trained: Any = None) -> "TextClassesTask":
        """The split of a folder that gives it; all texts of one without splits."""
        found = find_text(self.path, scoring=True)
        classes = _by_class(choose_split(found, split))
        layout = TextClassesPreprocessing.of(self, tuple(classes))
        vocabulary, what = layout.vocabulary(), f"the {split} split" if found.splits else "all texts"
        parts = [
            layout.labelled(read_documents(corpus, characters=True), label, f"{self.path}: {what}", vocabulary)
            for label, corpus in enumerate(classes.values())
        ]
        task = TextClassesTask(dict.fromkeys(SPLITS, Rows.joined(parts)), layout, vocabulary)
        task.about = (
            f"scored: {what}, {task.size(split):,} rows of {len(classes)} classes: {first_names([*classes])}",
        )
        task.whole = not found.splits
        return task


def _by_class(corpus: TextFiles) -> dict[str, TextFiles]:
    classes: dict[str, TextFiles] = {}
    splits: list[tuple[Split | None, list[Path]]] = [*corpus.splits.items()] or [(None, corpus.undivided)]
    for split, files in splits:
        for file in files:
            parts = file.relative_to(corpus.folder).parts if file != corpus.folder else ()
            parts = parts[1:] if split is not None and parts[0].lower() in SPLIT_OF else parts
            if len(parts) < 2:
                raise InputError(f"{file}: expected texts in folders of classes, found one outside; move it")
            own = classes.setdefault(parts[0], TextFiles(corpus.folder, {}, [], []))
            (own.undivided if split is None else own.splits.setdefault(split, [])).append(file)
    if len(classes) < 2:
        raise InputError(
            f"{corpus.folder}: expected at least two folders of texts, one per class, found {len(classes)}; check "
            "data.path"
        )
    for name, own in classes.items():
        if missing := sorted({*corpus.splits} - {*own.splits}):
            raise InputError(
                f"{corpus.folder}: {missing[0]} split: expected text of the class {name}, found none; add some to it"
            )
    return dict(sorted(classes.items()))


class TextClassesTask(ArrayTask):
    """An `ArrayTask` over segments of texts."""

    shuffled = True

    def __init__(self, rows: Mapping[Split, Rows], layout: "TextClassesPreprocessing", vocabulary: Vocabulary) -> None:
        self.layout = layout
        vocab_size = vocabulary.start if isinstance(vocabulary, SubWords) else vocabulary.size
        splits = {split: own if split == "train" else _shuffled(own) for split, own in rows.items()}
        super().__init__(splits, vocab_size, len(layout.names), layout.length)

    @property
    def sizes(self) -> dict[str, int]:
        return {**super().sizes, "segment": self.layout.segment}

    def preprocessing(self) -> "TextClassesPreprocessing":
        return self.layout


def _shuffled(rows: Rows) -> Rows:
    order = generator(0, ORDER).permutation(len(rows))
    tokens = np.concatenate([rows.row(i) for i in order])
    return Rows.ragged(tokens, rows.lengths[order], rows.labels[order])


@register
@dataclass(frozen=True)
class TextClassesPreprocessing(Preprocessing):
    """The most probable classes of text files, by the mean of the logits of their rows; a folder stands for its texts.

    Fields: as of `TextClassesConfig`. tokenizer: the content of the file of sub-words; "" for bytes.
    """

    name: ClassVar[str] = "text-classes"
    options: ClassVar[Mapping[str, int]] = MappingProxyType({"top": 3})
    endings = (".txt", ".txt.gz", ".md", ".text")
    files = "texts"

    segment: int
    length: int
    tokens: str = "bytes"
    tokenizer: str = ""

    @classmethod
    def of(cls, config: TextClassesConfig, names: tuple[str, ...]) -> "TextClassesPreprocessing":
        """The layout of the rows. Raises InputError if no text fits into a segment."""
        vocabulary = Bytes() if config.tokens == "bytes" else SubWords.read(config.tokens)
        content = vocabulary.content if isinstance(vocabulary, SubWords) else ""
        before, after = vocabulary.around()
        if config.segment <= len(before) + len(after) or config.length < 1 or config.length % config.segment:
            raise InputError(
                f"data.segment: expected more than {len(before) + len(after)} special tokens, and data.length a "
                f"multiple of it, found segment {config.segment} and length {config.length}; change one"
            )
        return cls(config.segment, config.length, config.tokens, content, names=names)

    def vocabulary(self) -> Vocabulary:
        return SubWords(self.tokenizer, self.tokens) if self.tokenizer else Bytes()

    def rows(self, text: bytes, where: str, vocabulary: Vocabulary) -> Iterator[Tokens]:
        """The rows of a text, each of at most `length` tokens; there is none of a text without tokens."""
        before, after = (np.array(part, np.int32) for part in vocabulary.around())
        inside = self.segment - len(before) - len(after)
        tokens, together = vocabulary.encode(text, where), inside * (self.length // self.segment)
        for first in range(0, len(tokens), together):
            row = tokens[first : first + together]
            cut = [row[i : i + inside] for i in range(0, len(row), inside)]
            yield np.concatenate([part for piece in cut for part in (before, piece.astype(np.int32), after)])

    def labelled(self, texts: Mapping[str, Document], label: int, where: str, vocabulary: Vocabulary) -> Rows:
        """The rows of the texts of one class. Raises InputError, which begins with `where`, if there are none."""
        rows = [row for file, text in texts.items() for row in self.rows(text.tobytes(), file, vocabulary)]
        if not rows:
            raise InputError(f"{where}: expected text of the class {self.names[label]}, found none; add some to it")
        return Rows.ragged(np.concatenate(rows), np.array([len(row) for row in rows]), np.full(len(rows), label))

    def reader(self, model: Any) -> tuple[Any, Vocabulary]:
        return model, self.vocabulary()

    def answer(self, reader: Any, path: Path, options: Mapping[str, int]) -> Predicted:
        model, vocabulary = reader
        rows = list(self.rows(check_text(read_bytes(path), str(path)), str(path), vocabulary))
        if not rows:
            raise InputError(f"{path}: expected text, found none; add text to it")
        logits = [model(torch.from_numpy(row.astype(np.int64))[None])[0] for row in rows]
        return likely_classes(path, torch.cat(logits).mean(0), self.names, options["top"])
