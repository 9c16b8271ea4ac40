"""Dense layers of anyone's model by `mnemos.ops.dense`: `torch.nn.Linear`, GPT-2's `Conv1D`, projections of heads.

`dense_forward` has the forward of each class; a subclass, such as a quantised or parametrised layer, keeps its own.
"""

import functools
import inspect
from types import FunctionType, SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.libraries import with_globals
from mnemos.ops import dense


def dense_forward(cls: Any) -> Any:
    """The forward of a class of dense layers, computed by `dense`; None for other classes."""
    if cls is nn.Linear:
        return _linear()
    if cls is nn.MultiheadAttention:
        return _multi_head()
    if (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return _conv1d(cls)
    return None


@functools.cache
def _linear() -> Any:
    @functools.wraps(nn.Linear.forward)
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return dense(input, self.weight, self.bias)

    return forward


@functools.cache
def _conv1d(cls: Any) -> Any:
    """The forward of GPT-2's class, whose weight is [in, out]."""

    @functools.wraps(cls.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        return dense(x, self.weight.t(), self.bias)

    return forward


@functools.cache
def _multi_head() -> Any:
    """The forward of `torch.nn.MultiheadAttention`.

    It calls `F.multi_head_attention_forward`, which projects by `linear`, and by functions that call `linear`. The copy
    gets a copy of `F` in which `dense` is in place of `linear` in these functions.
    """
    theirs: Any = F.multi_head_attention_forward
    callees = {name: vars(F).get(name) for name in inspect.unwrap(theirs).__code__.co_names}
    projections = {
        name: with_globals(function, {"linear": dense})
        for name, function in callees.items()
        if isinstance(function, FunctionType) and "linear" in function.__code__.co_names
    }
    functions = {**vars(F), "multi_head_attention_forward": with_globals(theirs, {"linear": dense, **projections})}
    return with_globals(nn.MultiheadAttention.forward, {"F": SimpleNamespace(**functions)})
