"""Text as bytes: any file or folder, or the Python standard library's own source."""

import hashlib
import os
import re
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mnemos.config import DataConfig
from mnemos.types import InputError

from .files import read_bytes
from .segments import SegmentedTask

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}  # not Python's own, or not its library
Document = NDArray[np.uint8]


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Language modelling over bytes; each file is a document, and empty ones are left out.

    `path` is a file or a folder (searched through, hidden names left out), gzipped or not; None is the standard
    library's *.py files, which every Python has (their text differs from version to version).
    A share `held_out` of the documents makes the validation split and as many the test split, at least one each:
    those whose names' hashes come first, so a document keeps its split when others come or go nearby. Of fewer
    than three documents each is cut in three instead, the last shares held out.
    Longer documents go on as new ones, afresh, every `longest` bytes: or one long file would be all that a whole
    evaluation waits for, in one row, while the others stand idle. The start token is byte 0, which text does not
    use. `segment` is T.
    """

    name: ClassVar[str] = "text"

    path: str | None = None
    segment: int = 512
    held_out: float = 0.05
    longest: int = 65_536

    def build(self) -> "TextTask":
        """The task: 256 byte values, segments of `segment`."""
        if not 0 < self.held_out < 0.5:
            raise InputError(f"text: expected held_out between 0 and 0.5, found {self.held_out}")
        documents = read_documents(self.path)
        train, valid, test = _split(documents, self.held_out) if len(documents) > 2 else _cut(documents, self.held_out)
        if self.longest < 1:
            raise InputError(f"text: expected longest of at least 1 byte, found {self.longest}")
        train, valid, test = ([part for text in texts for part in self._parts(text)] for texts in (train, valid, test))
        return TextTask(train, valid, test, vocab_size=256, segment=self.segment)

    def _parts(self, text: Document) -> Iterator[Document]:
        return (text[start : start + self.longest] for start in range(0, len(text), self.longest))


class TextTask(SegmentedTask):
    """Documents whose tokens are bytes of text."""

    def words(self, tokens: Sequence[int]) -> list[tuple[str, int]]:
        """Tokens as (text, how many tokens it is): words, runs of blanks, and every other sign alone; nothing is lost.

        A letter of several bytes is part of a word. The start token reads ␀, and a byte that is no text �.
        """
        found = (match.group() for match in _WORD.finditer(bytes(tokens)))
        return [(part.replace(b"\0", "␀".encode()).decode("utf-8", "replace"), len(part)) for part in found]


_WORD = re.compile(rb"[\w\x80-\xff]+|\s+|[^\w\s\x80-\xff]")


def read_documents(path: str | Path | None) -> dict[str, Document]:
    """Name and bytes [n] of the documents at `path`, by name; None is the standard library. Leaves out empty files."""
    if path is None:
        folder = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _files(folder, LEFT_OUT) if file.suffix == ".py"]
    else:
        folder = Path(path)
        if not folder.exists():
            raise InputError(f"{folder}: expected a file or a folder of text, found nothing there; check the path")
        files = [folder] if folder.is_file() else list(_files(folder))
    documents = {}
    for file in files:
        data = np.frombuffer(read_bytes(file), np.uint8)
        if len(data):
            documents[file.relative_to(folder).as_posix() if file != folder else file.name] = data
    if not documents:
        raise InputError(f"{folder}: expected text, found {len(files)} files and not one byte in them")
    return dict(sorted(documents.items()))


def _files(folder: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in left_out]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _split(documents: dict[str, Document], share: float) -> tuple[list[Document], list[Document], list[Document]]:
    """Whole documents to train, valid and test."""
    ranked = sorted(documents, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    held = max(1, min(round(share * len(ranked)), (len(ranked) - 1) // 2))
    valid, test = set(ranked[:held]), set(ranked[held : 2 * held])
    return (
        [text for name, text in documents.items() if name not in valid | test],
        [text for name, text in documents.items() if name in valid],
        [text for name, text in documents.items() if name in test],
    )


def _cut(documents: dict[str, Document], share: float) -> tuple[list[Document], list[Document], list[Document]]:
    """Each document's beginning, then two shares of its end."""
    parts = []
    for name, text in documents.items():
        held = max(1, min(round(share * len(text)), (len(text) - 1) // 2))
        if len(text) < 3:
            raise InputError(f"{name}: expected at least three bytes to cut in three splits, found {len(text)}")
        parts.append((text[: -2 * held], text[-2 * held : -held], text[-held:]))
    train, valid, test = zip(*parts, strict=True)
    return list(train), list(valid), list(test)
