"""Tar archives: their regular files, read in memory. Links, devices and files with holes are refused."""

import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from mnemos.types import InputError


class Member(NamedTuple):
    """A file of an archive; `read` returns its bytes, before the next member is taken."""

    name: str
    size: int
    read: Callable[[], bytes]


def members(file: Any, archive: Path, wanted: Callable[[str], bool]) -> Iterator[Member]:
    """The files of an open, uncompressed tar file whose names are wanted, in their order.

    Nothing is written to disk, and no link is followed. Memory: one member at a time.
    Raises InputError for a damaged archive, and for a wanted name that is no regular file: a link, which may lead to
    itself, a named pipe, a device, or a file with holes, which has more bytes than the archive.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:") as packed:
            while (member := packed.next()) is not None:
                packed.members = []  # type: ignore[attr-defined]  # tarfile would keep them all, millions perhaps
                if packed.offset < member.offset_data:  # where the next member begins
                    raise InputError(
                        f"{archive}: {member.name}: expected a size of at least 0, found {member.size}; fetch the file "
                        "again"
                    )
                if member.isdir() or not wanted(member.name):
                    continue
                if not member.isreg() or member.issparse():
                    raise InputError(
                        f"{archive}: {member.name}: expected a regular file, found {_kind(member)}; pack the file"
                    )
                content = packed.extractfile(member)
                assert content is not None
                yield Member(member.name, member.size, partial(_read, content, archive))
    except InputError:
        raise
    except Exception as error:  # a damaged archive can raise any exception
        raise _damaged(archive, error) from None


def _read(content: IO[bytes], archive: Path) -> bytes:
    try:
        return content.read()
    except InputError:
        raise
    except Exception as error:
        raise _damaged(archive, error) from None


def _damaged(archive: Path, error: Exception) -> InputError:
    problem = " ".join(str(error).split()) or type(error).__name__
    return InputError(f"{archive}: expected a tar file, but it is damaged ({problem}); fetch the file again")


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a link to {member.linkname!r:.80}"
    return "a file with holes" if member.issparse() else "a named pipe or a device"
