"""What a process uses, read from Linux's /proc, and whether it grows."""

import contextlib
import ctypes
import gc
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from mnemos.types import leaves

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Usage(NamedTuple):
    """at: a monotonic time. cpu: seconds of all its threads. rss: resident bytes. handles: open files and sockets."""

    at: float
    cpu: float
    rss: int
    handles: int
    threads: int


def usage(pid: int | str = "self") -> Usage:
    """Of one process, without those that it started."""
    place = Path("/proc") / str(pid)
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    cpu = (int(fields[11]) + int(fields[12])) / TICK
    resident = int((place / "statm").read_text().split()[1]) * PAGE
    return Usage(time.monotonic(), cpu, resident, len(os.listdir(place / "fd")), int(fields[17]))


def settle() -> None:
    """Give the system back what is freed (with glibc), so that what is resident is in use."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def tenths(values: list[float]) -> tuple[float, float]:
    """The medians of the first and of the last tenth."""
    count = max(1, len(values) // 10)
    return statistics.median(values[:count]), statistics.median(values[-count:])


def state_bytes(state: object) -> int:
    """Bytes of all tensors of a state."""
    return sum(x.numel() * x.element_size() for x in leaves(state) if isinstance(x, torch.Tensor))
