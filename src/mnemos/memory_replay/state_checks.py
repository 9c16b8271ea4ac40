"""Checks of what a step returns."""

from typing import Any

from torch import Tensor

from mnemos._compat import pytree, write_count
from mnemos.types import InputError


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
    if found != expected and not _grown(found, expected):
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


def _grown(found: Any, expected: Any) -> bool:
    """Whether the structures differ only by lists that are longer."""
    new, old = found.children(), expected.children()
    if found.type is not expected.type or (found.type is not list and len(new) != len(old)) or len(new) < len(old):
        return False
    return found.context == expected.context and all(map(_grown, new, old))


def _short(structure: Any) -> str:
    example = pytree.tree_unflatten(["*"] * structure.num_leaves, structure)
    said = str(example).replace("'*'", "*")
    return said if len(said) <= 80 else said[:77] + "..."


def alike(before: list[object], after: list[object]) -> bool:
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
    if versions_of(leaves) == versions:
        return
    parts = {_part(x) for x in after if isinstance(x, Tensor)}
    for x, now, before in zip(leaves, versions_of(leaves), versions, strict=True):
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


def versions_of(leaves: list[object]) -> list[int | None]:
    """How often each tensor was written; None for other leaves."""
    return [write_count(x) if isinstance(x, Tensor) else None for x in leaves]
