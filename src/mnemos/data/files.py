"""Read files as bytes, gzipped or not. Errors give the file and the offset."""

import gzip
import zlib
from pathlib import Path

from mnemos.types import InputError


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
