"""Comparison of replayed steps with the first pass: rounding is allowed, other differences are errors.

A difference of means, or a loss of normalised advantages, is about zero: its own size says nothing about its rounding.
That depends on the sizes of the numbers that were added up. Monte Carlo arithmetic measures it (D. S. Parker, Monte
Carlo Arithmetic, 1997): the step is computed with every input and every result of an operation multiplied by 1 ± ε, by
random signs, beside the same step without that. Both share every random number, also of generators that nothing
registers, so that randomness does not count as rounding.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mnemos._compat import DispatchMode, pytree, schema_of
from mnemos.types import InputError

from .step_start import StepStart
from .step_states import differentiable

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
            cures = [f"give tolerance={HALF} if the step computes in half precision", *cures]
        if not estimated and math.isfinite(difference):
            cures = [*cures, "give a larger tolerance if its summands cancel, which was not measured"]
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


_DRAWS = 3  # of random signs: one alone may leave a scalar where it is
_WIDTH = 3.0  # times the root mean square of what they move
_SHARE = 0.25  # of the allowed relative difference that each number is moved by


def sensitivity(run: Callable[[], dict[Any, Tensor]], allowed: Callable[[torch.dtype], float]) -> dict[Any, float]:
    """How far rounding may move each tensor that `run` returns, as the norm of a difference.

    allowed: the relative difference of one number that counts as rounding, by dtype. Cost: three runs, each of two to
    three times the time and memory of `run`, without gradient. A tensor that no operation of PyTorch computed has 0.
    """
    squares: dict[Any, float] = {}
    for seed in range(_DRAWS):
        with torch.no_grad(), Perturbed(lambda x: _SHARE * allowed(x.dtype), seed) as mode:
            found = run()
        for name, x in found.items():
            squares[name] = squares.get(name, 0.0) + mode.moved(x) ** 2
    return {name: _WIDTH * math.sqrt(square / _DRAWS) for name, square in squares.items()}


class Perturbed(DispatchMode):
    """A context in which every operation is computed twice: as it is, and with perturbed numbers.

    epsilon: the relative perturbation of a tensor's numbers. Operations that draw random numbers run once: both
    computations have their results.
    """

    def __init__(self, epsilon: Callable[[Tensor], float], seed: int) -> None:
        super().__init__()
        self._epsilon, self._seed = epsilon, seed
        self._noise: dict[torch.device, torch.Generator] = {}
        self._perturbed = WeakTensorKeyDictionary()

    def moved(self, x: Tensor) -> float:
        """The norm of the difference between x and its perturbed value, where both are finite; 0 if unknown."""
        other = self._perturbed.get(x)
        if other is None:
            return 0.0
        difference = (other - x.detach()).abs().double()
        return float(difference[difference.isfinite()].norm())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat, structure = pytree.tree_flatten((args, kwargs or {}))
        schema = schema_of(func)
        written = [
            x
            for x, argument in zip(args, schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if torch.Tag.nondeterministic_seeded in func.tags or not any(map(differentiable, flat)):
            result = func(*args, **(kwargs or {}))
            for x in written:
                if isinstance(x, Tensor) and x in self._perturbed:
                    self._perturbed[x].copy_(x)
            return result
        if _constant(schema.name) or any(not differentiable(x) for x in written):
            return func(*args, **(kwargs or {}))
        others = [self._of(x) if differentiable(x) else x for x in flat]  # before an operation that writes
        result = func(*args, **(kwargs or {}))
        other_args, other_kwargs = pytree.tree_unflatten(others, structure)
        other = func(*other_args, **other_kwargs)
        views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        for x, y in zip(pytree.tree_leaves(result), pytree.tree_leaves(other), strict=True):
            if differentiable(x) and x.shape == y.shape:
                if any(x is w for w in written):
                    y.mul_(self._signs(y))
                else:
                    self._perturbed[x] = y if views else y * self._signs(y)
        return result

    def _of(self, x: Tensor) -> Tensor:
        """The perturbed value of x; made now, if x comes from outside."""
        if x not in self._perturbed:
            self._perturbed[x] = x * self._signs(x)
        found: Tensor = self._perturbed[x]
        return found

    def _signs(self, x: Tensor) -> Tensor:
        """1 ± ε by random signs, like x."""
        noise = self._noise.get(x.device)
        if noise is None:
            noise = self._noise[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        real = x.dtype.to_real() if x.is_complex() else x.dtype
        signs = torch.empty(x.shape, dtype=real, device=x.device).bernoulli_(0.5, generator=noise)
        return signs.mul_(2).sub_(1).mul_(self._epsilon(x)).add_(1)


def _constant(name: str) -> bool:
    """Whether an operation takes a tensor for its shape alone; memory that it leaves unset must not be compared."""
    own = name.partition("::")[2]
    return own.endswith("_like") or own.startswith("new_")
