"""Keep what PyTorch's exporters print and warn of off the terminal."""

import contextlib
import io
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, what is written to `sys.stdout` and `sys.stderr` is dropped.

    Warnings are ignored, also where a filter makes errors of them. This holds for all threads.
    """
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
