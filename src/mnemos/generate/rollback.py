"""Rows of several states, and going back within the tokens that a model has just read."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mnemos._compat import pytree
from mnemos.memory.key_values import KeyValues
from mnemos.ops.rewind import Calls
from mnemos.types import InputError, State, join, select


def check_cuts(model: nn.Module, verb: str) -> None:
    """Raise InputError for a model whose outputs depend on which tokens a call reads together."""
    if (splits := getattr(model, "splits", "anywhere")) != "anywhere":
        raise InputError(
            f"{verb}: expected a model whose sequences may be cut at any token, found {type(model).__name__} with "
            f"splits={splits!r}, in which a token read alone has other outputs than one read among others; use "
            "another memory (relative attention: same_length=True)"
        )


def merge_rows(parts: Sequence[tuple[Sequence[int], State]]) -> State:
    """The rows of several states as one state. parts: the number of each of a state's rows, 0 to R − 1, and the state.

    Keys and values that no row has any more are left out. Cost: a copy of each state.
    """
    numbers = torch.tensor([row for rows, _ in parts for row in rows])
    if len(parts) == 1:
        state = parts[0][1]
        return state if bool((numbers.diff() > 0).all()) else select(state, numbers.argsort())

    def shorten(part: object) -> object:  # without what is before the first token of every row
        return part.last(int(part.seen.max())) if isinstance(part, KeyValues) else part

    merged = select(join([state for _, state in parts]), numbers.argsort())
    return pytree.tree_map(shorten, merged, is_leaf=lambda part: isinstance(part, KeyValues))


def without_last(before: State, after: State, kept: Sequence[int], read: int, operators: Calls) -> State | None:
    """The state after the first `kept[r]` of the `read` tokens between two states, or None if it cannot be had so.

    It can if the state is made of counts [R] of the tokens read, and of states that `operators`, those of the call
    between the two, can go back to.
    """
    old, structure = pytree.tree_flatten(before)
    new, same = pytree.tree_flatten(after)
    rewound = [i for i, x in enumerate(new) if operators.knows(x, read)]
    others = [i for i in range(len(new)) if i not in rewound]
    if structure != same or not all(_counts(old[i], new[i], read) for i in others):
        return None
    found = {i: x + torch.tensor(kept, device=x.device) if isinstance(x := old[i], Tensor) else x for i in others}
    found |= zip(rewound, operators.rewind([new[i] for i in rewound], kept), strict=True)
    return pytree.tree_unflatten([found[i] for i in range(len(new))], structure)


def _counts(before: object, after: object, read: int) -> bool:
    """Whether a part of two states is a count of tokens [R], or the same value in both."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return bool(before == after)
    counts = before.dtype == torch.int64 and before.dim() == 1 and before.shape == after.shape
    return counts and bool((after - before == read).all())
