"""Files as bytes, gzipped or not, with errors that name the file and the place."""

import gzip
import zlib
from pathlib import Path

from mnemos.types import InputError


def read_bytes(path: str | Path) -> bytes:
    """The contents of a file, unpacked if it is gzipped (told by its first two bytes, not by its name).

    Raises InputError where the file is missing or unreadable, or its gzip stream is cut short or damaged.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be read, found none ({error.strerror})") from None
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except EOFError:
        raise InputError(f"{path}: the gzip stream is cut short at offset {len(data)}; fetch the file again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: the gzip stream is damaged ({error}); fetch the file again") from None
