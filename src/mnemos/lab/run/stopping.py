"""How training ends early: the signals that request it."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def calling(function: Callable[[], object]) -> Iterator[None]:
    """Inside the `with`, SIGINT and SIGTERM call a function, and nothing else; only the main thread receives them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: function()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
