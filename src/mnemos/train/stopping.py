"""How training ends before its time: the two exceptions, and the signals that ask for an end."""

import signal
import threading
from types import FrameType
from typing import Any


class TrainingFailed(Exception):  # noqa: N818
    """The work failed (a loss that is not finite, a disk that is full): one line of what, where and what to do."""


class Interrupted(Exception):  # noqa: N818
    """A signal asked for an end, and the run was saved first: one line of where it stands and how it goes on."""


class StopSignals:
    """Inside the `with`, SIGINT and SIGTERM only set `asked`, so that an update is never left half done.

    A second Ctrl-C ends at once, as it does anywhere. Threads other than the main one cannot hear signals:
    there, nothing is changed and nothing is ever asked.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
