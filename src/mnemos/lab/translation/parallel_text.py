"""Parallel text: the files of a folder by split, and their pairs of sentences, with errors that name file and line.

A text is a pair of files with a sentence a line, or as IWSLT has it: XML, and TED's tagged files.
"""

import gzip
import html
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

from mnemos.atomic import check_file
from mnemos.lab.tasks.files import first_names
from mnemos.lab.tasks.task import Split
from mnemos.types import InputError

_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>")
_TEXT = re.compile(r"<(title|description)>(.*?)</\1>")
# The stems of each split's files, the first that is there; as fnmatch reads them.
STEMS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training", "train.tags.*"),
    "valid": ("valid", "val", "validation", "dev", "*.dev*"),
    "test": ("test", "test[_-]*", "*.tst*"),
}


class PairedFiles(NamedTuple):
    """One parallel text: the files of its two sides."""

    stem: str
    source: Path
    target: Path


def find_pairs(folder: str | Path, split: Split, languages: tuple[str, str], stem: str = "") -> list[PairedFiles]:
    """The parallel texts of a split, in the order of their names; [] if the folder has none.

    languages: (source, target), the endings of the files' names: STEM.en and STEM.de, STEM.de-en.en.xml, or TED's
    train.tags.de-en.en; each may end in .gz. stem: those of the split's files, which may hold * and ?; by default the
    usual names of the split (`STEMS`). Several texts that * or ? find are one split; without a stem, several are an
    error. Raises InputError for a path that is no folder, and for a text with one side missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"data.path: expected a folder of parallel text, found no folder {str(folder)!r}; check the path"
        )
    # --- every file whose name ends as parallel text does: {stem: {language: file}} ---
    texts: dict[str, dict[str, Path]] = {}
    ending = re.compile(rf"(.+)\.({'|'.join(map(re.escape, languages))})(\.xml)?(\.gz)?")
    for name in sorted(os.listdir(folder)):
        match = ending.fullmatch(name)
        if match and (folder / name).is_file():
            texts.setdefault(match[1], {})[match[2]] = folder / name

    # --- the stems of the split ---
    for pattern in (stem,) if stem else STEMS[split]:
        if stems := sorted(name for name in texts if fnmatch(name, pattern)):
            break
    # IWSLT's sets of several years are one split; which of Multi30k's test sets is meant has to be said.
    if len(stems) > 1 and not stem and not pattern.startswith(("*", "train.tags")):
        raise InputError(
            f"{folder}: expected one {split} split, found {first_names(stems)}; choose one with data.{split}"
        )

    # --- the two sides of each ---
    split_texts = []
    for name in stems:
        sides = texts[name]
        if missing := [side for side in languages if side not in sides]:
            raise InputError(
                f"{folder}: expected {name}.{missing[0]} beside {next(iter(sides.values())).name}, found none; add the "
                "file, or correct data.source and data.target"
            )
        split_texts.append(PairedFiles(name, *(sides[side] for side in languages)))
    return split_texts


class SentencePair(NamedTuple):
    """Two sentences, with one space between words, and where each is, for errors: its file and its line from 1."""

    source: str
    target: str
    source_at: tuple[Path, int]
    target_at: tuple[Path, int]


def pairs(texts: Sequence[PairedFiles]) -> Iterator[SentencePair]:
    """The pairs of sentences of parallel texts, in order. Sentences may be empty. Memory: a block of each file.

    Raises InputError at the first line that is not UTF-8, and if the two sides have different numbers of sentences.
    """
    for text in texts:
        files = text.source, text.target
        sides = [_sentences(path) for path in files]
        for count, (source, target) in enumerate(zip_longest(*sides)):
            if source is None or target is None:
                longer = 0 if target is None else 1
                more, (_, line) = count + 1 + sum(1 for _ in sides[longer]), source or target
                raise InputError(
                    f"{files[1 - longer]}: expected {more:,} sentences, as {files[longer].name} has, found {count:,}: "
                    f"line {line:,} of {files[longer].name} has no translation; make the files equally long"
                )
            yield SentencePair(source[0], target[0], (text.source, source[1]), (text.target, target[1]))


def _sentences(path: Path) -> Iterator[tuple[str, int]]:
    """(sentence, line from 1) of one side of a text."""
    xml, tags = ".xml" in path.name, ".tags." in path.name
    for number, line in enumerate(read_lines(path), start=1):
        line = line.strip()
        texts = [line]
        if xml:  # <seg id="1"> … </seg>
            texts = [html.unescape(text) for text in _SEGMENT.findall(line)]
            if len(texts) != line.count("<seg"):
                raise InputError(
                    f"{path}: line {number:,}: expected <seg …> and its </seg> in one line, as IWSLT has them, found "
                    f"{line!r:.60}; correct the line"
                )
        elif tags and line.startswith("<"):  # of TED's tags, titles and descriptions hold sentences
            texts = [match[2] for match in [_TEXT.fullmatch(line)] if match]
        yield from ((" ".join(text.split()), number) for text in texts)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends, gzipped or not. Memory: a block and the longest line."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            content: Any = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
            yield from lines_of(content, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: expected a whole gzip file, found damaged data ({error}); fetch it again") from None
    except OSError as error:
        raise InputError(
            f"{path}: expected a readable file, but it cannot be opened ({error.strerror}); check the path"
        ) from None


def lines_of(file: IO[bytes], path: str | Path) -> Iterator[str]:
    """The lines of UTF-8 bytes without their ends. path: the name that errors give."""
    for number, line in enumerate(file, start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path}: line {number:,}: expected UTF-8, found the byte 0x{line[error.start]:02x} at place "
                f"{error.start + 1}; convert the file to UTF-8"
            ) from None
        yield (text.removeprefix("\ufeff") if number == 1 else text).removesuffix("\n").removesuffix("\r")
