"""Language modelling of text as bytes: any file or folder, or the source of the Python standard library."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mnemos.config import DataConfig
from mnemos.generate.stream import Stream
from mnemos.registry import register
from mnemos.types import InputError

from .files import read_bytes
from .segments import SegmentedTask
from .task import Sampling
from .token_task import sampling_generator, sampling_options

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # third-party packages, and tests
Document = NDArray[np.uint8]


@register
@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Language modelling over bytes. Each file is a document; empty files are ignored.

    `path` is a file, or a folder whose files at any depth are read; hidden files are ignored, and files may be gzipped.
    None means the *.py files of the Python standard library; their text depends on the version of Python.
    The validation and the test split take a share `held_out` of the documents each, and at least one. The hashes of
    their names decide which, so a document usually keeps its split when others are added or removed. If there are
    fewer than three documents, each is cut in three, and the splits take shares of its end.
    A document longer than `longest` bytes is divided into several documents, each with a new state. Otherwise one long
    file would occupy one row of an evaluation while the other rows wait. The start token is byte 0, which does not
    occur in text. `segment` is T.
    """

    name: ClassVar[str] = "text"

    path: str | None = None
    segment: int = 512
    held_out: float = 0.05
    longest: int = 65_536

    def files(self) -> list[Path]:
        """The documents' files, including empty ones."""
        return document_files(self.path)

    def build(self) -> "TextTask":
        """The task, with 256 tokens and T = `segment`. Raises InputError for missing files and wrong settings."""
        if not 0 < self.held_out < 0.5:
            raise InputError(f"data.held_out must be above 0 and below 0.5, found {self.held_out}")
        documents = read_documents(self.path)
        train, valid, test = (_split_documents if len(documents) > 2 else _split_each)(documents, self.held_out)
        if self.longest < 1:
            raise InputError(f"data.longest must be at least 1 byte, found {self.longest}")
        train, valid, test = ([part for text in texts for part in self._parts(text)] for texts in (train, valid, test))
        return TextTask(train, valid, test, vocab_size=256, segment=self.segment)

    def _parts(self, text: Document) -> Iterator[Document]:
        return (text[start : start + self.longest] for start in range(0, len(text), self.longest))


class TextTask(SegmentedTask):
    """A `SegmentedTask` whose tokens are bytes of text."""

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


_WORD = re.compile(rb"[\w\x80-\xff]+|\s+|[^\w\s\x80-\xff]")


def read_documents(path: str | Path | None) -> dict[str, Document]:
    """The documents at `path` as {name: bytes [n]}, sorted by name; None means the standard library.

    Empty files are ignored. Raises InputError if the path does not exist or holds no text.
    """
    files, folder = document_files(path), _folder(path)
    documents = {}
    for file in files:
        data = np.frombuffer(read_bytes(file), np.uint8)
        if len(data):
            documents[file.relative_to(folder).as_posix() if file != folder else file.name] = data
    if not documents:
        raise InputError(f"{folder}: expected text, found {len(files)} files with 0 bytes; check data.path")
    return dict(sorted(documents.items()))


def document_files(path: str | Path | None) -> list[Path]:
    """The files at `path`, or of the standard library. Raises InputError if the path does not exist."""
    folder = _folder(path)
    if path is None:
        return sorted(file for file in _files(folder, LEFT_OUT) if file.suffix == ".py")
    if not folder.exists():
        raise InputError(f"{folder}: expected a file or a folder of text, but the path does not exist; check data.path")
    return [folder] if folder.is_file() else sorted(_files(folder))


def _folder(path: str | Path | None) -> Path:
    return Path(sysconfig.get_path("stdlib") if path is None else path)


def _files(folder: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _split_documents(
    documents: dict[str, Document], share: float
) -> tuple[list[Document], list[Document], list[Document]]:
    """Divide the documents between train, valid and test."""
    ranked = sorted(documents, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    held = max(1, min(round(share * len(ranked)), (len(ranked) - 1) // 2))
    valid, test = set(ranked[:held]), set(ranked[held : 2 * held])
    return (
        [text for name, text in documents.items() if name not in valid | test],
        [text for name, text in documents.items() if name in valid],
        [text for name, text in documents.items() if name in test],
    )


def _split_each(documents: dict[str, Document], share: float) -> tuple[list[Document], list[Document], list[Document]]:
    """Divide each document: its beginning for train, then two shares of its end for valid and test."""
    parts = []
    for name, text in documents.items():
        held = max(1, min(round(share * len(text)), (len(text) - 1) // 2))
        if len(text) < 3:
            raise InputError(f"{name}: expected at least 3 bytes, one per split, found {len(text)}; add text")
        parts.append((text[: -2 * held], text[-2 * held : -held], text[-held:]))
    train, valid, test = zip(*parts, strict=True)
    return list(train), list(valid), list(test)
