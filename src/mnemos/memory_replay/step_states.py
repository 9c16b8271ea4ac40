"""The states that steps take and return: checks of their structure, and the rows of the batch in them."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mnemos._compat import parts_of, pytree, write_count
from mnemos.types import InputError, State

E = TypeVar("E")


def differentiable(x: object) -> bool:
    """Whether a leaf of a state can have a gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def check_leaves(leaves: list[object], t: int) -> None:
    """Raise InputError for a leaf that contains tensors: they would not be stored, and their graph would stay."""
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            kind = type(leaf).__name__
            raise InputError(
                f"step {t}: expected a state made of tensors, found a {kind} in it; "
                f"return its tensors, or register {kind} with torch.utils._pytree"
            )


def check_auxiliary(leaves: list[object], t: int) -> None:
    """Raise InputError for an object that holds a tensor with its graph, which would stay in memory."""
    for leaf in leaves:
        held = {} if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {})
        if any(isinstance(x, Tensor) and x.grad_fn is not None for x in pytree.tree_leaves(dict(held))):
            kind = type(leaf).__name__
            raise InputError(
                f"step {t}: expected auxiliary outputs made of tensors, found a {kind} that holds one with its graph; "
                f"return its tensors, or register {kind} with torch.utils._pytree"
            )


def check_structure(found: Any, expected: Any, t: int) -> None:
    """Raise InputError if a step returns a state of another structure than it was given; lists may grow."""
    if found != expected and not _only_grows(found, expected):
        raise InputError(
            f"step {t}: expected a state of the same structure at every step, or with longer lists, found "
            f"{_short(found)} after {_short(expected)}; return what was given"
        )


def check_repeated(found: Any, expected: Any, t: int) -> None:
    """Raise InputError if a replayed step returns a state of another structure than in the first pass."""
    if found != expected:
        raise InputError(
            f"step {t}: expected its replay to give a state of the same structure as the first pass, found "
            f"{_short(found)} instead of {_short(expected)}; let the structure depend on segment and state alone"
        )


def _only_grows(found: Any, expected: Any) -> bool:
    """Whether the structures differ only by lists that are longer."""
    new, old = parts_of(found), parts_of(expected)
    if found.type is not expected.type or (found.type is not list and len(new) != len(old)) or len(new) < len(old):
        return False
    return found.context == expected.context and all(map(_only_grows, new, old))


def _short(structure: Any) -> str:
    example = pytree.tree_unflatten(["*"] * structure.num_leaves, structure)
    said = str(example).replace("'*'", "*")
    return said if len(said) <= 80 else said[:77] + "..."


def have_equal_shapes(before: list[object], after: list[object]) -> bool:
    """Whether tensors have the shapes that they had."""
    if len(before) != len(after):
        return False
    return all(
        not isinstance(y, Tensor) or (isinstance(x, Tensor) and x.shape == y.shape)
        for x, y in zip(before, after, strict=True)
    )


def check_loss(loss: object, t: int) -> None:
    """Raise InputError unless the loss is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"step {t}: expected (loss, state) with loss a scalar tensor of floats, found {found}")


def check_advanced(found: object, t: int) -> None:
    """Raise InputError if `advance` returns None or (loss, state)."""
    if found is None:
        raise InputError(f"step {t}: expected advance to return the new state, found None; return it")
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and not found[0].dim():
        raise InputError(f"step {t}: expected advance to return the new state alone, found (loss, state)")


def check_kinds(before: list[object], after: list[object], t: int) -> None:
    """Raise InputError if a tensor of the state is replaced by something else."""
    for old, new in zip(before, after, strict=False):  # structures differ at the first step if its state is None
        if isinstance(old, Tensor) and not isinstance(new, Tensor):
            raise InputError(
                f"step {t}: expected a state of tensors where it had them, found {new!r:.40} for a tensor of shape "
                f"{tuple(old.shape)}; keep it a tensor, and restart rows with resets"
            )


def check_attached(before: list[object], after: list[object], t: int) -> None:
    """Raise InputError if the given state requires gradient and nothing in the returned state does.

    What is returned as it came does not count, for it carries the gradient that it came with. One part without gradient
    beside one that has it is no error: a state may keep what a segment was given.
    """
    if any(isinstance(x, Tensor) and x.requires_grad for x in before):
        parts = {_part(x) for x in before if isinstance(x, Tensor)}
        tensors = [x for x in after if isinstance(x, Tensor)]
        floats = [x for x in tensors if differentiable(x) and x.numel() and _part(x) not in parts]
        if floats and not any(x.requires_grad for x in floats):
            raise InputError(
                f"step {t}: expected a state that carries gradient, found it detached; "
                "return it with its graph, or ask for truncate_every=1"
            )


def check_untouched(leaves: list[object], versions: list[int | None], after: list[object], t: int) -> None:
    """Raise InputError if a step wrote into its given state.

    Writing to the buffer beyond it is allowed: the states of a growing memory are longer and longer views of one
    buffer, which share one count of writes.
    """
    if count_writes(leaves) == versions:
        return
    parts = {_part(x) for x in after if isinstance(x, Tensor)}
    for x, now, before in zip(leaves, count_writes(leaves), versions, strict=True):
        if (
            isinstance(x, Tensor)
            and now != before
            and (_part(x) in parts or not any(_part(x)[0] == part[0] for part in parts))
        ):
            raise InputError(
                f"step {t}: expected the given state untouched, found it changed in place; "
                "let the step work on clones of its tensors"
            )


def _part(x: Tensor) -> tuple[object, ...]:
    """A tensor's storage, and its offset and shape in it."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), tuple(x.shape)


def count_writes(leaves: list[object]) -> list[int | None]:
    """How often each tensor was written; None for other leaves."""
    return [write_count(x) if isinstance(x, Tensor) else None for x in leaves]


Axes = int | None | Any  # one axis, or a pytree of the state's structure with an axis (or None) for each leaf


class BatchRows:
    """The rows of the states of one rollout.

    axes: None if the caller named none; the first axis is then taken where it is the only candidate.
    resets: per step None or a mask [B]. start: the state, or a function that makes it, that rows begin again with; None
    is zeros.
    """

    def __init__(self, axes: Axes, resets: Iterable[Any] | None, start: Any, count: int) -> None:
        self._axes = axes
        for axis in pytree.tree_leaves(axes):
            if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
                raise InputError(
                    "replay: expected batch_axis to be a number, or a pytree of numbers like the state, "
                    f"found {axis!r:.60} in it"
                )
        self.masks: list[Tensor | None] = one_per_step("resets", resets, count)
        self._computes_start = callable(start)
        self._start: Callable[[], State] = start if callable(start) else lambda: start
        if start is not None and resets is None:
            raise InputError("replay: expected resets with reset_to, found none; give the rows that start again")
        if not callable(start) and any(isinstance(x, Tensor) and x.grad_fn for x in pytree.tree_leaves(start)):
            # Several steps would go back through its graph.
            raise InputError(
                "replay: expected reset_to without a graph, found a computed tensor that requires gradient; "
                "give a function that computes it"
            )

    def given_starts(self) -> list[object]:
        """The leaves of a given `reset_to` that is not a function."""
        return [] if self._computes_start else list(pytree.tree_leaves(self._start()))

    def reset(self, t: int, leaves: list[object], structure: Any, state: State) -> list[object]:
        """The leaves of the incoming state with the rows of step t's mask started again."""
        mask = self.masks[t]
        if mask is None or state is None:
            return leaves
        try:
            if not isinstance(mask, Tensor) or mask.dim() != 1 or mask.dtype != torch.bool:
                found = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)[:60]
                raise InputError(f"reset: expected a mask [B] of booleans, found {found}; build one with rows == value")
            if self._axes is None:
                _check_axis(state, len(mask))
            axes = self._per_leaf(structure)
            starts = self._starts(structure)
            return [
                _restart_rows(x, axis, mask, start) if isinstance(x, Tensor) and axis is not None else x
                for x, axis, start in zip(leaves, axes, starts, strict=True)
            ]
        except InputError as error:
            raise InputError(f"step {t}: {error}") from None

    def check(self, segment: object, before: list[object], after: list[object], structure: Any, t: int) -> None:
        """Raise InputError if the batch size changes.

        With a named axis: the sizes of the state along it. Otherwise: all leaves had one first axis, and one now has
        the segment's.
        """
        if self._axes is not None:
            axes = self._per_leaf(structure)
            new = _sizes(after, axes)
            old = _sizes(before, axes) if len(before) == len(after) else new
            if len(old) == 1 and new != old:
                raise InputError(
                    f"step {t}: expected a batch of {old.pop()} rows along batch_axis, found {sorted(new)}; "
                    "give every segment the rows of the state, and restart rows with resets"
                )
            return
        old, new = _sizes(before, [0] * len(before)), _sizes(pytree.tree_leaves(segment)[:1], [0])
        if len(old) == 1 and old != {0} and new and new != old and new & _sizes(after, [0] * len(after)):
            raise InputError(
                f"step {t}: expected a batch of {old.pop()} rows, as the state has, found {new.pop()}; "
                "give every segment the rows of the state, and restart rows with resets, or name the state's "
                "batch_axis if its first axis is not the batch"
            )

    def check_segment(self, segment: object, state: State, t: int, error: Exception | None = None) -> None:
        """Raise InputError for a segment of one row that PyTorch would broadcast against a state of several.

        error: what the step raised, which other numbers of rows then explain. A segment leads with batch or time, and
        the batch of a state [layers, B, D] is its second axis: no error where any of these sizes agree, in any tensor
        of the segment, as one of weights or positions may be for all rows.
        """
        if not (self._axes is None or isinstance(self._axes, int)):
            return
        read = [x for x in pytree.tree_leaves(segment) if isinstance(x, Tensor) and x.dim()]
        tensors = [x for x in pytree.tree_leaves(state) if isinstance(x, Tensor) and x.dim() > 1]
        rows = _sizes(list(tensors), [self._axes or 0] * len(tensors))
        second = {x.shape[1] for x in tensors if x.dim() > 2 and self._axes is None}
        if len(rows) != 1 or not read or any((rows | second) & {*x.shape[:2]} for x in read):
            return
        if error is not None or 1 in read[0].shape[:2]:
            raise InputError(
                f"step {t}: expected a segment of {rows.pop()} rows, as the state has, found one of shape "
                f"{tuple(read[0].shape)}; give every segment the rows of the state, and restart rows with resets, or "
                "name the state's batch_axis"
            ) from error

    def _per_leaf(self, structure: Any) -> list[int | None]:
        """The axis of each leaf of a state of this structure."""
        if self._axes is None or isinstance(self._axes, int):
            return [self._axes or 0] * structure.num_leaves
        axes, found = pytree.tree_flatten(self._axes)
        if found != structure:
            raise InputError(
                f"replay: expected batch_axis to be a number or a pytree of {structure.num_leaves} numbers with the "
                f"structure of the state, found {len(axes)}"
            )
        return list(axes)

    def _starts(self, structure: Any) -> list[object]:
        """The leaves that rows begin again with; None is zeros."""
        start = self._start()
        if start is None:
            return [None] * structure.num_leaves
        leaves, found = pytree.tree_flatten(start)
        if found != structure:
            raise InputError("reset: expected reset_to with the structure of the state, found another one")
        return list(leaves)


def _sizes(leaves: list[object], axes: list[int | None]) -> set[int]:
    """The sizes of the tensors along their axes."""
    found = set()
    for x, axis in zip(leaves, axes, strict=False):
        if isinstance(x, Tensor) and axis is not None and x.dim() and -x.dim() <= axis < x.dim():
            found.add(x.shape[axis])
    return found


def _check_axis(state: State, rows: int) -> None:
    """Raise InputError for a tensor whose second axis may be the batch as well as its first.

    [layers, B, D] of LSTM and GRU with as many layers as rows is an example. States of this library lead with the
    batch.
    """
    for x in pytree.tree_leaves(state, is_leaf=lambda part: type(part).__module__.partition(".")[0] == "mnemos"):
        if isinstance(x, Tensor) and x.dim() >= 3 and x.shape[0] == x.shape[1] == rows:
            raise InputError(
                f"reset: expected to know which axis of a state of shape {tuple(x.shape)} is the batch, found {rows} "
                "rows along two of them; give batch_axis=0, or 1 for [layers, B, D] (torch.nn.LSTM, GRU)"
            )


def _restart_rows(x: Tensor, axis: int, mask: Tensor, start: object) -> Tensor:
    """x with the rows of the mask along the axis set to `start`."""
    if not -x.dim() <= axis < x.dim():
        raise InputError(
            f"reset: expected a state with a batch on axis {axis}, found shape {tuple(x.shape)}; give batch_axis, with "
            "None for a tensor without a batch"
        )
    if x.shape[axis] != len(mask):
        raise InputError(
            f"reset: expected a mask of {x.shape[axis]} rows, as axis {axis} of the state of shape {tuple(x.shape)} "
            f"has, found one of {len(mask)}; give batch_axis if the batch is on another axis"
        )
    shape = [1] * x.dim()
    shape[axis] = -1
    if isinstance(start, Tensor):
        try:
            start = start.expand(x.shape)
        except RuntimeError:
            raise InputError(
                f"reset: expected reset_to of a shape that broadcasts to {tuple(x.shape)}, found {tuple(start.shape)}"
            ) from None
        fresh = start.to(device=x.device, dtype=x.dtype)
    else:
        fresh = torch.as_tensor(0 if start is None else start, dtype=x.dtype, device=x.device)
    return torch.where(mask.to(x.device).view(shape), fresh, x)


def one_per_step(name: str, values: Iterable[E] | None, count: int) -> list[E | None]:
    """The values, one per segment; raises InputError for another number of them."""
    found: list[E | None] = [None] * count if values is None else list(values)
    if len(found) != count:
        raise InputError(f"replay: expected {name} for {count} segments, found {len(found)}")
    return found
