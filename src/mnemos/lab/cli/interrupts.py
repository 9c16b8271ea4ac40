"""Ctrl-C in the program `mnemos`. It imports nothing slow, so that it can be installed before anything else is."""

import contextlib
import os
import signal
import sys
from types import FrameType


def end_at_once() -> None:
    """Make Ctrl-C end this program with one line and exit code 130, also while libraries are imported.

    Python's KeyboardInterrupt is lost in the import of a compiled library, or becomes another error. Training replaces
    this handler to save a checkpoint. A parent that ignores Ctrl-C for its children stays in charge.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):  # the signal may have come in the middle of a write, or the output is gone
        sys.stdout.flush()
    if os.isatty(2):
        os.write(2, b"\r\x1b[K\x1b[?25h")  # clear the line of a progress bar, and show the cursor that it hides
    os.write(2, b"mnemos: interrupted\n")
    os._exit(130)
