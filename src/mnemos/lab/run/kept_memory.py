"""Memory that a training has freed stays with the process, so that the next update need not ask the system for it."""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # mallopt(3)
_PAD = 256 << 20  # bytes to ask the system for at a time


def keep_freed_memory() -> bool:
    """Tell the C library to keep large freed blocks for later ones, for the rest of the process; whether it does.

    By default glibc returns blocks above 32 MiB to the system, and each update's activations are mapped and cleared
    again: a quarter of a small translation model's update (log/2026-11-23-dropout-and-pages.md). Nothing happens with
    another C library, or where the environment has settings or an allocator of its own.
    """
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)
    if own or platform.libc_ver()[0] != "glibc":
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _PAD))
    return all(ctypes.CDLL(None).mallopt(*setting) == 1 for setting in settings)
