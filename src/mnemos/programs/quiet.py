"""Keep what PyTorch's exporters print and warn of off the terminal, without touching that of other threads."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_LOCK = threading.RLock()  # two exports at once would restore each other's streams


class _OfOthers:
    """A stream that drops what one thread writes, as long as it is told to, and passes on everything else."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()
        self.drops = True

    def write(self, text: str) -> int:
        """As of a stream."""
        if self.drops and threading.get_ident() == self._thread:
            return len(text)
        return int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _FromHere:
    """In place of the pattern of a filter of warnings: it matches all of one thread, as long as it is told to."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.drops = True

    def match(self, text: str) -> bool:
        """As of a pattern."""
        return self.drops and threading.get_ident() == self._thread


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, what this thread writes to `sys.stdout` and `sys.stderr` is dropped; other threads that export wait.

    Its warnings are ignored, also where a filter makes errors of them. `warnings.catch_warnings` would ignore those
    of all threads, and take away the filters that others set meanwhile.
    """
    with _LOCK:
        streams: list[Any] = [_OfOthers(sys.stdout), _OfOthers(sys.stderr)]
        here = _FromHere()
        entry = ("ignore", here, Warning, None, 0)
        _filters().insert(0, entry)
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                yield
        finally:  # who has kept one, such as a handler of logging, goes on as if it were the stream
            for one in (*streams, here):
                one.drops = False
            filters = _filters()
            if entry in filters:  # not so if another thread's `catch_warnings` has put its own list in place meanwhile
                filters.remove(entry)


def _filters() -> Any:
    """The list of the filters of warnings. `warnings.filterwarnings` adds to it, but takes a pattern as text only."""
    return warnings.filters
