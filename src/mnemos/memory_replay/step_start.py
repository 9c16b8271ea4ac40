"""What a step of a rollout starts from: the random generators, tensors that modules keep, and the stored state."""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos._compat import buffers_of
from mnemos.types import InputError

RandomStates = dict[str, object]  # by generator: its state; states that are equal are one object


@dataclass(slots=True)
class StepStart:
    """Everything that a step starts from. `leaves` of the state are read with `Store.fetch`."""

    leaves: list[object]
    structure: Any
    generators: RandomStates
    buffers: list[object]


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
            self._sources["numpy"] = _Source(
                lambda: np.random.get_state(legacy=False),  # noqa: NPY002
                np.random.set_state,
                _hashable,
            )
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


_ABSENT: object = object()
_NO_TENSOR = frozenset({bool, int, float, str, tuple, list, dict, OrderedDict, set, type(None)})  # a module has many
_LINE = 64  # bytes of a processor's cache line


class Buffers:
    """The tensors that a module keeps between forwards: buffers and plain attributes.

    A running statistic or a stored cache is a state that the caller does not see. An entry (a buffer or an attribute)
    is known from when it first holds a tensor; for earlier steps its value is that at the start of the rollout. At
    every step all known entries are compared, and copied if they have changed.
    """

    def __init__(self, module: nn.Module | None) -> None:
        # Per holder of tensors: what errors call it, the live mapping, and a copy of the mapping at the start.
        self._holders: list[tuple[str, MutableMapping[str, Any], dict[str, object]]] = []
        for prefix, part in module.named_modules() if module is not None else ():
            for kind, holder in (("buffer", buffers_of(part)), ("attribute", vars(part))):
                self._holders.append((f"{kind} {prefix}.".replace(" .", " "), holder, dict(holder)))
        self._places: dict[tuple[int, str], tuple[str, MutableMapping[str, Any], object]] = {}
        self._current: Sequence[object] = ()  # known to equal the entries; empty if a step has run since
        self.find()

    def find(self) -> None:
        """Add the entries that hold a tensor and are not known yet."""
        for called, holder, at_first in self._holders:
            for name, value in holder.items():
                if type(value) not in _NO_TENSOR and isinstance(value, Tensor):
                    place = id(holder), name
                    if place not in self._places and _plain(value):
                        self._places[place] = called + name, holder, at_first.get(name, _ABSENT)

    def forget(self) -> None:
        """Note that a step is about to run, which may write."""
        self._current = ()

    def take(self, before: Sequence[object] = ()) -> list[object]:
        """The values of all entries; those that equal `before` are shared with it."""
        self.find()
        found: list[object] = []
        for i, ((_, name), (_, holder, _)) in enumerate(self._places.items()):
            value = holder.get(name, _ABSENT)
            if i < len(before) and _are_equal(value, before[i]):
                found.append(before[i])
            else:
                found.append(value.detach().clone() if isinstance(value, Tensor) else value)
        self._current = found
        return found

    def put(self, values: Sequence[object]) -> None:
        """Restore the values, by copying into the tensors of the start of the rollout where shape and type fit."""
        if self._places:
            with torch.no_grad():
                self._put(values)

    def _put(self, values: Sequence[object]) -> None:
        wanted, current = self._complete(values), self._current
        for i, (((_, name), (_, holder, own)), value) in enumerate(zip(self._places.items(), wanted, strict=True)):
            if i < len(current) and current[i] is value and holder.get(name) is own and isinstance(own, Tensor):
                continue
            if value is _ABSENT:
                holder.pop(name, None)
            elif not isinstance(value, Tensor) or value is own:
                holder[name] = value
            elif not isinstance(own, Tensor) or not _plain(own) or _kind(own) != _kind(value):
                holder[name] = value.clone()
            else:
                holder[name] = own
                if not torch.equal(own, value):
                    own.copy_(value)
        self._current = wanted

    def find_changed(self, values: Sequence[object]) -> Iterator[tuple[str, object, object]]:
        """(name, value now, value then) of every entry that differs from `values`."""
        now = self.take(values)
        for (called, _, _), found, then in zip(self._places.values(), now, self._complete(values), strict=True):
            if found is not then:
                yield called, None if found is _ABSENT else found, None if then is _ABSENT else then

    def _complete(self, values: Sequence[object]) -> list[object]:
        """`values`, followed by the values at the start of the entries that were not known then."""
        return [*values, *(own for _, _, own in list(self._places.values())[len(values) :])]


def _plain(value: Tensor) -> bool:
    strange = value.layout != torch.strided or value.is_meta or value.is_inference()
    return not strange and not isinstance(value, nn.Parameter)


def _kind(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.device


def _are_equal(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return _kind(a) == _kind(b) and torch.equal(a, b)


def compact(leaves: list[object], incoming: list[object], pool: "StatePool | None" = None) -> list[object]:
    """Leaves that keep no other memory alive: a view of an activation is copied, to the pool if there is one.

    A view of a storage that the incoming state shares is not copied: such a memory is a growing buffer.
    """
    shared = {x.untyped_storage().data_ptr() for x in incoming if isinstance(x, Tensor)}

    def small(place: int, x: object) -> object:
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() in shared:
            return x
        if pool is not None and pool.suits(x):
            return pool.put(place, x)
        return x if storage.nbytes() <= x.numel() * x.element_size() else x.clone()

    return [small(place, x) for place, x in enumerate(leaves)]


class StatePool:
    """Memory for the states of one pass, allocated at once.

    Many small tensors that stay, allocated between large ones that are freed, would fragment the host's heap. Pages
    that are not written yet take no memory.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: dict[int, list[Tensor]] = {}  # by the leaf's index in the state: the free tensors

    @staticmethod
    def suits(x: Tensor) -> bool:
        """Whether x is a plain CPU tensor with a contiguous copy: with other strides kernels may round differently."""
        if type(x) is not Tensor or x.device.type != "cpu":
            return False
        return x.is_contiguous() or torch.empty_like(x, device="meta").is_contiguous()

    def put(self, place: int, x: Tensor) -> Tensor:
        """A copy of x: in the pool if it is like the first tensor of its index, else a clone (a state that grows)."""
        if place not in self._free:
            # Aligned as separate tensors are: otherwise products may round differently.
            numbers = -(-x.numel() * x.element_size() // _LINE) * _LINE // x.element_size()
            rows = x.new_empty(self._count, numbers)[:, : x.numel()]
            self._free[place] = list(rows.view(self._count, *x.shape).unbind())
        free = self._free[place]
        if not free or _kind(free[-1]) != _kind(x):
            return x.clone()
        return free.pop().copy_(x)


class Store:
    """Stores states until the backward pass: on their own device, or in the host's memory."""

    def __init__(self, offload: bool) -> None:
        self._offload = offload

    def keep(self, leaves: list[object]) -> list[object]:
        """Store the leaves of a state."""
        return [_Host(x) if self._offload and isinstance(x, Tensor) and _elsewhere(x) else x for x in leaves]

    @staticmethod
    def fetch(stored: list[object]) -> list[object]:
        """The stored leaves, on their original devices."""
        return [x.fetch() if isinstance(x, _Host) else x for x in stored]


def _elsewhere(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


class _Host:
    """A copy in the host's memory; page-locked for a GPU, so that copying is asynchronous."""

    def __init__(self, x: Tensor) -> None:
        self.device = x.device
        pinned = x.device.type == "cuda"
        # Both copies run on the current stream, which orders them.
        self.copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned).copy_(x, non_blocking=pinned)

    def fetch(self) -> Tensor:
        return self.copy.to(self.device, non_blocking=True)
