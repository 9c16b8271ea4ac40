"""What everything else speaks: axis letters, State, Output, and the error of a wrong input.

Axes, in the order they appear in shapes: B batch, T tokens, D width, H heads, M value width a head,
N sequence length, K memory slots, Tm and Dm length and width of a gated recurrent cache.

A memory is a *state*: a plain pytree of tensors that is passed in and returned, never mutated:

    y, state = layer(x, state)        # any length of x; state=None starts afresh

Two rules make one `select` and one `reset` serve every memory there is. Every leaf leads with the
batch, and a row of zeros *is* a fresh row: whatever starts elsewhere (a learned start, a stored cache)
keeps a count of what it has seen and reads its start where that count is zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

State = Any  # a pytree (tuples, dicts, dataclasses registered with torch) of [B, ...] tensors, or None
Output = tuple[Tensor, State]


class InputError(ValueError):
    """The user's input was wrong: one line of what was expected, what was found and what to do."""


def check_heads(dim: int, num_heads: int) -> None:
    """Raise InputError unless `num_heads` heads share `dim` channels evenly."""
    if num_heads < 1 or dim < 1 or dim % num_heads:
        near = [h for h in range(1, dim + 1) if dim % h == 0]
        hint = f"; num_heads may be {', '.join(map(str, near))}" if near else ""
        raise InputError(f"dim must be divisible by num_heads, found dim {dim} and num_heads {num_heads}{hint}")


def angle_dtype(device: Any) -> torch.dtype:
    """float64, where the device has it: float32 tells positions past 2^24 no longer apart."""
    return torch.float32 if torch.device(device or "cpu").type == "mps" else torch.float64


def map_state(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply `function` to every tensor of a state (and to those of others of the same structure)."""
    return pytree.tree_map(lambda leaf, *rest: leaf if leaf is None else function(leaf, *rest), state, *others)


def leaves(state: State) -> list[Tensor]:
    """The tensors of a state, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def select(state: State, rows: Tensor) -> State:
    """The state of the given batch rows: `rows` are indices [R] (repeats fork a stream) or a mask [B].

    Cost: one copy of the rows selected.
    """
    batch = _batch(state, rows, "select")
    if rows.dtype == torch.bool:
        rows = rows.nonzero().squeeze(1)
    elif rows.device.type == "cpu" and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
        raise InputError(f"select: expected rows 0 to {batch - 1}, found {int(rows.min())} to {int(rows.max())}")
    return map_state(lambda leaf: leaf.index_select(0, rows.to(leaf.device)), state)


def reset(state: State, rows: Tensor) -> State:
    """The state with the rows of the mask [B] (True) made fresh; the others keep values and gradient."""
    _batch(state, rows, "reset")
    if rows.dtype != torch.bool:
        raise InputError(f"reset: expected a mask [B] of booleans, found {rows.dtype}; build one with rows == value")

    def fresh(leaf: Tensor) -> Tensor:
        mask = rows.to(leaf.device).view(-1, *[1] * (leaf.dim() - 1))
        return torch.where(mask, torch.zeros((), dtype=leaf.dtype, device=leaf.device), leaf)

    return map_state(fresh, state)


def join(states: Sequence[State]) -> State:
    """States of one structure as one batch, the rows of the first before those of the second, and so on.

    Where tensors differ in how many tokens they hold (axis 1 of a key-value state), the shorter get zeros in front,
    which its `valid` then calls invalid. Raises InputError for states that are of different models.
    """
    if not states:
        raise InputError("join: expected at least one state, found none")
    parts = [pytree.tree_flatten(state) for state in states]
    structure = parts[0][1]
    if any(other != structure for _, other in parts):
        raise InputError("join: expected states of one structure, found different ones; are they of one model?")
    return pytree.tree_unflatten(
        [_joined(rows) for rows in zip(*(found for found, _ in parts), strict=True)], structure
    )


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [x for x in rows if x is not None]
    if len(tensors) != len(rows):
        if tensors:
            raise InputError("join: expected a tensor in every state or in none, found both; are they of one model?")
        return None
    if len({x.shape[1:] for x in tensors}) == 1:
        return torch.cat(tensors)
    if len({x.shape[2:] for x in tensors}) > 1 or min(x.dim() for x in tensors) < 2:
        found = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise InputError(f"join: expected tensors that differ in rows and tokens alone, found {found}")
    longest = max(x.shape[1] for x in tensors)
    padded = [torch.cat([x.new_zeros(len(x), longest - x.shape[1], *x.shape[2:]), x], 1) for x in tensors]
    return torch.cat(padded)


def _batch(state: State, rows: Tensor, verb: str) -> int:
    """B of a state, once the rows named are known to be of it."""
    if not isinstance(rows, Tensor) or rows.dim() != 1:
        raise InputError(f"{verb}: expected rows as a tensor of one dimension, found {rows!r}")
    found = leaves(state)
    batch = found[0].shape[0] if found else rows.shape[0]
    if rows.dtype == torch.bool and rows.shape[0] != batch:
        raise InputError(f"{verb}: expected a mask of {batch} rows, as the state has, found one of {rows.shape[0]}")
    return batch


def check_input(x: Tensor, dim: int) -> None:
    """Raise InputError unless x is [B, T, dim] of floats; T may be 0."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
        found = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"expected x [B, T, {dim}] of floats, found {found}")


def detach(state: State) -> State:
    """The same values, cut from the graph that made them: what truncates back-propagation through time."""
    return map_state(Tensor.detach, state)
