"""Control flow of exported programs, in which neither a number of tokens nor a value of a tensor is known."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos._compat import pytree, scanned
from mnemos.types import InputError, S, State, leaves


def token_by_token(
    token: Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, Any]], state: S, inputs: Sequence[Tensor]
) -> tuple[Tensor, S]:
    """y [B, T, ..] and the state after `y, state = token(state, inputs)` for each token.

    inputs: tensors [B, T, ..], of which `token` gets a token each, [B, 1, ..]; its y is [B, 1, ..]. The state has the
    same shapes before and after a token. For one token the function is called; else the program has a loop, whose cost
    is that of T calls.
    """
    if is_one(inputs[0].shape[1]):
        return token(state, tuple(inputs))
    structure = pytree.tree_flatten(state)
    shapes = [x.shape[1:] for x in leaves(state)]

    def step(carry: list[Tensor], given: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
        rows = given[0].shape[0]
        for x, shape in zip(carry, shapes, strict=True):  # a loop's body is traced alone, and has to be told
            if x.shape != (rows, *shape):
                raise InputError(f"expected a state of {(rows, *shape)}, found {tuple(x.shape)}")
        y, after = token(unflatten(carry, structure), tuple(x[:, None] for x in given))
        return _own(leaves(after)), y[:, 0].clone()

    carry, y = scanned(step, _own(leaves(state)), tuple(x.transpose(0, 1) for x in inputs))
    return y.transpose(0, 1), unflatten(carry, structure)


def changed_if_any(rows: Tensor, change: Callable[..., S], state: S, *given: State) -> S:
    """`change(state, *given)` if one of the rows [B] is True, else the state: what is computed for some rows alone.

    The change has the structure, shapes and types of the state.
    """
    kept, structure = pytree.tree_flatten(state), pytree.tree_flatten((state, given))
    count = len(leaves(state))

    def compute(*parts: Tensor) -> list[Tensor]:
        before, more = unflatten(parts, structure)
        found = zip(leaves(change(before, *more)), parts, strict=False)
        return _own([x.reshape(old.shape) for x, old in found])  # a branch has to be told that the sizes are the same

    def keep(*parts: Tensor) -> list[Tensor]:
        return _own(parts[:count])

    return unflatten(torch.cond(rows.any(), compute, keep, tuple(leaves((state, given)))), kept)


def unflatten(tensors: Sequence[Tensor], flat: tuple[list[Any], Any]) -> Any:
    """What was flattened, with other tensors; parts that are None stay so."""
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in flat[0]], flat[1])


def is_one(size: int | torch.SymInt) -> bool:
    """Whether a size is known to be 1. Other sizes are not compared, because a program has one form for all."""
    return isinstance(size, int) and size == 1


def _own(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copies: a loop and a branch return neither what they were given nor the same memory twice."""
    return [x.clone(memory_format=torch.contiguous_format) for x in parts]
