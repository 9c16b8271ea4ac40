"""The tokens that a stream generates, step by step: rows end separately, and every step has a stream after it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mnemos.types import InputError, State, select

from .rollback import together
from .sampling import is_whole

if TYPE_CHECKING:
    from .stream import Stream

NO_TOKEN = -1  # after the end of a row that has no token for its end
Ids = Sequence[int] | Tensor


class Tokens(Iterator[Tensor]):
    """What `Stream.tokens` returns: an iterator over tokens [B] int64, each drawn when it is asked for.

    A row ends with a token of `eos`, or when its last new tokens are a sequence of `stop`; both belong to the row.
    Afterwards it has the first token of `eos`, or -1 without one, and the model reads it no further. The iterator ends
    after `length` tokens, or when all rows have ended. Every row draws in every step, also after its end, so what a
    row draws does not depend on the ends of the others.

    Attributes:
        ended: [B], which rows have ended.
    """

    def __init__(
        self, stream: "Stream", length: int, draw: Callable[[Tensor], Tensor], ends: Sequence[Sequence[int]], fill: int
    ) -> None:
        assert stream.last is not None
        self._begun, self._left, self._draw, self._ends, self._fill = stream, length, draw, ends, fill
        self._state, self._last = stream.state, stream.last
        self._rows = list(range(stream.rows))  # that have not ended, in the order of `_state`
        self._finished: list[tuple[list[int], tuple[State, Tensor]]] = []  # rows that have, with state and last token
        self._longest = max(map(len, ends), default=0)
        self._newest: list[list[int]] = [[] for _ in self._rows]  # the last tokens of each row

    @property
    def ended(self) -> list[bool]:
        """See the class."""
        return [row not in self._rows for row in range(self._begun.rows)]

    @property
    def stream(self) -> "Stream":
        """The stream after the tokens so far, each row after its own. Cost: a copy of the state if a row has ended."""
        running: list[tuple[list[int], tuple[State, Tensor]]] = []
        if self._rows:
            running = [(self._rows, (self._state, self._last))]
        state, last = together([*self._finished, *running])
        return type(self._begun)(self._begun.model, self._begun.step, state, last)

    def __next__(self) -> Tensor:
        if not self._left or not self._rows:
            raise StopIteration
        self._left -= 1
        with torch.no_grad():
            outputs, self._state = self._begun.step(self._last, self._state)
            outputs = outputs[:, -1]
            if self._finished:
                places = dict(zip(self._rows, range(len(self._rows)), strict=True))
                outputs = outputs[[places.get(row, 0) for row in range(self._begun.rows)]]
            drawn = self._draw(outputs)
            if not self._ends:
                self._last = drawn[:, None].clone()
                return drawn
            return self._checked(drawn)

    def _checked(self, drawn: Tensor) -> Tensor:
        """The tokens [B] with those of ended rows filled in; sets aside the rows that end here."""
        rows, values = self._rows, drawn.tolist()
        for row in rows:
            self._newest[row] = [*self._newest[row], values[row]][-self._longest :]
        ends = [any(self._newest[row][-len(end) :] == list(end) for end in self._ends) for row in rows]
        running = torch.tensor(rows, device=drawn.device)
        tokens = torch.full_like(drawn, self._fill).index_copy(0, running, drawn[running])
        self._last = drawn[running, None]
        if any(ends):
            now = torch.tensor(ends, device=drawn.device)
            both = self._state, self._last
            self._finished.append(([row for row, end in zip(rows, ends, strict=True) if end], select(both, now)))
            self._rows = [row for row, end in zip(rows, ends, strict=True) if not end]
            if self._rows:
                self._state, self._last = select(both, ~now)
        return tokens


def endings(eos: int | Ids | None, stop: Ids | Sequence[Ids] | None, size: int | None) -> tuple[list[list[int]], int]:
    """The sequences that end a row, and what follows in it. size: of the vocabulary, if it is known.

    Raises InputError unless eos is a token or several, and stop a sequence of tokens or several.
    """
    first = [] if eos is None else _ids([eos] if is_whole(eos) else eos, "eos as a token id or several", size)
    several = () if stop is None else stop if isinstance(stop, list | tuple) and not _is_one(stop) else (stop,)
    ends = [[token] for token in first] + [_ids(one, _STOP, size) for one in several]
    return ends, first[0] if first else NO_TOKEN


def _is_one(stop: Sequence[Any]) -> bool:
    return not stop or is_whole(stop[0])


_STOP = "stop as a sequence of token ids, or several"


def _ids(given: object, expected: str, size: int | None) -> list[int]:
    found = given.tolist() if isinstance(given, Tensor) else given
    if isinstance(found, str) or not isinstance(found, Sequence) or not found or not all(map(is_whole, found)):
        raise InputError(f"expected {expected}, found {given!r:.60}; encode the text with the model's vocabulary")
    if min(found) < 0 or (size is not None and max(found) >= size):
        known = f"from 0 to {size - 1}" if size is not None else "of at least 0"
        raise InputError(f"expected {expected}, each {known}, found {given!r:.60}; use the model's vocabulary")
    return [int(token) for token in found]
