"""The peak memory of a call, beyond what the process used before it."""

import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mnemos._compat import DispatchMode, pytree

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(run: Callable[[], object]) -> int | None:
    """Peak bytes of `run()` on the CPU beyond those in use before it; None on systems other than Linux.

    This is the resident size of the process, exact to some dozen pages. Freed memory is first returned to the system;
    memory that an earlier call left to the allocator would hide what this call needs.
    """
    gc.collect()
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


def live_peak_of(run: Callable[[], object]) -> int:
    """The most bytes of tensors that `run()` has at one time, beyond those that exist before it.

    Storages count from the operation that returns them until they are freed, as in torch.cuda.max_memory_allocated. So
    the count does not depend on the allocator or the machine, and leaves out what one operation needs within itself.
    """
    with _Live() as live:
        run()
    return live.most


class _Live(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.counted: set[int] = set()  # storages by their id: each is one object as long as it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if (key := id(storage)) not in self.counted | inputs:
                self.counted.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, key, storage.nbytes())
        return result

    def freed(self, key: int, size: int) -> None:
        self.counted.discard(key)
        self.now -= size


def _storages(values: Any) -> list[Any]:
    return [x.untyped_storage() for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]
