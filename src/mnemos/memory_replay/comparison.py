"""Comparison of replayed steps with the first pass: rounding is allowed, other differences are errors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mnemos.types import InputError

from .state_checks import differentiable
from .stored_states import StepStart

# Allowed differences relative to a tensor's norm: kernels may round differently with and without gradient. New random
# numbers for dropout, or a shuffled batch, differ by far more.
_ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
HALF = 2e-2  # for a step that computes in half precision, whatever the dtype of its state

Place = tuple[str, int]  # what of a step's result ("state", "loss" or the name of a buffer), and the leaf of the state
# How far rounding may move each place of step t, which starts from this; None if it cannot be estimated.
Sensitivity = Callable[[int, StepStart], dict[Place, float] | None]


@dataclass(frozen=True, slots=True)
class _Gap:
    """A difference that may be larger than rounding. `start`: what the step starts from."""

    t: int
    place: Place
    difference: Tensor
    size: Tensor
    allowed: float  # relative to size
    start: StepStart


class StateComparison:
    """The differences between replayed steps and the first pass. For a GPU they are read later, not to wait for it.

    tolerance: relative to a tensor's norm; None: by dtype, about the rounding of a long sum in it. advances: the first
    pass was computed by `advance`. module: the one whose buffers are restored. sensitivity: estimates the rounding of
    the numbers that were added up, for a tensor that is small because they cancel.
    """

    def __init__(
        self, tolerance: float | None, advances: bool, module: nn.Module | None, sensitivity: Sensitivity
    ) -> None:
        self._tolerance, self._sensitivity = tolerance, sensitivity
        self._cures = ["draw from PyTorch's, Python's and NumPy's global generators or give yours as generators=[...]"]
        if advances:
            self._cures.append("let advance do to state and buffers what step does")
        if module is None:
            self._cures.append("name the module whose buffers change")
        self._unread: list[_Gap] = []

    def add(self, t: int, what: str, found: Sequence[object], expected: Sequence[object], start: StepStart) -> None:
        """Compare what the replay of step t computed with the first pass. Raises InputError if they differ."""
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                if a.shape != b.shape or a.dtype != b.dtype:
                    self._fail(t, what, f"{_kind(a)} instead of {_kind(b)}")
                # Most replayed steps are equal to the bit, which is found in a hundredth of the time of a difference.
                if a.numel() and not (a.device.type == "cpu" and _equal(a, b)):
                    allowed = tolerance(a) if self._tolerance is None else self._tolerance
                    difference, size = _distance(a.detach(), b.detach())
                    self._unread.append(_Gap(t, (what, i), difference, size, allowed, start))
            elif isinstance(a, Tensor) or isinstance(b, Tensor) or not (a == b or a != a):
                self._fail(t, what, f"{_kind(a)} instead of {_kind(b)}")
        if all(gap.difference.device.type == "cpu" for gap in self._unread):
            self.settle()

    def settle(self) -> None:
        """Raise InputError, for the first replayed step with a difference, if it is larger than rounding."""
        unread, self._unread = self._unread, []
        if not unread:
            return
        differences = _numbers([gap.difference for gap in unread])
        sizes = _numbers([gap.size for gap in unread])
        estimated: dict[int, dict[Place, float] | None] = {}
        for gap, difference, size in zip(unread, differences, sizes, strict=True):
            if difference <= gap.allowed * size:
                continue
            if gap.t not in estimated and math.isfinite(difference):
                estimated[gap.t] = self._sensitivity(gap.t, gap.start)
            moved = estimated.get(gap.t)
            # Both are differences that rounding explains: of the tensor itself, and of the numbers it was made of.
            most = max(gap.allowed * size, (moved or {}).get(gap.place, 0.0))
            if difference > most:
                self._differs(gap, difference, size, most, moved is not None)

    def _differs(self, gap: _Gap, difference: float, size: float, most: float, estimated: bool) -> None:
        """Raise InputError for a difference, and say whether rounding in half precision would explain it."""
        ratio = difference / most if most else math.inf
        half = difference < HALF * size
        said = f"{ratio:.3g} times what rounding explains" + ("" if half else ", so other numbers were drawn or read")
        cures = self._cures
        if half:
            cures = [f"give verify={HALF} if the step computes in half precision", *cures]
        if not estimated and math.isfinite(difference):
            cures = [*cures, "give a larger verify if its summands cancel, which was not measured"]
        self._fail(gap.t, gap.place[0], said, cures)

    def _fail(self, t: int, what: str, difference: str, cures: Sequence[str] | None = None) -> None:
        raise InputError(
            f"step {t}: expected its replay to give the {what} of the first pass, found it different "
            f"({difference}); {', or '.join(self._cures if cures is None else cures)}"
        )


def precision(dtype: torch.dtype) -> float:
    """The relative difference that rounding in this dtype explains."""
    return _ROUNDING.get(dtype, HALF)


def tolerance(x: Tensor) -> float:
    """The difference, relative to x, that rounding in x's dtype or in autocast's explains."""
    half = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return HALF if half else precision(x.dtype)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.layout == b.layout == torch.strided and torch.equal(a, b)


def _distance(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of a − b, norm of b), over finite values; the first is infinite if others differ."""
    if not differentiable(a):
        return torch.where((a != b).any(), math.inf, 0.0), torch.zeros((), device=a.device)
    wide = a.dtype if a.dtype in _ROUNDING else torch.float32
    # Values that are not finite must be equal at the same places: a state may contain infinities (a maximum of
    # nothing), and NaN in both passes is visible in the gradient.
    finite = a.isfinite() & b.isfinite()
    other = ~(finite | (a == b) | (a.isnan() & b.isnan()))
    difference = torch.where(finite, a.to(wide) - b.to(wide), 0).norm()
    return torch.where(other.any(), math.inf, difference), torch.where(finite, b.to(wide), 0).norm()


def _numbers(values: list[Tensor]) -> list[float]:
    """Scalars as numbers, in one transfer if they are on one device."""
    if len({x.device for x in values}) == 1:
        return torch.stack([x.double() if x.device.type != "mps" else x.float() for x in values]).tolist()
    return [float(x) for x in values]


def _kind(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.40}"
