"""C++ kernels with a C interface. They are built at installation, if there is a compiler; each has a PyTorch fallback.

The library is loaded when it is first needed. `python -m mnemos.native.build` builds it by hand.

Most folders have one operator of `mnemos.ops`, of the same name (`window`: `window_state`); a header says what one call
is given, and the other files compute it. `decoder` has a token through a whole decoder (`decode`, for
`mnemos.generate`) and through a recurrent layer of Transformers (`token`, for `mnemos.fast`); `simd` what all of them
compute with. `library.cpp` is the C interface, `call.h` what its calls share, `codes` the numbers that Python shares.
"""

import contextlib
import ctypes
import functools
import re
import struct
from collections.abc import Iterator

from mnemos.errors import InputError

__all__ = [
    "INSTRUCTION_SETS", "instruction_set", "instruction_sets", "instructions", "layout", "library", "load_kernels",
    "why_not",
]  # fmt: skip

# What the kernels are compiled for, a variant each; C++ knows them by their number here. The last one has products of
# pairs of bfloat16 (simd/pairs.h).
INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "avx512bf16")
instructions = 0  # the number of what all kernels use: the processor's best, or the chosen one

REMEDY = "install a C++ compiler (such as g++) and run `python -m mnemos.native.build`, or install mnemos again"


# The arguments of each kernel: i an int, l an int64, d a double, p a pointer; "v" in front: it returns nothing.
_TYPES = {"i": ctypes.c_int, "l": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}
_KERNELS = {
    "forward": "ipd",
    "backward": "ip",
    "map": "vippll",
    "bidirectional": "iipd",
    "decode": "ippppp",
    "cache": "iip",
    "delta": "iipd",
    "convolution": "iip",
    "selective": "iip",
    "softmax": "iipd",
    "token": "ipdd",
    "norm": "vipdd",
    "window": "ipddd",
    "activate": "viipl",
}


_layouts: dict[str, list[str]] = {}  # of what is packed in Python


def layout(name: str, fields: str) -> struct.Struct:
    """How Python packs a record of the headers: "B T q:4" has its fields in order, with their words if several.

    It is compared with the record itself when the library is loaded.
    """
    _layouts[name] = fields.split()
    is_loaded = _load.cache_info().currsize > 0  # else it is compared later: no kernel is loaded for a layout alone
    if is_loaded and (loaded := library()):
        _compare(loaded, name)
    return struct.Struct(f"{sum(int(field.partition(':')[2] or 1) for field in _layouts[name])}q")


def _compare(loaded: ctypes.CDLL, name: str) -> None:
    fields = [name if words == 1 else f"{name}:{words}" for name, words in _fields(loaded, name)]
    if fields != _layouts[name]:
        raise RuntimeError(
            f"{name} of the kernels has the fields {' '.join(fields)}, Python {' '.join(_layouts[name])}"
        )


def _fields(loaded: ctypes.CDLL, record: str) -> list[tuple[str, int]]:
    """The fields of a record, each with its number of words of 64 bits."""
    fields = []
    if (text := loaded.mnemos_fields(record.encode())) is None:
        raise RuntimeError(f"RECORDS of native/library.cpp lacks FIELDS({record})")
    for line in text.decode().split(";"):  # such as `const float *weight, *bias`
        if declaration := re.fullmatch(r"\s*(const )?(unsigned )?(?P<type>\w+)(?P<names>.*)", line, re.DOTALL):
            for name in declaration["names"].split(","):
                words = 1
                if "*" not in name and declaration["type"] not in ("i64", "double"):  # a record in this one
                    words = sum(n for _, n in _fields(loaded, declaration["type"]))
                fields.append((name.strip(" *\n"), words))
    return fields


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    # Not at the top: `python -m mnemos.native.build` warns of a module that is imported already.
    from .build import LIBRARY, fingerprint

    if not LIBRARY.exists():
        return None, f"the native kernels were not built: {REMEDY}"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        loaded.mnemos_sources.restype = ctypes.c_char_p
        if loaded.mnemos_sources().decode() != fingerprint():
            return None, f"the native kernels were built from other sources: {REMEDY}"
    except (OSError, AttributeError) as error:
        return None, f"the native kernels cannot be loaded ({error}): {REMEDY}"
    for name, letters in _KERNELS.items():
        if (kernel := getattr(loaded, f"mnemos_{name}", None)) is None:
            raise RuntimeError(f"_KERNELS has {name}, native/library.cpp no mnemos_{name}")
        kernel.argtypes = [_TYPES[letter] for letter in letters.lstrip("v")]
        if letters[0] == "v":
            kernel.restype = None
    loaded.mnemos_fields.restype = ctypes.c_char_p
    for name in _layouts:
        _compare(loaded, name)
    global instructions
    instructions = loaded.mnemos_best()
    return loaded, ""


def library() -> ctypes.CDLL | None:
    """The loaded kernels, or None if there are none; then `why_not()` says why."""
    return _load()[0]


def load_kernels() -> tuple[ctypes.CDLL, int]:
    """The kernels, and the number of the instruction set, which every call takes. RuntimeError if there are none."""
    loaded, why = _load()
    if loaded is None:
        raise RuntimeError(why)
    return loaded, instructions


def why_not() -> str:
    """Why there are no kernels and what to do, in one line; empty if there are."""
    return _load()[1]


def instruction_sets() -> list[str]:
    """The instruction sets that the kernels have and this processor can run, best last; empty without kernels."""
    loaded = library()
    return [] if loaded is None else list(INSTRUCTION_SETS[: loaded.mnemos_best() + 1])


@contextlib.contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """A context in which all kernels use this instruction set: `with mnemos.native.instruction_set("avx2"): ...`.

    It serves tests, measurements and exact repetition on other processors, and holds for all threads. A backward must
    run in the set of its forward: another one reads what was kept by other widths, and its gradients are wrong. Raises
    InputError for one that `instruction_sets()` does not have.
    """
    global instructions
    if name not in instruction_sets():
        raise InputError(f"expected an instruction set of {', '.join(instruction_sets()) or 'none'}, found {name!r}")
    before, instructions = instructions, INSTRUCTION_SETS.index(name)
    try:
        yield
    finally:
        instructions = before
