"""The FLOPs and bytes of each operation of a call, and the time that a roofline model predicts from them.

The operations of a model run one after another without overlap. So the predicted time is the sum over operations of the
larger of two times: FLOPs divided by the machine's rate of products, and bytes divided by its bandwidth. Matrix
products are bound by the first and elementwise operations by the second.
"""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, shape_wrapper

from mnemos._compat import DispatchMode, operator_of, operators, pytree, schema_of

from .flops import COUNTED, no_fast_path


class Work(NamedTuple):
    """One operation: FLOPs (a multiply-add is 2), and bytes read and written, each tensor once."""

    name: str
    flops: int
    bytes: int


class Machine(NamedTuple):
    """Measured rates: FLOPs per second of a large product, bytes per second of a large copy."""

    flops: float
    bytes: float

    def seconds(self, work: Iterable[Work]) -> float:
        """The predicted seconds of operations that run one after another."""
        return sum(max(one.flops / self.flops, one.bytes / self.bytes) for one in work)


def operations(function: Callable[[], object]) -> list[Work]:
    """The operations of a call, in order. The function is called once. Views cost nothing and are left out.

    torch.nn's attention runs without its fast path, whose operations cannot be seen.
    """
    with no_fast_path(), _Recorder() as recorder:
        function()
    return recorder.work


class _Recorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []
        self.formulas: dict[object, Callable[..., int]] = {**flop_registry}
        self.formulas |= {operator: shape_wrapper(formula) for operator, formula in COUNTED.items()}

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        packet = operator_of(func)
        if packet not in self.formulas:
            with self:
                parts = func.decompose(*args, **kwargs)  # a composite operation counts as its parts
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        moved = _moved(func, args, kwargs, out)
        flops = self.formulas[packet](*args, **kwargs, out_val=out) if packet in self.formulas else 0
        if flops or moved:
            self.work.append(Work(packet.__name__, int(flops), moved))
        return out


def _moved(func: Any, args: tuple, kwargs: dict, out: object) -> int:
    """Bytes read and written: every input, every output, and again every input that is written in place."""
    packet = operator_of(func)
    if packet in _FREE:
        return 0
    schema = schema_of(func)
    names = schema.arguments
    values = [*zip(names, args, strict=False), *((a, kwargs[a.name]) for a in names if a.name in kwargs)]
    written = sum(_size(value) for a, value in values if a.alias_info is not None and a.alias_info.is_write)
    aliases = any(r.alias_info is not None for r in schema.returns)
    if aliases and not written:
        return 0  # a view
    read = sum(_size(value) for _, value in values)
    if packet in _OVERWRITES:
        read -= written
    return read + written + (0 if aliases else _size(out))


# Views that are not declared as views, and allocations that are not written.
_FREE = {*operators("_unsafe_view"), torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
_FREE |= {torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided}
_OVERWRITES = {torch.ops.aten.copy_, torch.ops.aten.zero_, torch.ops.aten.fill_}


def _size(value: object) -> int:
    """Bytes of the tensors in a value; expanded axes count once."""
    total = 0
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            stored = [n for n, stride in zip(leaf.shape, leaf.stride(), strict=True) if stride or not n]
            total += math.prod(stored) * leaf.element_size()
    return total


def measure(size: int = 1024, megabytes: int = 64, rounds: int = 9) -> Machine:
    """Measure the CPU's rates with PyTorch's threads: the best of `rounds` products and copies. Cost: a second."""
    a, b, c = (torch.randn(size, size) for _ in range(3))
    source = torch.randn(megabytes * 2**18)
    target = torch.empty_like(source)
    product = min(_time(lambda: torch.mm(a, b, out=c)) for _ in range(rounds))
    copy = min(_time(lambda: target.copy_(source)) for _ in range(rounds))
    return Machine(2 * size**3 / product, 2 * source.nbytes / copy)


def _time(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
