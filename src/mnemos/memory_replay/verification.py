"""Comparison of replayed steps with the first pass: rounding is allowed, other differences are errors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mnemos.types import InputError

from .step_states import differentiable

# Allowed differences relative to a tensor's norm: kernels may round differently with and without gradient. New random
# numbers for dropout, or a shuffled batch, differ by far more.
_ROUNDING = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}
HALF = 2e-2  # for a step that computes in half precision, whatever the dtype of its state


@dataclass(frozen=True, slots=True)
class _Gap:
    """A difference that may be larger than rounding. what: "state", "loss" or the name of a buffer."""

    t: int
    what: str
    difference: Tensor
    size: Tensor
    allowed: float  # relative to size


class StateComparison:
    """The differences between replayed steps and the first pass. For a GPU they are read later, not to wait for it.

    tolerance: relative to a tensor's norm; None: by dtype, about the rounding of a long sum in it. advances: the first
    pass was computed by `advance`. module: the one whose buffers are restored.
    """

    def __init__(self, tolerance: float | None, advances: bool, module: nn.Module | None) -> None:
        self._tolerance = tolerance
        self._cures = ["draw from PyTorch's, Python's and NumPy's global generators or give yours as generators=[...]"]
        if advances:
            self._cures.append("let advance do to state and buffers what step does")
        if module is None:
            self._cures.append("name the module whose buffers change")
        self._unread: list[_Gap] = []

    def add(self, t: int, what: str, found: Sequence[object], expected: Sequence[object]) -> None:
        """Compare what the replay of step t computed with the first pass. Raises InputError if they differ."""
        for a, b in zip(found, expected, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                if a.shape != b.shape or a.dtype != b.dtype:
                    self._fail(t, what, f"{_kind(a)} instead of {_kind(b)}")
                # Most replayed steps are equal to the bit, which is found in a hundredth of the time of a difference.
                if a.numel() and not (a.device.type == "cpu" and _equal(a, b)):
                    allowed = tolerance(a) if self._tolerance is None else self._tolerance
                    difference, size = _distance(a.detach(), b.detach())
                    self._unread.append(_Gap(t, what, difference, size, allowed))
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
        for gap, difference, size in zip(unread, differences, sizes, strict=True):
            if difference > gap.allowed * size:
                ratio = difference / (gap.allowed * size) if gap.allowed * size else math.inf
                cures = [*self._cures, "give verify=False if it is about zero because its summands cancel"]
                if difference < HALF * size:  # which rounding in half precision would explain
                    cures = [f"give tolerance={HALF} if the step computes in half precision", *self._cures]
                self._fail(gap.t, gap.what, f"{ratio:.3g} times what rounding explains", cures)

    def _fail(self, t: int, what: str, difference: str, cures: Sequence[str] | None = None) -> None:
        raise InputError(
            f"step {t}: expected its replay to give the {what} of the first pass, found it different "
            f"({difference}); {', or '.join(self._cures if cures is None else cures)}"
        )


def tolerance(x: Tensor) -> float:
    """The difference, relative to x, that rounding in x's dtype or in autocast's explains."""
    half = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    return HALF if half else _ROUNDING.get(x.dtype, HALF)


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
