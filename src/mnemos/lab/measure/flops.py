"""Count the floating-point operations (FLOPs) of a call, with those of attention on the CPU.

The convention: a multiply-add is 2 FLOPs. Matrix products, convolutions and attention are counted; elementwise
operations, norms and softmax are not. Fused causal attention counts as if nothing were masked, as PyTorch counts it.
"""

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper
from torch.utils.weak import WeakIdKeyDictionary

# They declare the operators of mnemos that are counted.
import mnemos.ops.convolution.native
import mnemos.ops.delta.native
import mnemos.ops.linear.native
import mnemos.ops.selective.native  # noqa: F401
from mnemos import generators
from mnemos._compat import DispatchMode, is_elementary, operator_of, operators
from mnemos.lab.tasks.batch import Batch, to_model
from mnemos.lab.tasks.task import SUPERVISED, Task
from mnemos.types import State, likelihood_of

from .gradients import state_bytes

Formula = Callable[..., int]  # FLOPs from the shapes of an operator's arguments


def _product(_: object, a: torch.Size, b: torch.Size, **__: object) -> int:
    """x + a·b: a [.., n, k], b [.., k, m]."""
    return 2 * math.prod(a) * b[-1]


def _convolution_backward(g: torch.Size, x: torch.Size, weight: torch.Size, *rest: Any, **_: object) -> int:
    """One product per gradient that is needed. PyTorch's own formula ignores groups in the weights' gradient."""
    transposed, wanted = rest[4], rest[7]
    each = 2 * math.prod(x if transposed else g) * math.prod(weight[1:])
    return each * (wanted[0] + wanted[1])


def _linear_attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Per token a product is added to S, and S and z are multiplied by q. q [B, T, H, D], v [B, T, H, M]."""
    return 2 * math.prod(q) * (2 * v[-1] + 1)


def _linear_attention_backward(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """The same three times, for dq, dk and dv; z is an additional column in the first two."""
    return 2 * math.prod(q) * (4 * (v[-1] + 1) + 2 * v[-1])


def _bidirectional(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """S = φ(k)ᵀ·v, and queries times S and z. q [B, T, H, D], k [B, N, H, D], v [B, N, H, M]."""
    return 2 * (math.prod(k) * v[-1] + math.prod(q) * (v[-1] + 1))


def _delta_rule(q: torch.Size, k: torch.Size, v: torch.Size, beta: torch.Size | None, *_: object, **__: object) -> int:
    """As `_linear_attention` without z; with β, S is multiplied by k as well. q [B, T, K, D], v [B, T, H, M]."""
    return 2 * math.prod(v) * q[-1] * (2 if beta is None else 3)


def _selective_scan(x: torch.Size, dt: torch.Size, a: torch.Size, *_: object, **__: object) -> int:
    """Per token a product is added to the state, which is multiplied by C. x [B, T, E], A [E, N]."""
    return 2 * math.prod(x) * 2 * a[-1]


def _short_convolution(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    """Each channel by itself. x [B, T, E], weight [E, K]."""
    return 2 * math.prod(x) * weight[-1]


def _lstm(x: torch.Size, w_in: torch.Size, w_hidden: torch.Size, *_: object, **__: object) -> int:
    """One direction of a layer: x [T, B, I] and the hidden state before each step, times the weights of four gates."""
    return 2 * math.prod(x[:2]) * (math.prod(w_in) + math.prod(w_hidden))


# PyTorch does not count these operators, or counts them wrongly. 2 * : the gradients of both factors of each product.
COUNTED: dict[object, Formula] = {
    **dict.fromkeys(
        operators("_scaled_dot_product_flash_attention_for_cpu"), lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    ),
    **dict.fromkeys(
        operators("_scaled_dot_product_flash_attention_for_cpu_backward"),
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v),
    ),
    torch.ops.aten.addmm_: _product,
    torch.ops.aten.baddbmm_: _product,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten.mkldnn_rnn_layer: _lstm,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *shapes, **_: 2 * _lstm(*shapes),
    torch.ops.mnemos.short_convolution: _short_convolution,
    torch.ops.mnemos.short_convolution_backward: lambda *shapes, **_: 2 * _short_convolution(*shapes),
    # 3 * : the states are computed again, since none is kept for each token.
    torch.ops.mnemos.delta_rule: _delta_rule,
    torch.ops.mnemos.delta_rule_backward: lambda *shapes, **_: 3 * _delta_rule(*shapes),
    torch.ops.mnemos.selective_scan: _selective_scan,
    torch.ops.mnemos.selective_scan_backward: lambda *shapes, **_: 3 * _selective_scan(*shapes),
    torch.ops.mnemos.linear_attention: _linear_attention,
    torch.ops.mnemos.linear_attention_backward: _linear_attention_backward,
    torch.ops.mnemos.linear_attention_bidirectional: _bidirectional,
    torch.ops.mnemos.linear_attention_bidirectional_backward: lambda *shapes, **_: 2 * _bidirectional(*shapes),
}


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Inside, torch.nn's attention in eval mode calls operators that can be counted."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Unpadded(TorchFunctionMode):
    """Compute fused attention without the zeros that its queries and keys were padded with, to count the formula's:
    callers pad them to the width of the values, which the CPU's kernel needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: WeakIdKeyDictionary = WeakIdKeyDictionary()  # padded tensor: its width before

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        fused = func is F.scaled_dot_product_attention and len(args) > 1  # by keyword: nothing of ours, so not padded
        if fused and args[0] in self.before and args[1] in self.before:
            args = (*(x[..., : self.before[x]] for x in args[:2]), *args[2:])
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        zeros = kwargs.get("mode") == "constant" and not kwargs.get("value")
        if func is F.pad and zeros and len(args[1]) == 2 and args[1][0] == 0:
            self.before[out] = args[0].shape[-1]
        return out


class Operators(DispatchMode):
    """Inside the `with`, calls note(operator, its overload, arguments, keywords, result, FLOPs) after each operator.

    FLOPs are None without a formula; an operator that is made of others is its parts. PyTorch's FlopCounterMode counts
    the same, but attributes all to modules by hooks on tensors, which take as long as the rest.
    """

    supports_higher_order_operators = True  # or they would raise an error: those of torch.cond

    def __init__(self, note: Callable[[Any, Any, tuple, dict, object, int | None], object]) -> None:
        super().__init__()
        self.note = note
        self.formulas: dict[object, tuple[Any, Formula | None]] = {}  # of elementary overloads: each is asked once
        self.known = flop_registry | {operator: shape_wrapper(formula) for operator, formula in COUNTED.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.formulas:
            if func is torch.ops.higher_order.cond:
                holds, if_true, if_false, operands = args
                with self:
                    return (if_true if holds else if_false)(*operands)
            if not is_elementary(func):
                with self:
                    parts = func.decompose(*args, **kwargs)
                if parts is not NotImplemented:
                    return parts
            operator = operator_of(func)
            self.formulas[func] = operator, self.known.get(operator)
        out = func(*args, **kwargs)
        operator, formula = self.formulas[func]
        self.note(operator, func, args, kwargs, out, None if formula is None else formula(*args, **kwargs, out_val=out))
        return out


def count_flops(function: Callable[[], object]) -> int:
    """FLOPs of one call, with its side effects, in matrix products, convolutions and attention; a multiply-add is 2."""
    return sum(flops_by_operation(function).values())


def flops_by_operation(function: Callable[[], object]) -> dict[str, int]:
    """The count of `count_flops` by the name of PyTorch's operator: {"addmm": …, "bmm": …}."""
    counts: Counter[str] = Counter()

    def note(operator: Any, _overload: Any, _args: tuple, _kwargs: dict, _out: object, flops: int | None) -> None:
        if flops is not None:
            counts[operator.__name__] += flops

    with _Unpadded(), no_fast_path(), Operators(note):
        function()
    return dict(counts)


def forward_flops(model: nn.Module, inputs: Tensor, mask: Tensor | None = None, segment: int = 0) -> int:
    """FLOPs of `model(inputs, None, mask)`, without gradient, in the mode the model is in.

    segment: tokens [B, T] are read in segments of this length, each from the state of the one before; 0: all at once.
    A copy of the model runs and the random generators are restored: caches and running statistics do not change.
    """
    return task_flops(model, SUPERVISED, Batch(inputs, inputs, mask), segment)


def task_flops(model: nn.Module, task: Task, example: object, segment: int = 0) -> int:
    """`forward_flops` of the forward that a task makes of a batch, for example `task.example()`."""
    return count_flops(lambda: _state_after(model, task, example, segment))


def task_state_bytes(model: nn.Module, task: Task, example: object, segment: int = 0) -> int:
    """Bytes of a model's state after the rows of `example`, read as for `task_flops`; 0 for a model without one."""
    return state_bytes(_state_after(model, task, example, segment))


def _state_after(model: nn.Module, task: Task, example: object, segment: int) -> State:
    tensors = (x for part in model.modules() for x in vars(part).values() if isinstance(x, Tensor))
    memo = {id(x): x.detach() for x in tensors if x.grad_fn is not None}  # a loss that it keeps: `deepcopy` refuses it
    copied, state = copy.deepcopy(model, memo), None
    with torch.no_grad(), generators.preserve():
        for part in task.segments(to_model(example, model), segment):
            outputs, state = task.forward(copied, part, state)
            if hasattr(likelihood_of(copied), "log_prob"):  # an adaptive softmax multiplies in the loss
                task.loss(copied, outputs, part)
    return state
