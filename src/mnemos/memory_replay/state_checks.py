"""Checks of what a step returns, and comparison of a replayed step with its first pass."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import pytree, write_count
from mnemos.types import InputError

# Allowed differences relative to a tensor's norm: kernels may round differently with and without gradient. New random
# numbers for dropout, or a shuffled batch, differ by far more.
_ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
HALF = 2e-2  # for a step that computes in half precision, whatever the dtype of its state


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


def check_structure(found: object, expected: object, t: int) -> None:
    """Raise InputError if a step returns a state of another structure than the one before."""
    if found != expected:
        raise InputError(
            f"step {t}: expected a state of the same structure at every step, found {_short(found)} "
            f"after {_short(expected)}; return what was given"
        )


def _short(structure: Any) -> str:
    example = pytree.tree_unflatten(["*"] * structure.num_leaves, structure)
    said = str(example).replace("'*'", "*")
    return said if len(said) <= 80 else said[:77] + "..."


def check_rows(segment: object, before: list[object], after: list[object], t: int) -> None:
    """Raise InputError if the batch size changes: all leaves had one first axis, and one now has the segment's."""

    def rows(leaves: Sequence[object]) -> set[int]:
        return {len(x) for x in leaves if isinstance(x, Tensor) and x.dim()}

    old, new = rows(before), rows(pytree.tree_leaves(segment)[:1])
    if len(old) == 1 and old != {0} and new and new != old and new & rows(after):
        raise InputError(
            f"step {t}: expected a batch of {old.pop()} rows, as the state has, found {new.pop()}; "
            "give every segment the rows of the state, and restart rows with resets"
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


class StateComparison:
    """The differences between replayed steps and the first pass. For a GPU they are read later, not to wait for it.

    tolerance: relative to a tensor's norm; None: by dtype, about the rounding of a long sum in it. advances: the first
    pass was computed by `advance`. module: the one whose buffers are restored.
    """

    def __init__(self, tolerance: float | None, advances: bool, module: nn.Module | None) -> None:
        self._tolerance = tolerance
        self._cures = ["draw from the global generators alone"]
        if advances:
            self._cures.append("let advance do to state and buffers what step does")
        if module is None:
            self._cures.append("name the module whose buffers change")
        self._unseen: list[tuple[int, str, Tensor, float]] = []  # step, name, difference, allowed difference

    def add(self, t: int, what: str, found: Sequence[object], expected: Sequence[object]) -> None:
        """Compare what the replay of step t computed with the first pass. Raises InputError if they differ."""
        for a, b in zip(found, expected, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                if a.shape != b.shape or a.dtype != b.dtype:
                    self._fail(t, what, f"{_kind(a)} instead of {_kind(b)}")
                if a.numel():
                    allowed = _tolerance(a) if self._tolerance is None else self._tolerance
                    self._unseen.append((t, what, _gap(a.detach(), b.detach(), allowed), allowed))
            elif isinstance(a, Tensor) or isinstance(b, Tensor) or not (a == b or a != a):
                self._fail(t, what, f"{_kind(a)} instead of {_kind(b)}")
        if all(gap.device.type == "cpu" for _, _, gap, _ in self._unseen):
            self.settle()

    def settle(self) -> None:
        """Raise InputError, for the first replayed step with a difference, if it is larger than rounding."""
        unseen, self._unseen = self._unseen, []
        for (t, what, _, allowed), gap in zip(unseen, _numbers([gap for _, _, gap, _ in unseen]), strict=True):
            if gap > 1:
                self._fail(t, what, f"{gap:.3g} times what rounding allows", gap * allowed < HALF)

    def _fail(self, t: int, what: str, difference: str, rounded: bool = False) -> None:
        cures = [*self._cures, f"give verify={HALF} if the step is in half precision"] if rounded else self._cures
        raise InputError(
            f"step {t}: expected its replay to give the {what} of the first pass, found it different "
            f"({difference}); {', or '.join(cures)}"
        )


def _gap(a: Tensor, b: Tensor, allowed: float) -> Tensor:
    """The difference divided by the allowed difference."""
    if not differentiable(a):
        return torch.where((a != b).any(), math.inf, 0.0)
    wide = a.dtype if a.dtype in _ROUNDING else torch.float32
    # Of finite values. Others must be equal at the same places: a state may contain infinities (a maximum of nothing),
    # and NaN in both passes is visible in the gradient.
    finite = a.isfinite() & b.isfinite()
    other = ~(finite | (a == b) | (a.isnan() & b.isnan()))
    difference = torch.where(finite, a.to(wide) - b.to(wide), 0).norm()
    size = torch.where(finite, b.to(wide), 0).norm()
    return torch.where(other.any(), math.inf, difference / (allowed * size + torch.finfo(wide).tiny))


def _numbers(values: list[Tensor]) -> list[float]:
    """Scalars as numbers, in one transfer if they are on one device."""
    if len({x.device for x in values}) == 1:
        return torch.stack([x.float() for x in values]).tolist()
    return [float(x) for x in values]


def _kind(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.40}"


def _tolerance(x: Tensor) -> float:
    kind = x.device.type
    if x.dtype in _ROUNDING and not (torch.is_autocast_enabled(kind) and x.dtype != torch.float64):
        return _ROUNDING[x.dtype]
    return HALF
