"""Read the pickles of CIFAR without unpickling: the few opcodes that these files use, and nothing that a file may call.

A pickle is a program for a stack machine. A general unpickler imports and calls what the file names, and NumPy's own
constructors are not safe on hostile bytes: an array of dtype object whose bytes come from the file holds pointers of
the file's choosing. This reader knows the opcodes of the official files (protocol 2, written by Python 2) and of the
same dicts written today (protocols 2 to 4). The four names that such files refer to are marks on its stack; calls of
them with any but the usual arguments are refused. An array is a view of bytes of the file, of uint8 or int64 alone.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PickleError(ValueError):
    """The bytes are no pickle, or one with more than plain values and plain arrays in it."""


def read_pickle(data: bytes) -> dict[Any, Any]:
    """The dict of a pickle. Its values are None, bool, int, float, bytes, str, lists, tuples, dicts and arrays.

    Text of Python 2 becomes bytes. Arrays are uint8 or int64 of any shape, read-only views in the order of the file.
    Values inside the dict may be shared, and lists and dicts may contain themselves. Memory: that of the values, at
    most some hundred bytes for each of `OPCODES`; a length in the file allocates nothing beyond the file's own bytes.
    Raises PickleError for anything else.
    """
    found = _Machine(data).run()
    if not isinstance(found, dict):
        raise PickleError(f"found a {type(found).__name__}, not a dict")
    return {key: value.values if isinstance(value, _Array) else value for key, value in found.items()}


@dataclass(frozen=True)
class _Name:
    """A name that a file refers to; nothing is imported."""

    module: str
    name: str


@dataclass(eq=False)
class _Kind:
    """What a file says of a dtype: its code, and whether its byte order was given."""

    code: str
    ordered: bool = False


@dataclass(eq=False)
class _Array:
    """An array whose content is given by BUILD."""

    values: NDArray[Any] | None = None


OPCODES = 4_000_000  # at most in a file; the official ones have up to 200,000, for 50,000 images
_ORDERS = {"u1": "|", "i8": "<"}  # the dtypes, each with its byte order
_ENCODE = _Name("_codecs", "encode")  # Python 3 writes bytes this way in protocol 2
_NDARRAY = _Name("numpy", "ndarray")
_DTYPE = _Name("numpy", "dtype")
_RECONSTRUCT = _Name("numpy.core.multiarray", "_reconstruct")
_KNOWN = {name: name for name in (_ENCODE, _NDARRAY, _DTYPE, _RECONSTRUCT)}
_KNOWN[_Name("numpy._core.multiarray", "_reconstruct")] = _RECONSTRUCT


class _Machine:
    """The stack machine: `run` reads opcodes until STOP."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}
        self.encoded = 0  # bytes that calls of _codecs.encode have made

    def run(self) -> Any:
        """The value on top of the stack at STOP."""
        for _ in range(OPCODES):
            opcode = self.take(1)
            if opcode == b".":
                return self.pop()
            step = _STEPS.get(opcode)
            if step is None:
                raise PickleError(f"opcode {opcode!r} at offset {self.place - 1} is not one of CIFAR's files")
            step(self)
        raise PickleError(f"it has more than {OPCODES:,} opcodes")

    def take(self, count: int) -> bytes:
        """The next `count` bytes of the file."""
        start = self.place
        if count > len(self.data) - start:
            raise PickleError(f"it ends within a value of {count} bytes at offset {start}")
        self.place += count
        return self.data[start : self.place]

    def skip(self, count: int) -> None:
        """Pass over the next `count` bytes."""
        self.take(count)

    def number(self, form: str) -> Any:
        """The next number in a format of `struct`."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def line(self) -> str:
        """The next line, without its end."""
        end = self.data.find(b"\n", self.place)
        if end < 0:
            raise PickleError(f"it ends within a line at offset {self.place}")
        line = self.take(end + 1 - self.place)[:-1]
        return line.decode("ascii", errors="backslashreplace")

    def text(self, form: str) -> None:
        """Push a text after its length."""
        raw = self.take(self.number(form))
        try:
            self.stack.append(raw.decode("utf-8", errors="surrogatepass"))
        except UnicodeDecodeError:
            raise PickleError(f"a text before offset {self.place} is not UTF-8") from None

    def pop(self) -> Any:
        """Take the top of the stack, which is above the last mark."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise PickleError(f"the stack is empty at offset {self.place}")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        """The top of the stack, which stays, of this type."""
        value = self.pop()
        self.stack.append(value)
        if not isinstance(value, kind):
            raise PickleError(f"a {type(value).__name__} in place of a {kind.__name__} at offset {self.place}")
        return value

    def since_mark(self) -> list[Any]:
        """Take what is above the last mark, and the mark."""
        if not self.marks:
            raise PickleError(f"no mark at offset {self.place}")
        height = self.marks.pop()
        values = self.stack[height:]
        del self.stack[height:]
        return values

    def group(self, count: int) -> None:
        """Replace the top `count` values by a tuple."""
        self.stack.append(tuple(reversed([self.pop() for _ in range(count)])))

    def put(self, key: int) -> None:
        """Keep the top of the stack under a number."""
        self.memo[key] = self.top(object)

    def get(self, key: int) -> None:
        """Push what is kept under a number."""
        if key not in self.memo:
            raise PickleError(f"nothing is kept under number {key} at offset {self.place}")
        self.stack.append(self.memo[key])

    def append(self, values: list[Any]) -> None:
        """Add values to the list on the stack."""
        self.top(list).extend(values)

    def store(self, values: list[Any]) -> None:
        """Add keys and values to the dict on the stack."""
        found, keys = self.top(dict), values[::2]
        if len(values) % 2 or any(not isinstance(key, (bytes, str)) for key in keys):
            raise PickleError(f"a dict whose keys are not all texts before offset {self.place}")
        found.update(zip(keys, values[1::2], strict=True))

    def refer(self, module: Any, name: Any) -> None:
        """Push one of the known names."""
        found = _KNOWN.get(_Name(module, name)) if isinstance(module, str) and isinstance(name, str) else None
        if found is None:
            raise PickleError(f"it refers to {_shown(module)}.{_shown(name)}")
        self.stack.append(found)

    def call(self) -> None:
        """Replace a known name and its arguments by what the call stands for."""
        given, name = self.pop(), self.pop()
        if not isinstance(given, tuple) or not isinstance(name, _Name):
            raise PickleError(f"a call of a {type(name).__name__} at offset {self.place}")
        if name is _ENCODE and len(given) == 2 and isinstance(given[0], str) and given[1] == "latin1":
            self.stack.append(self.encode(given[0]))
        elif name is _DTYPE and len(given) == 3 and all(isinstance(flag, int) for flag in given[1:]):
            code = given[0].decode("latin1") if isinstance(given[0], bytes) else given[0]
            if not isinstance(code, str) or code not in _ORDERS:
                raise PickleError(f"an array of dtype {_shown(code)}, not u1 or i8")
            self.stack.append(_Kind(code))
        elif name is _RECONSTRUCT and len(given) == 3 and given[0] is _NDARRAY and _plain(given[1:], ((0,), b"b")):
            self.stack.append(_Array())
        else:
            raise PickleError(f"it calls {name.module}.{name.name} with other arguments at offset {self.place}")

    def encode(self, text: str) -> bytes:
        """The bytes of a text; all of them together are no more than the file, though a text may be used again."""
        self.encoded += len(text)
        if self.encoded > len(self.data):
            raise PickleError(f"more encoded bytes than the file has at offset {self.place}")
        try:
            return text.encode("latin1")
        except UnicodeEncodeError:
            raise PickleError(f"a text before offset {self.place} does not stand for bytes") from None

    def build(self) -> None:
        """Give the dtype or the array below the top of the stack its state."""
        state, target = self.pop(), self.top(object)
        if isinstance(target, _Kind):
            order = _ORDERS[target.code]
            if not _plain(state, (3, order.encode(), None, None, None, -1, -1, 0)) and not _plain(
                state, (3, order.encode(), None, None, None, -1, -1)
            ):  # Python 2's NumPy wrote states of 8 values, and older ones of 7
                raise PickleError(f"a dtype {target.code} with another state before offset {self.place}")
            target.ordered = True
        elif isinstance(target, _Array) and target.values is None:
            target.values = self.array(state)
        else:
            raise PickleError(f"a state for a {type(target).__name__} at offset {self.place}")

    def array(self, state: Any) -> NDArray[Any]:
        """The array of a state (1, shape, dtype, whether columns come first, bytes)."""
        if not isinstance(state, tuple) or len(state) != 5 or type(state[0]) is not int or state[0] != 1:
            raise PickleError(f"an array with another state before offset {self.place}")
        _, shape, kind, columns, raw = state
        sizes = isinstance(shape, tuple) and len(shape) <= 8 and all(type(n) is int and n >= 0 for n in shape)
        if not sizes or not isinstance(kind, _Kind) or not kind.ordered or type(columns) is not bool:
            raise PickleError(f"an array with another shape or dtype before offset {self.place}")
        width = 1 if kind.code == "u1" else 8
        if not isinstance(raw, bytes) or math.prod(shape) * width != len(raw):
            raise PickleError(f"an array whose bytes do not fit its shape before offset {self.place}")
        flat = np.frombuffer(raw, np.uint8 if width == 1 else np.dtype("<i8"))
        try:
            return flat.reshape(shape, order="F" if columns else "C")
        except ValueError:  # no bytes, and sizes that NumPy cannot multiply
            raise PickleError(f"an array whose shape is too large before offset {self.place}") from None


def _shown(name: Any) -> str:
    """The beginning of a name of a file in one line. Other values are not shown: they may contain themselves."""
    return repr(name[:60])[1:-1] if isinstance(name, str) else f"a {type(name).__name__}"


def _plain(found: Any, wanted: Any) -> bool:
    """Whether plain values have the types and values of `wanted`; where that is bytes, a text may be in their place."""
    if isinstance(wanted, tuple):
        return (
            isinstance(found, tuple)
            and len(found) == len(wanted)
            and all(_plain(one, other) for one, other in zip(found, wanted, strict=True))
        )
    if isinstance(wanted, bytes):
        return found == wanted if isinstance(found, bytes) else isinstance(found, str) and found == wanted.decode()
    return type(found) is type(wanted) and bool(found == wanted)


_STEPS: dict[bytes, Callable[[_Machine], None]] = {
    b"\x80": lambda m: _protocol(m.take(1)[0]),  # PROTO
    b"\x95": lambda m: m.skip(8),  # FRAME: how many bytes follow, which this reader need not know
    b"(": lambda m: m.marks.append(len(m.stack)),  # MARK
    b"N": lambda m: m.stack.append(None),  # NONE
    b"\x88": lambda m: m.stack.append(True),  # NEWTRUE
    b"\x89": lambda m: m.stack.append(False),  # NEWFALSE
    b"K": lambda m: m.stack.append(m.take(1)[0]),  # BININT1
    b"M": lambda m: m.stack.append(m.number("<H")),  # BININT2
    b"J": lambda m: m.stack.append(m.number("<i")),  # BININT
    b"G": lambda m: m.stack.append(m.number(">d")),  # BINFLOAT: labels that are floats get an error of their own
    b"U": lambda m: m.stack.append(m.take(m.take(1)[0])),  # SHORT_BINSTRING
    b"T": lambda m: m.stack.append(m.take(_length(m.number("<i")))),  # BINSTRING
    b"C": lambda m: m.stack.append(m.take(m.take(1)[0])),  # SHORT_BINBYTES
    b"B": lambda m: m.stack.append(m.take(m.number("<I"))),  # BINBYTES
    b"\x8e": lambda m: m.stack.append(m.take(m.number("<Q"))),  # BINBYTES8
    b"\x8c": lambda m: m.text("<B"),  # SHORT_BINUNICODE
    b"X": lambda m: m.text("<I"),  # BINUNICODE
    b"\x8d": lambda m: m.text("<Q"),  # BINUNICODE8
    b"]": lambda m: m.stack.append([]),  # EMPTY_LIST
    b"}": lambda m: m.stack.append({}),  # EMPTY_DICT
    b")": lambda m: m.stack.append(()),  # EMPTY_TUPLE
    b"\x85": lambda m: m.group(1),  # TUPLE1
    b"\x86": lambda m: m.group(2),  # TUPLE2
    b"\x87": lambda m: m.group(3),  # TUPLE3
    b"t": lambda m: m.stack.append(tuple(m.since_mark())),  # TUPLE
    b"a": lambda m: m.append([m.pop()]),  # APPEND
    b"e": lambda m: m.append(m.since_mark()),  # APPENDS
    b"s": lambda m: m.store([m.pop(), m.pop()][::-1]),  # SETITEM
    b"u": lambda m: m.store(m.since_mark()),  # SETITEMS
    b"q": lambda m: m.put(m.take(1)[0]),  # BINPUT
    b"r": lambda m: m.put(m.number("<I")),  # LONG_BINPUT
    b"\x94": lambda m: m.put(len(m.memo)),  # MEMOIZE
    b"h": lambda m: m.get(m.take(1)[0]),  # BINGET
    b"j": lambda m: m.get(m.number("<I")),  # LONG_BINGET
    b"c": lambda m: m.refer(m.line(), m.line()),  # GLOBAL
    b"\x93": lambda m: m.refer(*[m.pop(), m.pop()][::-1]),  # STACK_GLOBAL
    b"R": lambda m: m.call(),  # REDUCE
    b"b": lambda m: m.build(),  # BUILD
}


def _protocol(number: int) -> None:
    if number not in (2, 3, 4):
        raise PickleError(f"protocol {number}, not 2, 3 or 4")


def _length(number: int) -> int:
    if number < 0:
        raise PickleError(f"a text of length {number}")
    return number
