"""What a step starts from: its state, rows that begin again, and its hidden inputs (random numbers, buffers)."""

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mnemos import generators
from mnemos._compat import buffers_of, pytree, write_count
from mnemos.types import InputError, State


class Snapshot(NamedTuple):
    """What a step starts from, or a rollout ends with. hidden: as `HiddenInputs.capture` returns it."""

    leaves: list[Any]
    structure: Any
    hidden: list[Any]


# --- states, cut into leaves ---


def differentiable(x: object) -> bool:
    """Whether a leaf can have a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def flatten(state: State) -> tuple[list[Any], Any]:
    """The leaves of a state, and their structure. Without gradient where none is recorded.

    Raises InputError for an object that would hide tensors and their graph.
    """
    leaves, structure = pytree.tree_flatten(state)
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor):
            if x.is_inference():
                leaves[i] = x.clone()
            elif x.requires_grad and not torch.is_grad_enabled():  # a step may enable it inside
                leaves[i] = x.detach()
        elif x is not None and not isinstance(x, bool | int | float | str):
            name = type(x).__name__
            raise InputError(
                f"expected a state made of tensors, found a {name} in it; return its tensors, or register {name} with "
                "torch.utils._pytree"
            )
    return leaves, structure


def cut(leaves: list[Any], needs_grad: bool, of_caller: bool) -> list[Any]:
    """The state as leaves of the graph of one step.

    needs_grad: they get gradients. of_caller: it is the caller's state; what it was computed from gets gradients too.
    """
    graph_leaves = []
    for x in leaves:
        if of_caller and isinstance(x, Tensor) and x.requires_grad:
            x = x.view_as(x)  # what the caller computed it from gets its gradient through this view
            x.retain_grad()
        elif differentiable(x):
            x = x.detach().requires_grad_(needs_grad)
        graph_leaves.append(x)
    return graph_leaves


def check_untouched(leaves: list[Any], writes: list[int | None], returned: list[Any]) -> None:
    """Raise InputError if a step wrote into the state that it was given. writes: `write_count` of each leaf before.

    A count, say, would then be counted twice, and nothing else would show it. A memory that grows may write into its
    buffer, beyond what the given state sees of it: it returns a longer part.
    """
    for x, before in zip(leaves, writes, strict=True):
        if isinstance(x, Tensor) and write_count(x) != before:
            own, spans = storage_span(x), [storage_span(y) for y in returned if isinstance(y, Tensor)]
            if own in spans or own[0] not in {storage for storage, *_ in spans}:
                raise InputError(
                    "expected the given state untouched, found it changed in place; let the step work on clones of its "
                    "tensors"
                )


def storage_span(x: Tensor) -> tuple[Any, ...]:
    """A tensor's storage, and its offset and shape in it."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether the values of one can be copied into the other and nothing else changes."""
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


class Pool:
    """Memory for the states of one pass, allocated at once; pages that are not written yet take none.

    Many small tensors that stay, allocated between large ones that are freed, fragment the host's heap: without this a
    rollout of 512 segments took twice the memory of its states.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free: dict[int, list[Tensor]] = {}  # by the leaf's number in the state

    def copy(self, number: int, x: Tensor) -> Tensor:
        """A copy of leaf `number` of a state, in the pool if it is like the first one (a state that grows is not)."""
        if type(x) is not Tensor or x.device.type != "cpu" or not torch.empty_like(x, device="meta").is_contiguous():
            return x.clone()  # with other strides than its own kernels might round differently
        if number not in self.free:
            # Aligned to lines of the cache, as tensors of their own are: otherwise products may round differently.
            length = -(-x.numel() * x.element_size() // 64) * 64 // x.element_size()
            rows = x.new_empty(self.count, length)[:, : x.numel()].view(self.count, *x.shape)
            self.free[number] = list(rows.unbind())
        free = self.free[number]
        return free.pop().copy_(x) if free and alike(free[-1], x) else x.clone()


def compact(leaves: list[Any], incoming: list[Any], pool: Pool | None = None, offload: bool = False) -> list[Any]:
    """Leaves without graph that keep nothing else alive: a part of an activation is copied, to a pool that is given.

    A part of a storage that the incoming state shares is not, for such a memory is a buffer that grows. offload: leaves
    of a device as (copy in the host's memory, device).
    """
    shared = {x.untyped_storage().data_ptr() for x in incoming if isinstance(x, Tensor)}
    compacted: list[Any] = []
    for number, x in enumerate(leaves):
        if isinstance(x, Tensor):
            x = x.detach()
        if isinstance(x, Tensor) and x.layout == torch.strided:
            storage = x.untyped_storage()
            if offload and x.device.type != "cpu":  # page-locked for a GPU, so that it need not wait for the copy
                host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
                x = host.copy_(x, non_blocking=x.is_cuda), x.device
            elif storage.data_ptr() not in shared:
                if pool is not None:
                    x = pool.copy(number, x)
                elif storage.nbytes() > x.numel() * x.element_size():
                    x = x.clone()
        compacted.append(x)
    return compacted


def fetch(leaves: list[Any]) -> list[Any]:
    """Kept leaves on their own devices."""
    return [x[0].to(x[1], non_blocking=True) if isinstance(x, tuple) else x for x in leaves]


# --- the rows of the batch ---


class RowResets:
    """The rows of the batch, and which begin again before a step.

    masks: per step None or a mask [B]. reset_to: the state that rows begin again with, or a function that makes it;
    None is zeros. axes: where the batch is, one axis or a pytree of the state's structure with an axis, or None, for
    each leaf; "none": nowhere; None if the caller named none: then the first axis, where no other could be meant.
    """

    def __init__(self, masks: Sequence[Tensor | None], reset_to: Any, axes: Any) -> None:
        self.masks, self.axes = masks, axes
        self.reset_to: Callable[[], State] = reset_to if callable(reset_to) else lambda: reset_to
        self.one_axis = axes is None or isinstance(axes, int)

    def apply(self, t: int, leaves: list[Any], structure: Any) -> tuple[State, list[Any]]:
        """The state of step t with the rows of its mask begun again, and its leaves."""
        mask, state = self.masks[t], pytree.tree_unflatten(leaves, structure)
        if mask is None or state is None:
            return state, leaves
        if not isinstance(mask, Tensor) or mask.dim() != 1 or mask.dtype != torch.bool:
            raise InputError(
                f"reset: expected a mask [B] of booleans, found {describe(mask)}; build one with rows == value"
            )
        if self.axes is None:  # [layers, B, D] of LSTM and GRU, with as many layers as rows, would go wrong unnoticed
            for x in pytree.tree_leaves(state, is_leaf=lambda x: type(x).__module__.partition(".")[0] == "mnemos"):
                if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[0] == x.shape[1] == len(mask):
                    raise InputError(
                        f"reset: expected to know which axis of a state of shape {tuple(x.shape)} is the batch, found "
                        f"{len(mask)} rows along two of them; give batch_axis=0, or 1 for [layers, B, D] "
                        "(torch.nn.LSTM, GRU)"
                    )
        origin = self.reset_to()
        axes, axes_structure = pytree.tree_flatten(self.axes)
        origin_leaves, origin_structure = pytree.tree_flatten(origin)
        for name, other, one_for_all in (
            ("batch_axis", axes_structure, self.one_axis),
            ("reset_to", origin_structure, origin is None),
        ):
            if not one_for_all and other != structure:
                raise InputError(
                    f"reset: expected {name} with the structure of the state, which has {structure.num_leaves} leaves, "
                    f"found another one with {other.num_leaves}"
                )
        axes = [self.axes or 0] * len(leaves) if self.one_axis else axes
        origin_leaves = [0] * len(leaves) if origin is None else origin_leaves
        fresh = [_reset_rows(*each, mask) for each in zip(leaves, axes, origin_leaves, strict=True)]
        return pytree.tree_unflatten(fresh, structure), fresh

    def check_segment(self, segment: Any, leaves: list[Any]) -> None:
        """Raise InputError for a segment of one row that PyTorch would broadcast against a state of several.

        A segment leads with batch or time, and the batch of a state [layers, B, D] is its second axis: no error where
        any of these sizes agree, in any tensor of the segment, as one of weights or positions may be for all rows.
        A matrix that is no batch looks like one: the caller has to say so.
        """
        axis, rows, second = self.axes or 0, set(), set()
        for x in leaves if self.one_axis else ():
            if isinstance(x, Tensor) and x.dim() > 1 and -x.dim() <= axis < x.dim():
                rows.add(x.shape[axis])
                if x.dim() > 2 and self.axes is None:
                    second.add(x.shape[1])
        shapes = [x.shape for x in pytree.tree_leaves(segment) if isinstance(x, Tensor) and x.dim()]
        agree = any((rows | second) & {*shape[:2]} for shape in shapes)
        if len(rows) == 1 and shapes and 1 in shapes[0][:2] and not agree:
            (count,), shape = rows, tuple(shapes[0])
            sizes = ["-1"] * len(shape)
            sizes[shape.index(1)] = str(count)
            raise InputError(
                f"expected a segment of {count} rows, as the state has, found one of shape {shape}; give every segment "
                f"the rows of the state (one that all rows share as x.expand({', '.join(sizes)})), and restart rows "
                'with resets, or name the batch_axis of the state ("none" if it has no batch)'
            )


def _reset_rows(x: Any, axis: int | None, origin: Any, mask: Tensor) -> Any:
    """x with the rows of the mask along the axis set to `origin`."""
    if not isinstance(x, Tensor) or axis is None:
        return x
    rows = x.shape[axis] if -x.dim() <= axis < x.dim() else "no"
    if rows != len(mask):
        raise InputError(
            f"reset: expected a mask of {rows} rows, as axis {axis} of a state of shape {tuple(x.shape)} has, found "
            f"{len(mask)}; give batch_axis if the batch is on another axis, with None for a tensor without a batch"
        )
    shape = [1] * x.dim()
    shape[axis] = -1
    fresh = torch.as_tensor(origin, dtype=x.dtype, device=x.device)
    try:
        fresh = fresh.expand(x.shape)
    except RuntimeError:
        raise InputError(
            f"reset: expected reset_to of a shape that broadcasts to {tuple(x.shape)}, found {tuple(fresh.shape)}"
        ) from None
    return torch.where(mask.to(x.device).view(shape), fresh, x)


def describe(x: object) -> str:
    """A value, for errors."""
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.40}"


# --- hidden inputs: random generators, buffers, what the model keeps by itself ---

_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "nothing"})()  # the value of an attribute that is not there


class HiddenInputs:
    """What a step reads besides its arguments: random generators, and the tensors that a module keeps by itself.

    A running statistic or a stored cache is a state that the caller does not see. Its entry, a buffer or a plain
    attribute, is known from when it first holds a tensor; before, its value is that at the start of the rollout.
    """

    def __init__(self, module: nn.Module | None, of_caller: Iterable[Any]) -> None:
        modules = module.named_modules() if module is not None else ()
        if not isinstance(of_caller, Iterable):
            raise InputError(
                f"replay: expected generators=[...], found one {type(of_caller).__name__}; give it in a list"
            )
        self.generators: list[generators.Access] = [*generators.accesses().values(), *map(_access, of_caller)]
        # Of each holder of tensors: what errors call it, the live mapping, and a copy of that at the start.
        self.holders: list[tuple[str, Any, dict[str, Any]]] = []
        for prefix, module in modules:
            for name, holder in (("buffer", buffers_of(module)), ("attribute", vars(module))):
                self.holders.append((f"{name} {prefix}.".replace(" .", " "), holder, dict(holder)))
        self.entries: dict[tuple[int, str], None] = {}  # in the order in which they first held a tensor
        self.current: list[Any] = []  # the values now; empty where a step may have changed them

    def mark_changed(self) -> None:
        """To be called before whatever may change them, so that `restore` sets them all."""
        self.current = []

    def capture(self, before: Sequence[Any] = ()) -> list[Any]:
        """The values now: those of the generators, then those of the entries. What equals `before` is shared.

        A buffer or attribute that holds a tensor for the first time becomes an entry.
        """
        for i, (_, holder, _) in enumerate(self.holders):
            for name, x in holder.items():
                if type(x) is Tensor and (i, name) not in self.entries and _is_plain(x):
                    self.entries[i, name] = None
        values: list[Any] = []
        for get, _ in self.generators:
            values.append(get())
        for i, name in self.entries:
            values.append(self.holders[i][1].get(name, _ABSENT))
        earlier = self.complete(before) if before else [None] * len(values)
        for i, (now, then) in enumerate(zip(values, earlier, strict=True)):
            if _same(now, then):
                values[i] = then
            elif isinstance(now, Tensor):
                values[i] = now.detach().clone()
        self.current = values
        return values

    def complete(self, values: Sequence[Any]) -> list[Any]:
        """Values that were taken when fewer entries were known, with the values at the start of the others."""
        whole = [*values]
        for i, name in [*self.entries][len(whole) - len(self.generators) :]:
            whole.append(self.holders[i][2].get(name, _ABSENT))
        return whole

    @torch.no_grad()
    def restore(self, values: Sequence[Any]) -> None:
        """Set them, by copying into the tensors of the start where shape and dtype fit."""
        values = self.complete(values)
        current = self.current or [None] * len(values)
        count = len(self.generators)
        for (_, set_), now, value in zip(self.generators, current, values, strict=False):
            if now is not value:
                set_(value)
        for (i, name), now, value in zip(self.entries, current[count:], values[count:], strict=True):
            _, holder, first_values = self.holders[i]
            at_start = first_values.get(name, _ABSENT)
            if now is value and holder.get(name, _ABSENT) is at_start:
                continue
            if value is _ABSENT:
                holder.pop(name, None)
            elif not isinstance(value, Tensor) or value is at_start:
                holder[name] = value
            elif type(at_start) is Tensor and _is_plain(at_start) and alike(at_start, value):
                holder[name] = at_start
                if not torch.equal(at_start, value):  # a write would spoil graphs that have saved it
                    at_start.copy_(value)
            else:
                holder[name] = value.clone()
        self.current = values

    def entry_name(self, number: int) -> str:
        """What errors call the value of this number in what `capture` returns; "" for a generator."""
        if number < len(self.generators):
            return ""
        i, name = list(self.entries)[number - len(self.generators)]
        return self.holders[i][0] + name


def _is_plain(x: Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta and not x.is_inference()


def _same(a: Any, b: Any) -> bool:
    """Whether two values are equal: tensors, and states of generators, which are tuples or dicts with arrays."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, Tensor):
        return _is_plain(a) and alike(a, b) and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(map(_same, a.values(), b.values()))
    return isinstance(a, tuple | str | int | float) and a == b


def _access(one: Any) -> generators.Access:
    """How the state of a caller's generator is read and set."""
    if isinstance(one, torch.Generator):
        return one.get_state, one.set_state
    if isinstance(one, random.Random) and not isinstance(one, random.SystemRandom):  # which has no state
        return one.getstate, one.setstate
    if isinstance(one, np.random.RandomState):
        return lambda: one.get_state(legacy=False), one.set_state
    if isinstance(one, np.random.Generator):
        return lambda: one.bit_generator.state, lambda state: setattr(one.bit_generator, "state", state)
    raise InputError(
        "replay: expected generators of torch (torch.Generator), Python (random.Random) or NumPy "
        f"(numpy.random.Generator), found {type(one).__name__}"
    )
