"""Memory that a training has freed stays with the process, so that the next update need not ask the system for it."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # mallopt(3)
_PREFIX = "MALLOC_"  # of the C library's own settings in the environment
_PAD = 256 << 20  # bytes to ask the system for at a time


def keep_freed_memory() -> bool:
    """Tell the C library to keep large freed blocks for later ones, for the rest of the process; whether it does.

    By default glibc returns blocks above 32 MiB to the system, and each update's activations are mapped and cleared
    again: a quarter of a small translation model's update (log/2026-11-23-dropout-and-pages.md). Nothing happens with
    another C library or allocator, or where the environment has settings of its own.
    """
    ours = sys.platform == "linux" and not any(name.startswith(_PREFIX) for name in os.environ)
    ours = ours and "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", "")
    if not ours or os.environ.get("LD_PRELOAD"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD))
    return all(mallopt(*setting) == 1 for setting in settings)
