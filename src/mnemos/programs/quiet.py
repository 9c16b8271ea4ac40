"""Keep what PyTorch's exporters print off the terminal, without touching what other threads print."""

import contextlib
import sys
import threading
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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, what this thread writes to `sys.stdout` and `sys.stderr` is dropped; other threads that export wait."""
    with _LOCK:
        streams: list[Any] = [_OfOthers(sys.stdout), _OfOthers(sys.stderr)]
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                yield
        finally:  # who has kept one, such as a handler of logging, goes on as if it were the stream
            for stream in streams:
                stream.drops = False
