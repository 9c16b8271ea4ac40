"""Parallel text: the files of a folder by split, and their pairs of sentences, with errors that name file and line.

A text is a pair of files, a table, IWSLT's XML or TED's tagged files. It is read line by line.
"""

import gzip
import html
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, NamedTuple

from mnemos.atomic import check_file
from mnemos.lab.tasks.files import Unpacked, first_names, most_unpacked, skipped
from mnemos.lab.tasks.task import Split
from mnemos.types import InputError

_BLOCK = 2**20
MOST_LINE = 2**20  # bytes of a line: a file without line ends is no list of sentences
_SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg>")
_TEXT = re.compile(r"<(title|description)>(.*?)</\1>")
Format = Literal["lines", "tsv", "xml", "tags"]
# The stems of each split's files, the first that is there; as fnmatch reads them.
STEMS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training", "train.tags.*"),
    "valid": ("valid", "val", "validation", "dev", "*.dev*"),
    "test": ("test", "test[_-]*", "*.tst*"),
}


class PairedFiles(NamedTuple):
    """One parallel text: the files of its two sides, which are the same file for a table."""

    stem: str
    source: Path
    target: Path
    format: Format


def find_pairs(folder: str | Path, split: Split, languages: tuple[str, str], stem: str = "") -> list[PairedFiles]:
    """The parallel texts of a split, in the order of their names; [] if the folder has none and `stem` is "".

    languages: (source, target), the endings of the files' names: STEM.en and STEM.de, STEM.tsv, STEM.de-en.en.xml, or
    TED's train.tags.de-en.en; each may end in .gz. stem: those of the split's files, which may hold * and ?; by default
    the usual names of the split (`STEMS`). Several texts that * or ? find are one split; without a stem, several are
    an error. Raises InputError for a path that is no folder, for a stem without files, for a text with one side
    missing, and for a table beside other files of its text.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(
            f"data.path: expected a folder of parallel text, found no folder {str(folder)!r}; check the path"
        )
    texts = _texts(folder, languages)
    for pattern in (stem,) if stem else STEMS[split]:
        found = sorted(name for name in texts if fnmatch(name, pattern))
        if len(found) > 1 and not stem and not pattern.startswith(("*", "train.tags")):
            raise InputError(
                f"{folder}: expected one {split} split, found {first_names(found)}; choose one with data.{split}"
            )
        if found:
            return [_pair(folder, name, texts[name], languages) for name in found]
    if stem:
        source, target = languages
        raise InputError(
            f"{folder}: expected {stem}.{source} and {stem}.{target} (or .tsv, .xml, with or without .gz) for "
            f"data.{split}, found {first_names(sorted(texts)) or 'no text of these languages'}; correct data.{split}, "
            "data.source or data.target"
        )
    return []


class SentencePair(NamedTuple):
    """Two sentences, with one space between words, and the place of each, for errors: its file and its line from 1."""

    source: str
    target: str
    source_place: tuple[Path, int]
    target_place: tuple[Path, int]


class _Sentence(NamedTuple):
    text: str
    line: int


def pairs(texts: Sequence[PairedFiles]) -> Iterator[SentencePair]:
    """The pairs of sentences of parallel texts, in order. Sentences may be empty. Memory: a block of each file.

    Raises InputError at the first line that is not UTF-8, has more than 2^20 bytes or, in a table, has other than two
    columns, and at the end if the two sides have different numbers of sentences.
    """
    for text in texts:
        if text.format == "tsv":
            yield from _table(text.source)
        else:
            yield from _two_files(text)


def _two_files(text: PairedFiles) -> Iterator[SentencePair]:
    sides = [_sentences(path, text.format) for path in (text.source, text.target)]
    count = 0
    while True:
        source, target = (next(side, None) for side in sides)
        if source is None or target is None:
            break
        count += 1
        yield SentencePair(source.text, target.text, (text.source, source.line), (text.target, target.line))
    if source is not None or target is not None:
        longer, shorter = (0, 1) if source is not None else (1, 0)
        more = count + 1 + sum(1 for _ in sides[longer])
        files, first = (text.source, text.target), (source or target)
        assert first is not None
        raise InputError(
            f"{files[shorter]}: expected {more:,} sentences, as {files[longer].name} has, found {count:,}: line "
            f"{first.line:,} of {files[longer].name} has no translation; make the files equally long"
        )


def _table(path: Path) -> Iterator[SentencePair]:
    for line, text in enumerate(read_lines(path), start=1):
        columns = text.split("\t")
        if len(columns) != 2:
            raise InputError(
                f"{path}: line {line:,}: expected two columns with a tab between them, found {len(columns)}; correct "
                "the line"
            )
        yield SentencePair(_normalise_spaces(columns[0]), _normalise_spaces(columns[1]), (path, line), (path, line))


def _sentences(path: Path, kind: str) -> Iterator[_Sentence]:
    for number, line in enumerate(read_lines(path), start=1):
        if kind == "xml":
            yield from (_Sentence(_normalise_spaces(text), number) for text in _of_xml(path, number, line))
            continue
        text = line.strip() if kind == "lines" else _of_tags(line)
        if text is not None:
            yield _Sentence(_normalise_spaces(text), number)


def _of_xml(path: Path, number: int, line: str) -> list[str]:
    """The sentences of a line: each <seg id="1"> … </seg>."""
    found = _SEGMENT.findall(line)
    if len(found) != line.count("<seg"):
        raise InputError(
            f"{path}: line {number:,}: expected <seg …> and its </seg> in one line, as IWSLT has them, found "
            f"{line.strip()!r:.60}; correct the line"
        )
    return [html.unescape(text) for text in found]


def _of_tags(line: str) -> str | None:
    """A line of TED's tagged training files: text, titles and descriptions are sentences; other tags are left out."""
    line = line.strip()
    if not line.startswith("<"):
        return line
    match = _TEXT.fullmatch(line)
    return match[2] if match else None


def _normalise_spaces(text: str) -> str:
    return " ".join(text.split())


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file without their ends, gzipped or not. Memory: a block and the longest line."""
    return lines_of(_blocks(path), path)


def lines_of(blocks: Iterator[bytes], path: str | Path) -> Iterator[str]:
    """The lines of UTF-8 bytes without their ends. path: the name that errors give."""
    number, rest = 0, b""
    for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            number += 1
            yield _decode(path, number, line)
        if len(rest) > MOST_LINE:
            _decode(path, number + 1, rest)
    if rest:
        yield _decode(path, number + 1, rest)


def _decode(path: str | Path, number: int, line: bytes) -> str:
    if len(line) > MOST_LINE:
        raise InputError(
            f"{path}: line {number:,}: expected a sentence of at most {MOST_LINE:,} bytes, found a longer line; give "
            "one sentence per line"
        )
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: line {number:,}: expected UTF-8, found the byte 0x{line[error.start]:02x} at place "
            f"{error.start + 1}; convert the file to UTF-8"
        ) from None
    if "\0" in text:
        raise InputError(
            f"{path}: line {number:,}: expected UTF-8 text, found a byte 0, as in UTF-16; convert the file to UTF-8"
        )
    return text.removeprefix("\ufeff").removesuffix("\r") if number == 1 else text.removesuffix("\r")


def _blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, decompressed if it begins as gzip does, block by block."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            if file.peek(2)[:2] != b"\x1f\x8b":
                yield from iter(lambda: file.read(_BLOCK), b"")
                return
            unpacked = Unpacked(gzip.GzipFile(fileobj=file), path, most_unpacked(path.stat().st_size))
            yield from iter(lambda: unpacked.read(_BLOCK), b"")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: expected a whole gzip file, found damaged data ({error}); fetch it again") from None
    except OSError as error:
        raise InputError(
            f"{path}: expected a readable file, but it cannot be opened ({error.strerror}); check the path"
        ) from None


def _texts(folder: Path, languages: tuple[str, str]) -> dict[str, dict[str, Path]]:
    """{stem: {language, or "tsv": file}} of every file whose name ends as parallel text does."""
    found: dict[str, dict[str, Path]] = {}
    ending = re.compile(rf"(.+)\.({'|'.join(map(re.escape, languages))}|tsv)(\.xml)?(\.gz)?")
    for name in sorted(os.listdir(folder)):
        match = ending.fullmatch(name)
        if match and (folder / name).is_file() and not skipped(folder / name):
            side = found.setdefault(match[1], {})
            if match[2] in side:
                raise InputError(
                    f"{folder}: expected one file for each language, found {side[match[2]].name} and {name}; remove one"
                )
            side[match[2]] = folder / name
    return found


def _pair(folder: Path, stem: str, sides: dict[str, Path], languages: Sequence[str]) -> PairedFiles:
    if "tsv" in sides:
        if len(sides) > 1:
            raise InputError(
                f"{folder}: expected one form of {stem}, found {first_names(sorted(p.name for p in sides.values()))}; "
                "remove the table or the other files"
            )
        return PairedFiles(stem, sides["tsv"], sides["tsv"], "tsv")
    if missing := [language for language in languages if language not in sides]:
        there = next(iter(sides.values()))
        raise InputError(
            f"{folder}: expected {stem}.{missing[0]} beside {there.name}, found none; add the file, or correct "
            "data.source and data.target"
        )
    source, target = (sides[language] for language in languages)
    if ".xml" in source.name:
        return PairedFiles(stem, source, target, "xml")
    return PairedFiles(stem, source, target, "tags" if ".tags." in source.name else "lines")
