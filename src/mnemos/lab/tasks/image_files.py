"""A check of image files before training: that each is an image, and that none is truncated."""

import os
import warnings
from collections.abc import Sequence

import numpy as np

from mnemos.types import InputError

from .pictures import pillow, problem, read_image

CHECKED = 20_000  # files at most
# The bytes at the end of a complete file, by the format's name in Pillow. Some programs add a few bytes behind them.
_ENDS = {"JPEG": b"\xff\xd9", "MPO": b"\xff\xd9", "PNG": b"IEND\xaeB\x60\x82"}
_TAIL = 64  # bytes that are searched for the end


def check_image_files(paths: Sequence[str]) -> None:
    """Read the beginning and the end of each file, or of `CHECKED` evenly spaced ones of more: about 0.1 ms each.

    Raises InputError that names the first file that is no image or is truncated, and counts the others. A JPEG or PNG
    without its end marker is decoded, because cameras may add data behind the marker; a JPEG is decoded at 1/8 of its
    size. Damage elsewhere in a file is found when the file is decoded for a batch; `read_image` then names it.
    """
    spaced = np.linspace(0, len(paths) - 1, min(CHECKED, len(paths))).astype(int)
    bad = [found for path in (paths[i] for i in spaced.tolist()) if (found := _wrong(path))]
    if bad:
        more = f"; so are {len(bad) - 1} more of the {len(spaced):,} files that were opened" if bad[1:] else ""
        raise InputError(f"{bad[0]}{more}; replace or remove {'them' if more else 'it'}")


def _wrong(path: str) -> str | None:
    """What is wrong with a file; None for an image that seems complete."""
    try:
        with open(path, "rb") as file, warnings.catch_warnings(action="ignore"), pillow().open(file) as image:
            end = _ENDS.get(image.format)
            file.seek(-min(_TAIL, file.seek(0, os.SEEK_END)), os.SEEK_END)
            complete = end is None or end in file.read()
    except Exception as error:  # decoders can raise any exception
        return f"{path}: expected an image, but it cannot be opened ({problem(error)})"
    if not complete:
        try:
            read_image(path, least=1)
        except InputError as error:
            return str(error).rpartition(";")[0]
    return None
