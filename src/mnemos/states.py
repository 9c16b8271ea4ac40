"""States: pytrees of tensors whose first axis is the batch, and the functions that serve every one of them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ._compat import pytree
from .errors import InputError

State: TypeAlias = Any  # a pytree (tuples, dicts, classes registered with torch) of [B, ...] tensors, or None
S = TypeVar("S")  # a state of any type: what goes in comes out


class SharedRows:
    """Base of the parts of a state whose tensors hold one entry for several rows, such as the beams of a sentence.

    Their first axis is not the batch, so `select` calls `select_rows`, and `reset` and `join` first call `unshared`.
    The first tensor of a whole state must lead with the batch all the same: its length is the number of rows.
    """

    def select_rows(self, rows: "Rows") -> State:
        """The part for the given rows. It copies nothing that the rows go on sharing."""
        raise NotImplementedError

    def unshared(self) -> State:
        """The same part as tensors that lead with the batch. Cost: a copy for each row."""
        raise NotImplementedError


class Rows:
    """The rows that `select` takes, as the tensor [R] of indices; `SharedRows` read them as a list, made once."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, x: Tensor) -> Tensor:
        """The rows of x; the same tensor, which layers may share, is indexed once."""
        found = self._taken.get(id(x))
        if found is None:
            found = self._taken[id(x)] = x, x.index_select(0, self.index.to(x.device))
        return found[1]

    @cached_property
    def listed(self) -> list[int]:
        """The indices as numbers. A device has to wait for it."""
        found: list[int] = self.index.tolist()
        return found

    def groups(self, size: int) -> list[int] | None:
        """The group of every `size` rows, if each `size` rows taken in order are of one group; else None.

        A group is `size` rows of the state, from a multiple of `size` on.
        """
        of = [row // size for row in self.listed]
        first = of[::size]
        same = len(of) % size == 0 and all(of[i] == first[i // size] for i in range(len(of)))
        return first if same else None


def map_state(function: Callable[..., Tensor], state: S, *others: S) -> S:
    """Apply `function` to every tensor of a state (and to the same tensors of others of the same structure)."""

    def mapped(leaf: Any, *rest: Any) -> Any:
        return function(leaf, *rest) if isinstance(leaf, Tensor) else leaf

    found: S = pytree.tree_map(mapped, state, *others)
    return found


def leaves(state: object) -> list[Tensor]:
    """The tensors of a state, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def select(state: S, rows: Tensor) -> S:
    """The state of the given batch rows: `rows` are indices [R] (a repeated index copies a row) or a mask [B].

    Cost: one copy of the selected rows. Raises InputError for rows that the state does not have.
    """
    batch = _batch(state, rows, "select")
    if rows.dtype == torch.bool:
        rows = rows.nonzero().squeeze(1)
    elif rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
        raise InputError(f"select: expected rows 0 to {batch - 1}, found {int(rows.min())} to {int(rows.max())}")
    return taken(state, Rows(rows))


def taken(state: S, rows: Rows) -> S:
    """`select` of rows that the state is known to have."""

    def chosen(part: Any) -> Any:
        if isinstance(part, SharedRows):
            return part.select_rows(rows)
        return rows.take(part) if isinstance(part, Tensor) else part

    found: S = pytree.tree_map(chosen, state, is_leaf=_shares)
    return found


def reset(state: S, rows: Tensor) -> S:
    """The state with the rows of the mask [B] (True) as new; the other rows keep their values and gradient.

    Raises InputError unless `rows` is a mask of the state's batch.
    """
    _batch(state, rows, "reset")
    if rows.dtype != torch.bool:
        raise InputError(f"reset: expected a mask [B] of booleans, found {rows.dtype}; build one with rows == value")

    def fresh(leaf: Tensor) -> Tensor:
        mask = rows.to(leaf.device).view(-1, *[1] * (leaf.dim() - 1))
        return torch.where(mask, torch.zeros((), dtype=leaf.dtype, device=leaf.device), leaf)

    return map_state(fresh, unshared(state))


def join(states: Sequence[S]) -> S:
    """States of one structure as one batch: the rows of the first state, then those of the second, and so on.

    Where tensors hold different numbers of tokens (axis 1 of a key-value state), the shorter ones are padded with
    zeros in front, and the state's `valid` marks the padding as invalid. Raises InputError for states of different
    models.
    """
    if not states:
        raise InputError("join: expected at least one state, found none")
    parts = [pytree.tree_flatten(unshared(state)) for state in states]
    structure = parts[0][1]
    if any(other != structure for _, other in parts):
        raise InputError("join: expected states of one structure, found different ones; join states of one model")
    rows = [_joined(same) for same in zip(*(found for found, _ in parts), strict=True)]
    joined: S = pytree.tree_unflatten(rows, structure)
    return joined


def unshared(state: S) -> S:
    """The state with every tensor leading with the batch: what rows share is copied for each of them."""
    found: S = pytree.tree_map(lambda x: x.unshared() if isinstance(x, SharedRows) else x, state, is_leaf=_shares)
    return found


def _shares(part: object) -> bool:
    return isinstance(part, SharedRows)


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [x for x in rows if x is not None]
    if len(tensors) != len(rows):
        if tensors:
            raise InputError(
                "join: expected a tensor in every state or in no state, found both; join states of one model"
            )
        return None
    if len({x.shape[1:] for x in tensors}) == 1:
        return torch.cat(tensors)
    if len({x.shape[2:] for x in tensors}) > 1 or min(x.dim() for x in tensors) < 2:
        found = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise InputError(f"join: expected tensors that differ only in rows and tokens, found {found}")
    longest = max(x.shape[1] for x in tensors)
    padded = [torch.cat([x.new_zeros(len(x), longest - x.shape[1], *x.shape[2:]), x], 1) for x in tensors]
    return torch.cat(padded)


def _batch(state: object, rows: Tensor, verb: str) -> int:
    """The batch size B of a state, after a check that `rows` fit it."""
    if not isinstance(rows, Tensor) or rows.dim() != 1:
        raise InputError(f"{verb}: expected rows as a tensor of one dimension, found {rows!r}")
    found = leaves(state)
    batch = found[0].shape[0] if found else rows.shape[0]
    if rows.dtype == torch.bool and rows.shape[0] != batch:
        raise InputError(f"{verb}: expected a mask of {batch} rows, as the state has, found one of {rows.shape[0]}")
    return batch


def detach(state: S) -> S:
    """The same values without the graph that computed them: this truncates back-propagation through time."""
    return map_state(Tensor.detach, state)
