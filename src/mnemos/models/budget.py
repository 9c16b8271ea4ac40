"""Build a model no larger than its weights: the configuration may come from a stranger and ask for terabytes.

Sizes are predicted from the arguments of PyTorch's functions. A model that is first built on the device "meta" needs no
prediction, but its first tensors import PyTorch's compiler: a second in every process that loads a model.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from mnemos.config import ModelConfig
from mnemos.types import InputError

# What a model needs beyond its saved tensors: weights that are drawn and then tied, tables, an example's activations.
_TIMES, _TENSORS, _VALUES, _TABLES = 4, 256, 2**16, 2**26


def build_within(config: ModelConfig, tensors: int, values: int) -> nn.Module:
    """The model of a configuration whose weights are `tensors` tensors with `values` values in total.

    Raises InputError, before it allocates them, as soon as the model registers clearly more tensors or values than
    these, or creates tensors beside them that are larger than both 2²⁶ values and four times the weights; and if the
    configuration cannot be built. Cost: `config.build()` and a few microseconds per call of a function of PyTorch.
    """
    budget = _Budget(tensors, values)
    hooks = [
        register_module_parameter_registration_hook(budget.parameter),
        register_module_buffer_registration_hook(budget.buffer),
    ]
    try:
        with budget:
            model: nn.Module = config.build()
    except InputError:
        raise
    except Exception as error:  # sizes that no library expects end in its internal errors
        problem = " ".join(str(error).split())[:200] or "no reason given"
        raise InputError(
            f"expected the settings of a model, found ones that cannot be built ({type(error).__name__}: {problem})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return model


class _Budget(TorchFunctionMode):
    """Counts what is registered in modules, and what functions of PyTorch create. Of its own thread alone."""

    def __init__(self, tensors: int, values: int) -> None:
        super().__init__()
        self.tensors, self.values = tensors, values
        self.registered = self.held = self.created = 0
        self.thread = threading.get_ident()

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        """Count a parameter that a module registers."""
        if parameter is not None and self.thread == threading.get_ident():
            self.held += parameter.numel()
            if self.held > _TIMES * self.values + _VALUES:
                raise self._refusal(f"more than {self.held:,} values")
            self._count()

    def buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        """Count a buffer that a module registers; its values are counted when they are created."""
        if buffer is not None and self.thread == threading.get_ident():
            self._count()

    def _count(self) -> None:
        self.registered += 1
        if self.registered > _TIMES * self.tensors + _TENSORS:
            raise self._refusal(f"more than {self.registered:,} tensors")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        self._check(_size(getattr(func, "__name__", ""), args, given))
        found = func(*args, **given)
        if isinstance(found, Tensor) and not _shares(found, (*args, *given.values())):
            self.created += found.numel()
            if self.created > 4 * self._most():
                raise self._refusal(f"tables of more than {self.created:,} values in total")
        return found

    def _most(self) -> int:
        return max(_TABLES, _TIMES * self.values)

    def _check(self, size: float) -> None:
        if size > self._most():
            raise self._refusal(f"a tensor of {size:,.0f} values")

    def _refusal(self, what: str) -> InputError:
        return InputError(
            f"expected a model of {self.tensors:,} tensors with {self.values:,} values, as its weights have, found "
            f"settings that need {what}"
        )


def _shares(found: Tensor, given: Iterable[Any]) -> bool:
    """Whether a result is in the memory of an argument: itself, or a view from its first value."""
    return any(isinstance(one, Tensor) and found.data_ptr() == one.data_ptr() for one in given)


def _size(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> float:
    """How many values a function will create, as far as its name and its arguments tell; 0 where they do not."""
    if name in _SIZES:
        try:
            return float(_SIZES[name](*args, **given))
        except (TypeError, IndexError, AttributeError):  # other arguments: the function says what is wrong with them
            return 0
    shapes = [one.shape for one in args if isinstance(one, Tensor)]
    return _broadcast(*shapes) if len(shapes) > 1 else 0


def _broadcast(*shapes: Sequence[int]) -> int:
    """The size of shapes together; 0 if they do not fit. (torch.broadcast_shapes imports the compiler: seconds.)"""
    size = 1
    for lengths in itertools.zip_longest(*map(reversed, shapes), fillvalue=1):
        wide = {*lengths} - {1}
        if len(wide) > 1:
            return 0
        size *= wide.pop() if wide else 1
    return size


def _product(*sizes: Any, size: Any = (), **others: Any) -> int:
    """The product of sizes, alone or in sequences: torch.zeros(2, 3), torch.zeros((2, 3)), torch.zeros(size=(2, 3))."""
    flat = [n for one in (*sizes, size) for n in (one if isinstance(one, Sequence) else (one,))]
    return math.prod(n for n in flat if isinstance(n, int))


def _range(*ends: float, start: float = 0, end: float = 0, step: float = 1, **others: Any) -> float:
    """torch.arange(end), torch.arange(start, end), torch.arange(start, end, step)."""
    if ends:
        start, end, step = (start, ends[0], step) if len(ends) == 1 else (*ends, step)[:3]
    return _LISTED * abs((end - start) / step) if step else 0


def _convolved(x: Tensor, weight: Tensor, bias: object = None, stride: Any = 1, *args: Any, **others: Any) -> int:
    """An upper bound but for padding."""
    axes = x.shape[-(weight.dim() - 2) :]
    strides = stride if isinstance(stride, Sequence) else [stride] * len(axes)
    places = math.prod(n // s + 1 for n, s in zip(axes, strides, strict=False))
    return weight.shape[0] * places * (x.shape[0] if x.dim() == weight.dim() else 1)


def _multiplied(x: Tensor, y: Tensor, **others: Any) -> int:
    if x.dim() < 2 or y.dim() < 2:
        return max(x.numel(), y.numel())
    return _broadcast(x.shape[:-2], y.shape[:-2]) * x.shape[-2] * y.shape[-1]


_LISTED = 16  # a range may become a list of Python's numbers, which take as much memory as so many values
_SIZES: dict[str, Callable[..., float]] = {
    **dict.fromkeys(("empty", "zeros", "ones", "rand", "randn"), _product),
    **dict.fromkeys(("full", "empty_strided"), lambda size, *args, **others: _product(size)),
    "randint": lambda *args, size=(), **others: _product(*(one for one in args if isinstance(one, Sequence)), size),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones"), lambda x, *args, **others: _product(*args, **others)),
    "new_full": lambda x, size, *args, **others: _product(size),
    **dict.fromkeys(("repeat", "tile"), lambda x, *args, **others: x.numel() * _product(*args, *others.values())),
    **dict.fromkeys(("cat", "concat", "stack"), lambda tensors, *args, **others: sum(x.numel() for x in tensors)),
    "eye": lambda n, m=None, **others: n * (n if m is None else m),
    **dict.fromkeys(("linspace", "logspace"), lambda start, end, steps, *args, **others: _LISTED * steps),
    "randperm": lambda n, **others: _LISTED * n,
    "arange": _range,
    "linear": lambda x, weight, *args, **others: x.numel() // max(1, x.shape[-1]) * weight.shape[0],
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolved),
    **dict.fromkeys(("matmul", "__matmul__", "mm", "bmm"), _multiplied),
    **dict.fromkeys(("outer", "kron"), lambda x, y, **others: x.numel() * y.numel()),
}
