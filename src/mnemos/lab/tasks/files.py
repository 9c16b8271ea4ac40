"""Files as bytes, gzipped or in tar archives, and what is plainly no text."""

import contextlib
import gzip
import io
import os
import tarfile
import warnings
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mnemos import atomic
from mnemos.atomic import check_file, special
from mnemos.errors import InputError
from mnemos.lab.errors import SkippedFile

UNPACKED = "MNEMOS_UNPACKED_GIB"
_NAMED = 4  # names at most in a line
_BLOCK = 2**20
HEAD = 8192  # bytes that tell whether a file is text
_BEGINNINGS = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PAR1": "a parquet file",
    b"PK\x03\x04": "a zip archive, as .docx, .epub and .npz are",
    b"7z\xbc\xaf": "a 7z archive",
    **{b"BZh%d1AY&SY" % level: "a file of bzip2" for level in range(1, 10)},
    b"\xfd7zXZ": "a file of xz",
    b"\x28\xb5\x2f\xfd": "a file of zstd",
    b"%PDF-": "a PDF document",
    b"{\\rtf": "an RTF document",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF87a": "a picture",
    b"GIF89a": "a picture",
    **{bytes((0x80, protocol)): "a pickle" for protocol in range(2, 6)},
}
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".arrow")
_warned: set[str] = set()  # a folder is listed several times: for its splits, and for a run's record of its files


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
        return Unpacked(gzip.GzipFile(fileobj=io.BytesIO(data)), path, most_unpacked(len(data))).read()
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
    """A line that says which files are in two splits, if any are. splits: {split: {name: what is equal for equals}}."""
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
        yield f"warning: equal files in two splits: {pairs[0]}{more}; {advice}"


def most_unpacked(packed: int) -> int:
    """How many bytes a file of `packed` bytes may expand to: one gibibyte, or 32 times as many if that is more.

    A file of a few megabytes can expand to more than any memory. The environment variable MNEMOS_UNPACKED_GIB, in
    gibibytes, replaces the limit: the owner of the machine sets it, and not a recipe, which may be a stranger's like
    the file.
    """
    setting = os.environ.get(UNPACKED, "")
    if not setting:
        return max(2**30, 32 * packed)
    with contextlib.suppress(ValueError):
        if 0 < (most := float(setting) * 2**30) < 2**62:
            return int(most)
    raise InputError(f"{UNPACKED}: expected a number of gibibytes above 0, found {setting[:40]!r}; correct it")


class Unpacked:
    """The decompressed bytes of an open file, up to `most`: reading or seeking beyond raises InputError.

    It has what `tarfile` needs of a file. No read allocates more than the file has, whatever size is asked for.
    """

    def __init__(self, file: Any, path: str | Path, most: int) -> None:
        self._file, self._path, self._most = file, path, most

    def read(self, size: int = -1) -> bytes:
        left = self._most - self._file.tell()
        most = left + 1 if size < 0 else min(size, left + 1)
        blocks, count = [], 0
        while count < most and (block := self._file.read(min(_BLOCK, most - count))):
            blocks.append(block)
            count += len(block)
        if count > left:
            raise self._too_large()
        return b"".join(blocks)

    def seek(self, offset: int) -> int:
        if offset > self._most:
            raise self._too_large()
        return int(self._file.seek(offset))

    def tell(self) -> int:
        return int(self._file.tell())

    def _too_large(self) -> InputError:
        return InputError(
            f"{self._path}: expected at most {self._most:,} bytes after decompression, found more; if you trust the "
            f"file, set {UNPACKED} to the gibibytes that it needs"
        )


def skipped(path: str | Path) -> bool:
    """Whether a path in a folder of data is `special`. A warning then says so, once for each path in a process."""
    what = special(path)
    if what and os.fspath(path) not in _warned:
        _warned.add(os.fspath(path))
        warnings.warn(f"{path}: skipped, because it is {what} and no file", SkippedFile, stacklevel=2)
    return bool(what)


def first_names(names: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class Member(NamedTuple):
    """A file of an archive; `read` returns its bytes, before the next member is taken."""

    name: str
    size: int
    read: Callable[[], bytes]


def archive_members(archive: Path, wanted: Callable[[str], bool]) -> Iterator[Member]:
    """The files of a tar file, gzipped or not, whose names are wanted, in their order.

    Nothing is written to disk, and no link is followed. Memory: one member at a time.
    """
    check_file(archive)

    def read(member: tarfile.TarInfo) -> bytes:
        with _readable(archive):
            return packed.extractfile(member).read()  # type: ignore[union-attr]

    with _readable(archive), open(archive, "rb") as file:
        is_packed, size = file.read(2) == b"\x1f\x8b", file.seek(0, os.SEEK_END)
        file.seek(0)
        content: Any = Unpacked(gzip.GzipFile(fileobj=file) if is_packed else file, archive, most_unpacked(size))
        with tarfile.open(fileobj=content, mode="r:") as packed:
            while (member := packed.next()) is not None:
                packed.members = []  # type: ignore[attr-defined]  # tarfile would keep them all, millions perhaps
                if packed.offset < member.offset_data:  # where the next member begins
                    raise tarfile.ReadError(f"{member.name} of {member.size} bytes")
                if member.isdir() or not wanted(member.name):
                    continue
                if not member.isreg() or member.issparse():
                    form = "a file with holes" if member.issparse() else "a link, a named pipe or a device"
                    raise InputError(f"{archive}: {member.name}: expected a regular file, found {form}; pack the file")
                yield Member(member.name, member.size, partial(read, member))
            # Two blocks of zeros end a tar file. Without them tarfile reads a truncated one as a smaller one.
            if content.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("truncated")
            content.read()  # to the end, where gzip has its checksum


@contextlib.contextmanager
def _readable(archive: Path) -> Iterator[None]:
    try:
        yield
    except (InputError, GeneratorExit):
        raise
    except Exception as error:  # a damaged archive can raise any
        problem = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{archive}: expected a tar file, but it is missing or damaged ({problem}); fetch it again"
        ) from None
