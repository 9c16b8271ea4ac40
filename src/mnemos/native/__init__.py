"""C++ kernels with a C interface. They are built at installation, if there is a compiler; each has a PyTorch fallback.

The library is loaded when it is first needed. `python -m mnemos.native.build` builds it by hand.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from mnemos.errors import InputError

__all__ = ["NAMES", "instruction_set", "instruction_sets", "library", "variant", "why_not"]

NAMES = ("baseline", "avx2", "avx512", "avx512bf16")  # in the order of the kernels' variants; the last: native/pairs.h
_chosen: int | None = None

REMEDY = "install a C++ compiler (such as g++) and run `python -m mnemos.native.build`, or install mnemos again"


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    from .build import (
        LIBRARY,
        fingerprint,
    )  # here: `python -m mnemos.native.build` warns of a module that is imported already

    if not LIBRARY.exists():
        return None, f"the native kernels were not built: {REMEDY}"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.mnemos_sources.restype = ctypes.c_char_p
        if loaded.mnemos_sources().decode() != fingerprint():
            return None, f"the native kernels were built from other sources: {REMEDY}"
    except (OSError, AttributeError) as error:
        return None, f"the native kernels cannot be loaded ({error}): {REMEDY}"
    loaded.mnemos_forward.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_double]
    loaded.mnemos_backward.argtypes = [ctypes.c_int, ctypes.c_void_p]
    loaded.mnemos_map.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    loaded.mnemos_map.restype = None
    loaded.mnemos_bidirectional.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_double]
    loaded.mnemos_decode.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 5]
    loaded.mnemos_cache.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.mnemos_delta.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_double]
    loaded.mnemos_convolution.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.mnemos_selective.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.mnemos_token.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
    loaded.mnemos_norm.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
    loaded.mnemos_norm.restype = None
    loaded.mnemos_window.argtypes = [ctypes.c_int, ctypes.c_void_p, *[ctypes.c_double] * 3]
    loaded.mnemos_activate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    loaded.mnemos_activate.restype = None
    return loaded, ""


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None if there are none; then `why_not()` says why."""
    return _load()[0]


def why_not() -> str:
    """Why there are no kernels and what to do, in one line; empty if there are."""
    return _load()[1]


def instruction_sets() -> list[str]:
    """The instruction sets that the kernels have and this processor can run, best last; empty without kernels."""
    loaded = library()
    return [] if loaded is None else list(NAMES[: loaded.mnemos_best() + 1])


@contextlib.contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """A context in which all kernels use this instruction set: `with mnemos.native.instruction_set("avx2"): ...`.

    It serves tests, measurements and exact repetition on other processors, and holds for all threads. Raises
    InputError for one that `instruction_sets()` does not have.
    """
    global _chosen
    if name not in instruction_sets():
        raise InputError(f"expected an instruction set of {', '.join(instruction_sets()) or 'none'}, found {name!r}")
    before, _chosen = _chosen, NAMES.index(name)
    try:
        yield
    finally:
        _chosen = before


def variant(loaded: ctypes.CDLL) -> int:
    """The number of the instruction set in `NAMES` that the kernels use: the processor's best, or the chosen one."""
    best: int = loaded.mnemos_best() if _chosen is None else _chosen
    return best
