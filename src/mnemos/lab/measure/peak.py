"""The peak memory of a call, beyond what the process used before it."""

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(run: Callable[[], object], device: str = "cpu") -> int | None:
    """Peak bytes of `run()` beyond those in use before it; None on systems other than Linux or a GPU.

    On the CPU this is the resident size of the process, exact to some dozen pages. Freed memory is first returned to
    the system; memory that an earlier call left to the allocator would hide what this call needs.
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
    _CLEAR.write_text("5")  # resets VmHWM, the peak of the resident size
    before = _size("VmRSS")
    run()
    return max(0, _size("VmHWM") - before)


def _size(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
