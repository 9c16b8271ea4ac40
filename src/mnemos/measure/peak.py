"""The most memory that a call takes, beyond what was there before it."""

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(run: Callable[[], object], device: str = "cpu") -> int | None:
    """Bytes that `run()` needed at its worst moment; None where the system does not tell (other than Linux or a GPU).

    On a processor it is the process's own size, to some dozen pages: freed memory is first handed back, or what a call
    before it left behind would hide what this one takes.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    if not _CLEAR.exists() or not os.access(_CLEAR, os.W_OK):
        run()
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    _CLEAR.write_text("5")  # forgets the largest size so far
    before = _size("VmRSS")
    run()
    return max(0, _size("VmHWM") - before)


def _size(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
