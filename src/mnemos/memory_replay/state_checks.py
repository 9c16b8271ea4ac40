"""What a step may return, and whether a replay gave what the first pass gave."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import pytree, write_count
from mnemos.types import InputError

# What kernels that round otherwise with and without gradient may differ by, of a tensor's norm; dropout drawn anew, or
# an entry of a batch that was shuffled, differs by far more.
_ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
HALF = 2e-2  # and where a step computes in half precision, whatever the type of its state


def differentiable(x: object) -> bool:
    """Whether a leaf of a state can carry gradient."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def check_leaves(leaves: list[object], t: int) -> None:
    """Raise InputError for a leaf that hides tensors: their graph would be kept, and their values not stored."""
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            kind = type(leaf).__name__
            raise InputError(
                f"step {t}: expected a state made of tensors, found a {kind} in it; "
                f"return its tensors, or register {kind} with torch.utils._pytree"
            )


def check_structure(found: object, expected: object, t: int) -> None:
    """Raise InputError where a step returns another structure than the states before had."""
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
    """Raise InputError where the batch changes: leaves led with one number, and one leads with the segment's now."""

    def rows(leaves: Sequence[object]) -> set[int]:
        return {len(x) for x in leaves if isinstance(x, Tensor) and x.dim()}

    old, new = rows(before), rows(pytree.tree_leaves(segment)[:1])
    if len(old) == 1 and old != {0} and new and new != old and new & rows(after):
        raise InputError(
            f"step {t}: expected a batch of {old.pop()} rows, as the state has, found {new.pop()}; "
            "give every segment the rows of the state, and restart rows with resets"
        )


def check_loss(loss: object, t: int) -> None:
    """Raise InputError unless it is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"step {t}: expected (loss, state) with loss a scalar tensor of floats, found {found}")


def check_advanced(found: object, t: int) -> None:
    """Raise InputError where `advance` returns nothing, or what `step` returns."""
    if found is None:
        raise InputError(f"step {t}: expected advance to return the new state, found None; return it")
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and not found[0].dim():
        raise InputError(f"step {t}: expected advance to return the new state alone, found (loss, state)")


def check_kinds(before: list[object], after: list[object], t: int) -> None:
    """Raise InputError where a tensor of the state becomes none."""
    for old, new in zip(before, after, strict=False):  # of other structures at the first step, which may be given None
        if isinstance(old, Tensor) and not isinstance(new, Tensor):
            raise InputError(
                f"step {t}: expected a state of tensors where it had them, found {new!r:.40} for a tensor of shape "
                f"{tuple(old.shape)}; keep it a tensor, and restart rows with resets"
            )


def check_attached(before: list[object], after: list[object], t: int) -> None:
    """Raise InputError where gradient came in with the state and nothing that the step made of it carries any.

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
    """Raise InputError where a step wrote into the state that it was given.

    Writing behind it is no such thing: a memory that is appended to hands out longer and longer parts of one buffer,
    which count their writes together.
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
    """Which storage a tensor lies in, and where in it."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), tuple(x.shape)


def versions_of(leaves: list[object]) -> list[int | None]:
    """How often each tensor was written."""
    return [write_count(x) if isinstance(x, Tensor) else None for x in leaves]


class StateComparison:
    """The differences between replays and the first pass. Looking at them makes a GPU wait: there it is done later.

    tolerance: of a tensor's norm; None: by type, roughly the rounding of a long sum in it. advances: the first pass is
    `advance`'s. module: the one whose buffers are looked after.
    """

    def __init__(self, tolerance: float | None, advances: bool, module: nn.Module | None) -> None:
        self._tolerance = tolerance
        self._cures = ["draw from the global generators alone"]
        if advances:
            self._cures.append("let advance do to state and buffers what step does")
        if module is None:
            self._cures.append("name the module whose buffers change")
        self._unseen: list[tuple[int, str, Tensor, float]] = []  # step, what, difference, what is allowed

    def add(self, t: int, what: str, found: Sequence[object], expected: Sequence[object]) -> None:
        """Step t's replay gave `found` where the first pass had `expected`. Raises InputError where they differ."""
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
        """Raise InputError, with the first step that was replayed, where a difference is more than rounding."""
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
    """The difference in units of what is allowed."""
    if not differentiable(a):
        return torch.where((a != b).any(), math.inf, 0.0)
    wide = a.dtype if a.dtype in _ROUNDING else torch.float32
    # Of what is finite. What is not has to be the same in the same places: a state may hold infinities (a maximum
    # of nothing), and one that is spoilt in both passes spoils the gradient visibly.
    finite = a.isfinite() & b.isfinite()
    other = ~(finite | (a == b) | (a.isnan() & b.isnan()))
    difference = torch.where(finite, a.to(wide) - b.to(wide), 0).norm()
    size = torch.where(finite, b.to(wide), 0).norm()
    return torch.where(other.any(), math.inf, difference / (allowed * size + torch.finfo(wide).tiny))


def _numbers(values: list[Tensor]) -> list[float]:
    """Scalars as numbers: on one device, which is the rule, in one transfer."""
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
