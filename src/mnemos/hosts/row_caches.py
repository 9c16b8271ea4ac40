"""The caches of an encoder's rows during a call of `carry`: what a branch reads before it, and leaves after it."""

import contextlib
import threading
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from mnemos.types import InputError


class RowCaches:
    """The caches [B, Tm, Dm] of the rows by branch, `before` and `after` a call."""

    def __init__(self, before: Mapping[nn.Module, Tensor]) -> None:
        self.before, self.after = before, dict[nn.Module, Tensor]()


class _Present(threading.local):
    """The call that is being made. Threads may share a model."""

    rows: RowCaches | None = None


_present = _Present()


@contextlib.contextmanager
def carried(before: Mapping[nn.Module, Tensor]) -> Iterator[RowCaches]:
    """Branches that are called inside read `before`; those that are not in it begin new rows."""
    outside, _present.rows = _present.rows, RowCaches(before)
    try:
        yield _present.rows
    finally:
        _present.rows = outside


def carrying() -> bool:
    """Whether this code runs inside a call of `carry`."""
    return _present.rows is not None


def rows_before(branch: nn.Module, rows: int, zeros: Tensor) -> Tensor:
    """The caches [B, Tm, Dm] of the rows that a branch is called with; those of new rows are `zeros` [Tm, Dm].

    Layers that share a branch, as in ALBERT, all read what was there before the call.
    """
    present = _present.rows
    found = None if present is None else present.before.get(branch)
    if found is None:
        return zeros.expand(rows, -1, -1)
    if found.shape != (rows, *zeros.shape):
        raise InputError(
            f"carry: expected a state of {rows} rows of {list(zeros.shape)}, found {list(found.shape)}; pass None to "
            "begin"
        )
    return found


def rows_written(branch: nn.Module, caches: Tensor) -> None:
    """Keep what a branch leaves in the caches of its rows, [B, Tm, Dm]."""
    if _present.rows is not None:
        _present.rows.after[branch] = caches
