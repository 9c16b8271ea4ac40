"""Language modelling of text as bytes: any file or folder, or the source of the Python standard library."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mnemos.config import DataConfig
from mnemos.generate.stream import Stream
from mnemos.registry import register
from mnemos.types import InputError, JSONObject

from .files import first_names, read_bytes
from .metrics import ACCURACY, BITS_PER_BYTE, PERPLEXITY, UNIFORM
from .segments import SegmentedTask
from .task import Sampling, Split
from .text_files import TextFiles, find_text, nothing_found
from .text_preprocessing import TextPreprocessing
from .token_task import sampling_generator, sampling_options
from .written_text import TEMPERATURE, written_texts

SCORED = 1_000  # bytes: with fewer, the loss per byte has a standard error of about 0.1 nat
Document = NDArray[np.uint8]
_ORDER: tuple[Split, ...] = ("train", "valid", "test")


@register
@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Language modelling over bytes. Each file is a document; empty files are ignored, and files may be gzipped.

    `path` is a file or a folder. None means the *.py files of the Python standard library; their text depends on the
    version of Python.
    A folder gives the splits itself by folders train, valid (validation, val, dev) and test, or by official names such
    as wiki.train.tokens and wiki.valid.tokens, or train.txt and test.txt, or the folders in it do. Other files beside
    them are left out.
    Of any other folder, every file at any depth that is text is read, except hidden files, licences, checksums and a
    README at the top. `pattern`, such as "*.txt *.md", reads the files that match it instead.
    A split that the folder does not give takes a share `held_out` of the documents, and at least one: of those of
    train, or of all where the folder gives no split. The hashes of the documents' names decide which, so a document
    usually keeps its split when others are added or removed. Where there is no document to spare, each is cut, and the
    held-out splits take shares of its end.
    A document longer than `longest` bytes is divided into several documents, each with a new state. Otherwise one long
    file would occupy one row of an evaluation while the other rows wait. The start token is byte 0, which does not
    occur in text. `segment` is T.
    """

    name: ClassVar[str] = "text"

    path: str | None = None
    segment: int = 512
    held_out: float = 0.05
    longest: int = 65_536
    pattern: str | None = None

    def files(self) -> list[Path]:
        """The documents' files, including empty ones."""
        return find_text(self.path, self.pattern).read

    def build(self) -> "TextTask":
        """The task, with 256 tokens and T = `segment`.

        Raises InputError for missing files, wrong settings, and a held-out split with fewer than 1,000 bytes.
        """
        self._check_settings()
        found = find_text(self.path, self.pattern)
        splits = split_documents(found, self.held_out)
        for split in _ORDER[1:]:
            fix = "add text to it" if split in found.given else "add text, or raise data.held_out"
            _check_size(found.folder, f"a {split} split", _bytes(splits[split]), fix)
        train, valid, test = ([part for text in splits[s].values() for part in self._parts(text)] for s in _ORDER)
        task = TextTask(train, valid, test, vocab_size=256, segment=self.segment)
        task.about = tuple(_about(found, splits))
        return task

    def build_to_score(self, split: Literal["valid", "test"]) -> "TextTask":
        """The task that scores other text than a run was trained on: the split if the folder gives it, else all text.

        A folder gives splits as in training, but needs none for training. Raises InputError if it gives other splits
        only, and as `build` does.
        """
        self._check_settings()
        found = find_text(self.path, self.pattern, scoring=True)
        if found.given and split not in found.given:
            known = " and ".join(found.given)
            raise InputError(
                f"{found.folder}: expected a {split} split, found the splits {known}; choose one with --split, or name "
                "a file"
            )
        scored = replace(found, given={split: found.given[split]} if found.given else {})
        documents = read_documents(scored)
        _check_size(found.folder, f"a {split} split" if found.given else "text", _bytes(documents), "add text to it")
        parts = [part for text in documents.values() for part in self._parts(text)]
        task = TextTask(parts, parts, parts, vocab_size=256, segment=self.segment)  # a task has no empty split
        what = f"the {split} split" if found.given else "the whole text"
        left = f"; left out: {first_names([found.name(file) for file in found.left_out])}" if found.left_out else ""
        task.about = (f"scored: {what}, {_said(documents)}{left}",)
        task.whole = not found.given
        return task

    def _check_settings(self) -> None:
        if not 0 < self.held_out < 0.5:
            raise InputError(f"data.held_out must be above 0 and below 0.5, found {self.held_out}")
        if self.longest < 1:
            raise InputError(f"data.longest must be at least 1 byte, found {self.longest}")

    def _parts(self, text: Document) -> Iterator[Document]:
        return (text[start : start + self.longest] for start in range(0, len(text), self.longest))


class TextTask(SegmentedTask):
    """A `SegmentedTask` whose tokens are bytes of text. The first metric is the loss in bits per byte."""

    metrics = (BITS_PER_BYTE, PERPLEXITY, ACCURACY)
    reference = MappingProxyType({UNIFORM: 8.0})

    def artifacts(self, model: nn.Module, folder: Path, split: Literal["valid", "test"]) -> JSONObject:
        """What the model writes after the beginnings of some documents of the validation split."""
        texts = written_texts(model, [document.tobytes() for document in self._splits["valid"]])
        about = {
            "title": "Written text",
            "given": "given",
            "found": "wrote",
            "about": f"Beginnings of validation documents, and how the model goes on from them: bytes drawn at "
            f"temperature {TEMPERATURE:g}.",
            "exact": False,
        }
        return {"texts": texts, "examples": {"texts": about}} if texts else {}

    def preprocessing(self) -> TextPreprocessing:
        """The segments and the start token of documents."""
        return TextPreprocessing(self.max_length, self._start)

    def sample_outputs(self, model: nn.Module, sampling: Sampling, folder: Path) -> bool:
        """Print texts that go on from the prompt, or begin as documents do."""
        prompt = (sampling.prompt or "").encode() or b"\0"  # byte 0 is where documents start
        stream = Stream(model).prefill(torch.tensor([list(prompt)]).expand(sampling.count or 1, -1))
        tokens, _ = stream.generate(
            sampling.length, generator=sampling_generator(sampling), **sampling_options(sampling)
        )
        for i, row in enumerate(tokens.tolist()):
            print(("\n" + "─" * 40 + "\n") * bool(i) + (prompt.strip(b"\0") + bytes(row)).decode(errors="replace"))
        return False

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Group tokens into words: (text, number of tokens) for each word, run of white space, or other character.

        Every token is in one group. A character of several bytes is part of a word. The start token is shown as ␀, and
        a byte that is not valid UTF-8 as �.
        """
        found = (match.group() for match in _WORD.finditer(bytes(tokens)))
        return [(part.replace(b"\0", "␀".encode()).decode("utf-8", "replace"), len(part)) for part in found]


def _check_size(folder: Path, what: str, size: int, fix: str) -> None:
    if size < SCORED:
        raise InputError(
            f"{folder}: expected {what} of at least {SCORED:,} bytes, because a smaller one cannot be scored, found "
            f"{size:,}; {fix}"
        )


_WORD = re.compile(rb"[\w\x80-\xff]+|\s+|[^\w\s\x80-\xff]")


def read_documents(found: TextFiles) -> dict[str, Document]:
    """The documents of a corpus as {name: bytes [n]}, sorted by name, whatever their split. Empty files are ignored.

    Raises InputError if there is no text.
    """
    documents = {found.name(file): np.frombuffer(read_bytes(file), np.uint8) for file in found.read}
    if not documents:
        raise nothing_found(found.folder, found.left_out)
    if not any(map(len, documents.values())):
        raise InputError(f"{found.folder}: expected text, found {len(documents)} files with 0 bytes; check data.path")
    return {name: text for name, text in sorted(documents.items()) if len(text)}


def split_documents(found: TextFiles, share: float) -> dict[Split, dict[str, Document]]:
    """The documents of train, valid and test by name: those that the folder gives; held-out shares for the others."""
    documents = read_documents(found)
    splits = {
        split: {name: documents[name] for name in map(found.name, files) if name in documents}
        for split, files in found.given.items()
    }
    missing: list[Split] = [split for split in _ORDER[1:] if split not in splits]
    if missing:
        whole = splits.get("train", documents)
        splits |= (_share_of_documents if len(whole) > len(missing) else _share_of_each)(whole, share, missing)
    return splits


def _share_of_documents(
    documents: dict[str, Document], share: float, held_out: Sequence[Split]
) -> dict[Split, dict[str, Document]]:
    """Divide the documents between train and the held-out splits."""
    ranked = sorted(documents, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    held = max(1, min(round(share * len(ranked)), (len(ranked) - 1) // len(held_out)))
    split_of = {name: held_out[i // held] for i, name in enumerate(ranked[: held * len(held_out)])}
    return {
        split: {name: text for name, text in documents.items() if split_of.get(name, "train") == split}
        for split in ("train", *held_out)
    }


def _share_of_each(
    documents: dict[str, Document], share: float, held_out: Sequence[Split]
) -> dict[Split, dict[str, Document]]:
    """Divide each document: its beginning for train, then a share of its end for each held-out split."""
    parts: dict[Split, dict[str, Document]] = {split: {} for split in ("train", *held_out)}
    for name, text in documents.items():
        held = max(1, min(round(share * len(text)), (len(text) - 1) // len(held_out)))
        if len(text) <= len(held_out):
            needs = len(held_out) + 1
            raise InputError(f"{name}: expected at least {needs} bytes, one per split, found {len(text)}; add text")
        first = len(text) - held * len(held_out)
        parts["train"][name] = text[:first]
        for i, split in enumerate(held_out):
            parts[split][name] = text[first + i * held :][:held]
    return parts


def _about(found: TextFiles, splits: dict[Split, dict[str, Document]]) -> Iterator[str]:
    """Lines that say what each split holds, with sizes, and what is left out."""
    for split in _ORDER:
        documents, given = splits[split], split in found.given
        source = "" if given else ", a share of train" if found.given else ", a share of the files"
        yield f"{split:5}  {_said(documents, '' if split == 'train' else source)}"
    if found.left_out:
        yield f"left out: {first_names([found.name(file) for file in found.left_out])}"


def _said(documents: dict[str, Document], source: str = "") -> str:
    """How many files and bytes, and their names."""
    files = f"{len(documents):,} file{'s' if len(documents) != 1 else ''}"
    return f"{files}, {_bytes(documents):,} bytes{source}: {first_names(list(documents))}"


def _bytes(documents: dict[str, Document]) -> int:
    return sum(map(len, documents.values()))
