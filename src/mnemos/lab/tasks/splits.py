"""Random held-out splits of data sets that come as one list of rows."""

import numpy as np
from numpy.typing import NDArray

from mnemos.generators import SPLIT, generator
from mnemos.types import InputError


def held_out(rows: int, sizes: tuple[int, ...], name: str) -> list[NDArray[np.int64]]:
    """Disjoint random parts of the given sizes, and the rest as the last part. Each part is sorted.

    The parts are the same in every run. Raises InputError if a size is below 1 or no rows remain; `name` is the data
    set's, for the message.
    """
    if min(sizes) < 1 or sum(sizes) >= rows:
        raise InputError(
            f"{name}: expected held-out sizes of at least 1 that leave some of the {rows} images to train on, "
            f"found {', '.join(map(str, sizes))}; change these sizes"
        )
    order = generator(0, SPLIT).permutation(rows)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes))]
