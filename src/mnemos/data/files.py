"""Files as bytes, gzipped or not, with errors that give the file and the offset; and a line of their names."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from mnemos.types import InputError

_NAMED = 4  # names at most in a line


def read_bytes(path: str | Path) -> bytes:
    """The contents of a file, decompressed if its first two bytes are gzip's; its name does not matter.

    Raises InputError if the file is missing or unreadable, or its gzip stream is truncated or damaged.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path}: expected a readable file, but it cannot be opened ({error.strerror}); check the path"
        ) from None
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except EOFError:
        raise InputError(
            f"{path}: expected a complete gzip file, found it truncated at offset {len(data)}; fetch it again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: expected a gzip file, found damaged data ({error}); fetch it again") from None


def first_names(names: Sequence[str]) -> str:
    """The first four names, and how many more there are."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
