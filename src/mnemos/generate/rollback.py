"""Rows of several states as one, and which models may be cut at any token."""

from collections.abc import Sequence

import torch
from torch import nn

from mnemos._compat import pytree
from mnemos.memory.key_values import KeyValues
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
