"""Run a function in a child process with little memory, where a crash is an exit code."""

import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path


def limited(size: int, function: Callable[..., object], *arguments: object) -> int | None:
    """The exit code of a child process in which a function runs, with at most `size` more bytes of memory than now."""

    def run() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
        function(*arguments)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    return child.exitcode
