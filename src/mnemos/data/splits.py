"""Held-out splits of rows that come in one piece."""

import numpy as np
from numpy.typing import NDArray

from mnemos.types import InputError

from .randomness import SPLIT, generator


def held_out(rows: int, sizes: tuple[int, ...], name: str) -> list[NDArray[np.int64]]:
    """Disjoint random parts of the given sizes, then the rest; rows in order, the same on every run.

    Raises InputError where a size is below 1 or nothing is left; `name` is the task's, for the message.
    """
    if min(sizes) < 1 or sum(sizes) >= rows:
        raise InputError(
            f"{name}: expected held-out sizes of at least 1 that leave some of the {rows} images to train on, "
            f"found {', '.join(map(str, sizes))}"
        )
    order = generator(0, SPLIT).permutation(rows)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes))]
