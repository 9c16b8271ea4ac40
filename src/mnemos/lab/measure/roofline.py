"""The FLOPs and bytes of each operation of a call, and the time that a roofline model predicts from them.

The operations of a model run one after another without overlap. So the predicted time is the sum over operations of the
larger of two times: FLOPs divided by the machine's rate of products, and bytes divided by its bandwidth. Matrix
products are bound by the first and elementwise operations by the second.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos._compat import operators, pytree, schema_of

from .flops import Operators, no_fast_path
from .timing import seconds_of


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
    work: list[Work] = []

    def note(operator: Any, overload: Any, args: tuple, kwargs: dict, out: object, flops: int | None) -> None:
        moved = 0 if operator in _FREE else _moved(operator, schema_of(overload), args, kwargs, out)
        if flops or moved:
            work.append(Work(operator.__name__, int(flops or 0), moved))

    with no_fast_path(), Operators(note):
        function()
    return work


def _moved(operator: Any, schema: Any, args: tuple, kwargs: dict, out: object) -> int:
    """Bytes read and written: every input, every output, and again every input that is written in place."""
    names = schema.arguments
    values = [*zip(names, args, strict=False), *((a, kwargs[a.name]) for a in names if a.name in kwargs)]
    written = sum(_size(value) for a, value in values if a.alias_info is not None and a.alias_info.is_write)
    aliases = any(r.alias_info is not None for r in schema.returns)
    if aliases and not written:
        return 0  # a view
    read = sum(_size(value) for _, value in values) - (written if operator in _OVERWRITES else 0)
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
    product = min(seconds_of(partial(torch.mm, a, b, out=c)) for _ in range(rounds))
    copy = min(seconds_of(partial(target.copy_, source)) for _ in range(rounds))
    return Machine(2 * size**3 / product, 2 * source.nbytes / copy)
