"""The random generators that a step may draw from: the global ones and those that the caller names."""

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from mnemos import generators
from mnemos.types import InputError

RandomStates = dict[str, object]  # by generator: its state; states that are equal are one object


class Generators:
    """PyTorch's generators on every device in use, the global ones of Python and NumPy, and the given ones.

    own: generators that the step draws from besides the global ones (torch.Generator, random.Random,
    numpy.random.Generator, numpy.random.RandomState).
    Cost of `take` for generators that have not drawn: about 15 µs.
    """

    def __init__(self, own: Iterable[object] | None = None) -> None:
        self._sources: dict[str, _Source] = {
            "cpu": _Source(torch.get_rng_state, torch.set_rng_state, _bytes),
            "python": _Source(random.getstate, random.setstate),
        }
        if own is not None and not isinstance(own, Iterable):
            raise InputError(f"replay: expected generators=[...], found one {type(own).__name__}; give it in a list")
        for i, one in enumerate(own or ()):
            self._sources[f"own {i}"] = _own(one)

    def take(self) -> RandomStates:
        """The states of all generators. The state of a generator that has not drawn is the object of the last call."""
        # NumPy's generator is imported, and an accelerator initialised, by the first use; so look again at each call.
        if "numpy" not in self._sources and "numpy.random" in sys.modules:
            self._sources["numpy"] = _NumPy()
        for name, device in generators.devices():
            if name not in self._sources:
                self._sources[name] = _device(device)
        return {name: source.take() for name, source in self._sources.items()}

    def put(self, taken: RandomStates) -> None:
        """Set the generators to these states."""
        for name, state in taken.items():
            self._sources[name].put(state)


class _Source:
    """One generator: its state is read, and compared with the one that it was last known to have."""

    def __init__(
        self, read: Callable[[], Any], write: Callable[[Any], object], key: Callable[[Any], Any] = lambda state: state
    ) -> None:
        self._read, self._write, self._key = read, write, key
        self._last: Any = None

    def take(self) -> Any:
        state = self._read()
        if self._last is None or self._key(state) != self._key(self._last):
            self._last = state
        return self._last

    def put(self, state: Any) -> None:
        self._write(state)
        self._last = state


class _NumPy(_Source):
    """NumPy's global generator. Its state is read in 140 µs, and its 2,500 bytes of memory in one."""

    def __init__(self) -> None:
        super().__init__(lambda: np.random.get_state(legacy=False), np.random.set_state)  # noqa: NPY002
        self._memory: bytes | None = None  # at the state of `_last`

    def take(self) -> Any:
        if not self._unchanged():
            self._last, self._memory = self._read(), _memory()
        return self._last

    def put(self, state: Any) -> None:
        if state is not self._last or not self._unchanged():
            self._write(state)
            self._last, self._memory = state, _memory()

    def _unchanged(self) -> bool:
        """Whether the generator has its last known state.

        A normal number may have been drawn in advance (`has_gauss`); taking it changes no byte. With none in advance, a
        draw of any kind changes the bytes.
        """
        if self._last is None or self._memory is None or self._last["has_gauss"]:
            return False
        return self._memory == _memory()


def _memory() -> bytes | None:
    """The memory of NumPy's global generator; None if it is not the default MT19937 of the known layout."""
    bits = _numpy_random.get_bit_generator()
    if type(bits) is not np.random.MT19937 or not _layout_known():
        return None
    return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


_numpy_random: Any = np.random  # its stubs lack get_bit_generator
_MT19937_BYTES = 624 * 4 + 4  # the key, and the position in it
_known: bool | None = None


def _layout_known() -> bool:
    """Whether the memory of an MT19937 is its key and its position, as NumPy's mt19937.h has it."""
    global _known
    if _known is None:
        bits = np.random.MT19937(0)
        state: Any = bits.state["state"]
        expected = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
        _known = ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES) == expected
    return _known


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _device(device: torch.device) -> _Source:
    module, where = torch.get_device_module(device), generators.device_arguments(device)
    return _Source(lambda: module.get_rng_state(*where), lambda state: module.set_rng_state(state, *where), _bytes)


def _own(one: Any) -> _Source:
    """The access to a generator of the caller."""
    if isinstance(one, torch.Generator):
        return _Source(one.get_state, one.set_state, _bytes)
    if isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):  # which has no state
        return _Source(one.getstate, one.setstate)
    if isinstance(one, np.random.RandomState):
        return _Source(lambda: one.get_state(legacy=False), one.set_state, _hashable)
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator
        return _Source(lambda: bits.state, lambda state: setattr(bits, "state", state), _hashable)
    raise InputError(
        "replay: expected generators of torch (torch.Generator), Python (random.Random) or NumPy "
        f"(numpy.random.Generator), found {type(one).__name__}"
    )


def _hashable(state: Any) -> Any:
    """A NumPy state with bytes in the place of arrays, which compare as a whole."""
    if isinstance(state, dict):
        return {name: _hashable(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
