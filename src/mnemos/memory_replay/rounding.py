"""An estimate of rounding: how far a step's results move if every number in it moves by a relative amount.

A difference of means, or a loss of normalised advantages, is about zero: its own size says nothing about its rounding.
That depends on the sizes of the numbers that were added up. Monte Carlo arithmetic measures it (D. S. Parker, Monte
Carlo Arithmetic, 1997): the step is computed with every input and every result of an operation multiplied by 1 ± ε, by
random signs, beside the same step without that. Both share every random number, also of generators that nothing
registers, so that randomness does not count as rounding.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mnemos._compat import DispatchMode, pytree, schema_of

from .state_checks import differentiable

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
