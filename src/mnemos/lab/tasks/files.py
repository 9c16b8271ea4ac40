"""Files as bytes, gzipped or in tar archives, and what is plainly no text."""

import gzip
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mnemos import atomic
from mnemos.errors import InputError, one_line

_NAMED = 4  # names at most in a line
HEAD = 8192  # bytes that tell whether a file is text
# Of files whose first bytes need not hold a byte 0.
_BEGINNINGS = {
    b"PAR1": "a parquet file",
    b"PK\x03\x04": "a zip archive, as .docx, .epub and .npz are",
    b"%PDF-": "a PDF document",
    b"{\\rtf": "an RTF document",
}
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".arrow")
_RECORDS = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")


def read_bytes(path: str | Path) -> bytes:
    """The contents of a file, decompressed if its first two bytes are gzip's; its name does not matter."""
    path = Path(path)
    try:
        data = atomic.read_bytes(path)
    except OSError as error:
        raise InputError(
            f"{path}: expected a readable file, but it cannot be opened ({error.strerror}); check the path"
        ) from None
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: expected a whole gzip file, found damaged data ({error}); fetch it again") from None


def not_text(head: bytes, name: str) -> str:
    """What a file plainly is instead of text, by its name and its first `HEAD` bytes, decompressed; "" for text."""
    for begin, what in _BEGINNINGS.items():
        if head.startswith(begin):
            return what
    if b"\0" in head:  # as git and grep decide
        return "a byte 0, as in binary files and UTF-16"
    ending = os.path.splitext(name.lower().removesuffix(".gz"))[1]
    if ending == ".json" and _RECORDS.match(head):
        return "an array of JSON objects, whose texts are read if it is saved as JSON lines (.jsonl)"
    return f"a table ({ending})" if ending in _TABLES else ""


def check_text(data: bytes, name: str) -> bytes:
    """The data. Raises InputError for what is plainly no text, and for a byte 0 anywhere."""
    what = not_text(data[:HEAD], name)
    if not what and (zero := data.find(b"\0", HEAD)) >= 0:
        what = f"a byte 0 at offset {zero:,}, as in binary files"
    if what:
        raise InputError(f"{name}: expected text, found {what}; write its text to a file of plain UTF-8, and name that")
    return data


def repeated(splits: Mapping[Any, Mapping[str, Hashable]]) -> Iterator[str]:
    """A line that says what is in two splits, if anything is. splits: {split: {name: what is equal for equals}}."""
    first: dict[Hashable, tuple[str, str]] = {}
    pairs = []
    for split, names in splits.items():
        for name, content in names.items():
            other = first.setdefault(content, (split, name))
            if other[0] != split:
                pairs.append(f"{name} ({split}) and {other[1]} ({other[0]})")
    if pairs:
        more = f", and {len(pairs) - 1:,} further pairs" if pairs[1:] else ""
        advice = "remove one of each: the score of the other tells nothing of new data"
        yield f"warning: the same data in two splits: {pairs[0]}{more}; {advice}"


def first_names(names: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def archive_members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """The name and bytes of each wanted file of a tar, gzipped or not, in their order, one at a time.

    Raises InputError if the archive is missing, damaged or truncated, and for a wanted link or pipe: without it the
    data would be fewer.
    """
    atomic.check_file(archive)
    try:
        with tarfile.open(archive) as packed:
            for member in filter(lambda one: wanted(one.name) and not one.isdir(), packed):
                if not member.isreg():
                    raise tarfile.ReadError(f"{member.name} is a link or no file: pack files (tar --dereference)")
                yield member.name, packed.extractfile(member).read()  # type: ignore[union-attr]
            # Two blocks of zeros end a tar file. Without them tarfile reads a truncated one as a smaller one.
            rest: Any = packed.fileobj
            if rest.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("truncated")
            rest.read()  # to the end, where gzip has its checksum
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{archive}: expected a tar file, but it is missing or damaged ({one_line(error)}); fetch it again"
        ) from None
