"""Rows of tokens of any number: in memory while they are few, in a temporary file when they are many."""

import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IN_MEMORY = 2**26  # bytes of tokens that are kept in memory


class TokenRows:
    """Rows of token ids, appended and then read by number.

    Beyond `in_memory` bytes they are in a temporary file, which is memory-mapped and ends with the process, so that a
    data set of any size needs 8 bytes of memory per row. Cost of reading a row: O(its length).
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=in_memory)  # noqa: SIM115
        self._in_memory, self._written = in_memory, 0
        self._ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._tokens: NDArray[np.int32] | None = None
        self._bounds = np.zeros(1, np.int64)

    def append(self, rows: Sequence[Sequence[int]]) -> None:
        """Add rows after those that are there."""
        if rows:
            flat = np.fromiter((token for row in rows for token in row), np.int32)
            self._file.write(flat.tobytes())
            self._ends.append(self._ends[-1][-1] + np.cumsum([len(row) for row in rows]))
            self._written += flat.nbytes
            self._tokens = None

    def __len__(self) -> int:
        return sum(map(len, self._ends)) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        self._finish()
        return np.diff(self._bounds)

    def row(self, number: int) -> NDArray[np.int32]:
        """The tokens of a row."""
        if self._tokens is None:
            self._finish()
        assert self._tokens is not None
        return self._tokens[self._bounds[number] : self._bounds[number + 1]]

    def _finish(self) -> None:
        if self._tokens is not None:
            return
        self._ends = [np.concatenate(self._ends)]
        self._bounds = self._ends[0]
        self._file.flush()
        if self._written > self._in_memory:
            self._tokens = np.memmap(self._file, np.int32, "r", shape=(self._written // 4,))
        else:
            self._file.seek(0)
            self._tokens = np.frombuffer(self._file.read(), np.int32)
            self._file.seek(0, 2)
