"""What stands between two steps: the state, the random generators, and what modules keep between forwards."""

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import buffers_of
from mnemos.generators import Snapshot
from mnemos.types import InputError


@dataclass(slots=True)
class Moment:
    """All that the step after it starts from. `leaves` are read with `Store.fetch`."""

    leaves: "Kept"
    structure: object
    generators: Snapshot
    buffers: list[object]


_ABSENT: object = object()
_LINE = 64  # bytes, of a cache line


class Buffers:
    """What a module keeps between forwards: its buffers, and tensors that are plain attributes of it.

    A running statistic or a cache that a module reads and writes is a state that the caller does not see. Every place
    that holds a tensor is looked at from when it first does; before, it held what it held when the rollout began. All
    are compared at every step, and copied when changed.
    """

    def __init__(self, module: nn.Module | None) -> None:
        # Per holder of tensors: what errors call it, the live mapping, and a copy of the mapping at the start.
        self._holders: list[tuple[str, MutableMapping[str, Any], dict[str, Any]]] = []
        for prefix, part in module.named_modules() if module is not None else ():
            for kind, holder in (("buffer", buffers_of(part)), ("attribute", vars(part))):
                self._holders.append((f"{kind} {prefix}.".replace(" .", " "), holder, dict(holder)))
        self._places: dict[tuple[int, str], tuple[str, MutableMapping[str, Any], object]] = {}
        self._look()

    def _look(self) -> None:
        """Find the places that hold a tensor and are not known yet."""
        for called, holder, at_first in self._holders:
            for name, value in holder.items():
                place = id(holder), name
                if isinstance(value, Tensor) and place not in self._places and _plain(value):
                    self._places[place] = called + name, holder, at_first.get(name, _ABSENT)

    @torch.no_grad()
    def taken(self, before: Sequence[object] = ()) -> list[object]:
        """Their values; what did not change since `before` is shared with it."""
        self._look()
        found: list[object] = []
        for i, ((_, name), (_, holder, _)) in enumerate(self._places.items()):
            value = holder.get(name, _ABSENT)
            if i < len(before) and _same(value, before[i]):
                found.append(before[i])
            else:
                found.append(value.detach().clone() if isinstance(value, Tensor) else value)
        return found

    @torch.no_grad()
    def put(self, values: Sequence[object]) -> None:
        """Copy the values back, into the very tensors that were there when the rollout began, where they fit."""
        self._look()  # a failing step may have made one
        for ((_, name), (_, holder, own)), value in zip(self._places.items(), self._whole(values), strict=True):
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

    def changed(self, values: Sequence[object]) -> Iterator[tuple[str, object, object]]:
        """(name, value now, value then) of what is not as it was when `values` were taken."""
        now = self.taken(values)
        for (called, _, _), found, then in zip(self._places.values(), now, self._whole(values), strict=True):
            if found is not then:
                yield called, None if found is _ABSENT else found, None if then is _ABSENT else then

    def _whole(self, values: Sequence[object]) -> list[object]:
        """Values that were taken, with those of the places that held no tensor then."""
        return [*values, *(own for _, _, own in list(self._places.values())[len(values) :])]


def _plain(value: Tensor) -> bool:
    strange = value.layout != torch.strided or value.is_meta or value.is_inference()
    return not strange and not isinstance(value, nn.Parameter)


def _kind(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.dtype, x.device


def _same(a: object, b: object) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return _kind(a) == _kind(b) and torch.equal(a, b)


def compact(leaves: list[object], incoming: list[object], shelf: "Shelf | None" = None) -> list[object]:
    """Leaves that keep alive no more than themselves: a part of an activation is copied, to the shelf if there is one.

    A stretch of a buffer that the incoming state lies in as well is not: such a memory is appended to, and shared.
    """
    shared = {x.untyped_storage().data_ptr() for x in incoming if isinstance(x, Tensor)}

    def small(place: int, x: object) -> object:
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            return x
        storage = x.untyped_storage()
        if storage.data_ptr() in shared:
            return x
        if shelf is not None and shelf.suits(x):
            return shelf.put(place, x)
        return x if storage.nbytes() <= x.numel() * x.element_size() else x.clone()

    return [small(place, x) for place, x in enumerate(leaves)]


class Shelf:
    """Room for the states of one pass, side by side.

    On the host's heap, many small tensors that stay, made between large ones that come and go, leave holes that nothing
    else fits in. Pages that are not written to yet take no memory.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rooms: dict[int, list[Tensor]] = {}  # by the leaf's place in the state: what is free

    @staticmethod
    def suits(x: Tensor) -> bool:
        """Whether x is plain, on the host, and contiguous once copied: kernels round as strides have it."""
        return type(x) is Tensor and x.device.type == "cpu" and torch.empty_like(x, device="meta").is_contiguous()

    def put(self, place: int, x: Tensor) -> Tensor:
        """A copy of x. There is room for as many like the first: a state that grows lies elsewhere."""
        if place not in self._rooms:
            # Each as aligned as a tensor of its own: products may round otherwise.
            numbers = -(-x.numel() * x.element_size() // _LINE) * _LINE // x.element_size()
            rows = x.new_empty(self._count, numbers)[:, : x.numel()]
            self._rooms[place] = list(rows.view(self._count, *x.shape).unbind())
        room = self._rooms[place]
        if not room or _kind(room[-1]) != _kind(x):
            return x.clone()
        return room.pop().copy_(x)


class Store:
    """Where states wait for the backward pass: where they were made, in the host's memory, or in files."""

    def __init__(self, offload: bool | str | os.PathLike[str]) -> None:
        self._host = offload is True
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if not isinstance(offload, bool):
            if not os.path.isdir(offload):
                raise InputError(
                    f"replay: expected offload to be True, False or a folder that exists, found {str(offload)!r}"
                )
            self._folder = tempfile.TemporaryDirectory(prefix="states-", dir=offload)
        self._count = 0

    def shelf(self, count: int) -> Shelf | None:
        """Room for so many states; none where they are not to stay in memory."""
        return Shelf(count) if self._folder is None else None

    def keep(self, leaves: list[object]) -> "Kept":
        """Put the leaves of a state away."""
        if self._folder is not None:
            self._count += 1
            return _File(Path(self._folder.name, f"{self._count}.pt"), leaves)
        return [_Host(x) if self._host and isinstance(x, Tensor) and _elsewhere(x) else x for x in leaves]

    @staticmethod
    def fetch(kept: "Kept") -> list[object]:
        """The leaves, on the devices that they came from."""
        if isinstance(kept, _File):
            return kept.fetch()
        return [x.fetch() if isinstance(x, _Host) else x for x in kept]

    def close(self) -> None:
        """Delete the files."""
        if self._folder is not None:
            self._folder.cleanup()


def _elsewhere(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type != "cpu"


class _Host:
    """A copy in the host's memory, page-locked for a GPU, so that copying waits for nothing."""

    def __init__(self, x: Tensor) -> None:
        self.device = x.device
        pinned = x.device.type == "cuda"
        # Back by the same stream that copied it there: the order of the two needs no further care.
        self.copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned).copy_(x, non_blocking=pinned)

    def fetch(self) -> Tensor:
        return self.copy.to(self.device, non_blocking=True)


class _File:
    """One state in a file, which goes when nothing refers to it."""

    def __init__(self, path: Path, leaves: list[object]) -> None:
        self.path = path
        self.tensors = [isinstance(x, Tensor) for x in leaves]
        self.others = [None if isinstance(x, Tensor) else x for x in leaves]
        torch.save([x for x in leaves if isinstance(x, Tensor)], path)
        weakref.finalize(self, _delete, path)

    def fetch(self) -> list[object]:
        saved = iter(torch.load(self.path, weights_only=True))
        return [next(saved) if tensor else other for tensor, other in zip(self.tensors, self.others, strict=True)]


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


Kept = list[object] | _File  # the leaves of a state, as `Store.keep` puts them away
