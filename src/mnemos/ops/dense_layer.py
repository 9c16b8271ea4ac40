"""Dense layers, y = x·Wᵀ + b, by the faster of the two libraries that PyTorch has for float32 on a CPU.

PyTorch multiplies by its BLAS. In its builds for x86 that is MKL, which on AMD's processors runs code for AVX2. oneDNN,
which is in the same builds, runs code for AVX-512 there, up to twice as fast. Which of the two computes is measured
once in a process (`measure`), and stays so: equal inputs give equal bits.

`dense` is `torch.nn.functional.linear`, and calls that for all that it does not compute by oneDNN; `Linear` is
`torch.nn.Linear` with it. Read `dense`, then `_Dense` for the gradients, then how the choice is made.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from mnemos._compat import (
    PLAIN,
    can_skip_dispatcher,
    dense_product,
    function_mode_active,
    is_tracing,
)
from mnemos.errors import InputError, near_name
from mnemos.ops.backend import Backend, Backends
from mnemos.ops.precision import full_precision
from mnemos.types import JSONObject

VARIABLE = "MNEMOS_DENSE"
LEAST, NEVER = 2**21, 2**62  # sizes of products: oneDNN computes none below LEAST, and none from NEVER on
FEW = 16  # rows up to which reading the weight is most of the time, for which MKL uses one thread
WIDE = 256  # of the longer side of a weight
_product = dense_product()


# ---- the operator ----


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x·weightᵀ + bias: `torch.nn.functional.linear`, large products in float32 on a CPU by oneDNN if it is faster.

    x [.., in], weight [out, in], bias [out] or None -> y [.., out].

    oneDNN computes products, and their gradients, from the size on from which it was measured to be faster (`choice`),
    of a contiguous x and a weight that is contiguous or the transpose of a matrix that is: for others it makes copies,
    or is slow. `mnemos.ops.which("dense", x, weight)` says which of the two computes. All else is PyTorch's own
    operation: other types, devices and strides, subclasses of Tensor, and wherever PyTorch has to see the operation, in
    compiled, traced and exported graphs, under autocast, torch.func, forward-mode AD, counters of FLOPs and other
    modes. It can be differentiated any number of times.

    The environment variable MNEMOS_DENSE, `blas` or `onednn`, fixes the choice: then other processes, with as many
    threads, compute equal bits.

    Cost: O(in·out) for each row. To choose takes less than a microsecond; oneDNN's first product of a shape in a
    process takes some 0.4 ms more. For the gradients it keeps what PyTorch keeps: x and the weight, each only if
    the other needs a gradient. While the weight's gradient is computed there is a transposed copy, either of y's
    gradient or of x and of the result, whichever is smaller. Raises what `torch.nn.functional.linear` raises, and
    InputError for another value of MNEMOS_DENSE.
    """
    # A graph has no sizes that could be compared, and a subclass of Tensor may have none.
    if is_compiling() or is_tracing() or type(x) not in PLAIN:
        return F.linear(x, weight, bias)
    shape = weight.shape  # as a call of `_size`, `len` or `weight.numel` it would take half a microsecond more
    size = (x.numel() + 8 * shape[-1]) * shape[0]
    if size < _state.least or not _is_chosen(x, weight, bias):
        return F.linear(x, weight, bias)
    # Of few rows MKL computes the gradients faster. With a narrow weight the transposed copy for its gradient takes as
    # much time as oneDNN saves.
    many_rows = not _few_rows(x)
    weight_gradient = many_rows and size >= choice().weight_gradient and max(weight.shape) >= WIDE
    return _by_onednn(x, weight, bias, many_rows, weight_gradient)


def _is_chosen(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether oneDNN computes this product."""
    if not _fits(x, weight, bias):
        return False
    if _few_rows(x):
        return _size(x, weight) >= choice().few_rows and torch.get_num_threads() > 1
    return _size(x, weight) >= choice().many_rows


def _few_rows(x: Tensor) -> bool:
    return x.numel() <= FEW * x.shape[-1]


def _size(x: Tensor, weight: Tensor) -> int:
    """The number of multiplications, by which products are compared; to read the weight takes the time of 8 rows."""
    return (x.numel() + 8 * weight.shape[1]) * weight.shape[0]


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether oneDNN can compute the product, without a copy that PyTorch's own would not make."""
    return (
        _is_ours(x, weight, bias)
        and x.dim() >= 2 == weight.dim()
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and x.is_contiguous()
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
    )


def _is_ours(*tensors: Tensor | None) -> bool:
    """Whether these are plain float32 tensors of a CPU, and PyTorch need not see what is computed of them."""
    if not can_skip_dispatcher(*tensors) or function_mode_active():
        return False
    if _product is None or not torch.backends.mkldnn.enabled or torch.is_autocast_enabled("cpu"):
        return False
    for x in tensors:
        if x is not None and not (x.dtype == torch.float32 and x.is_cpu and x.layout == torch.strided):
            return False
        if x is not None and x.is_nested:
            return False
    return True


def _by_onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, input_gradient: bool = True, weight_gradient: bool = True
) -> Tensor:
    """The product of tensors that fit. input_gradient, weight_gradient: whether oneDNN computes these, too."""
    differentiated = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if differentiated and torch.is_grad_enabled():
        y: Tensor = _Dense.apply(x, weight, bias, input_gradient, weight_gradient)
        return y
    assert _product is not None
    return _product(x, weight, bias)


class _Dense(torch.autograd.Function):
    """dx = dy·W, dW = dyᵀ·x and db = Σ dy; the first two are again dense products, of transposed matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *by_onednn: bool) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.by_onednn = by_onednn
        assert _product is not None
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors  # read once: activation checkpointing gives them out once
        input_gradient, weight_gradient = ctx.by_onednn
        dx = dw = db = None
        if weight is not None:
            w = weight.t()
            ours = input_gradient and _fits(dy, w)
            dx = _by_onednn(dy, w, None, *ctx.by_onednn) if ours else F.linear(dy, w)
        if x is not None:
            rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
            # If this gradient will be differentiated again, PyTorch computes it: `_weight_gradient` has no derivative.
            ours = weight_gradient and not torch.is_grad_enabled() and _is_ours(dy, x)
            dw = _weight_gradient(rows, dy_rows) if ours else dy_rows.t() @ rows
        if ctx.needs_input_grad[2]:
            db = dy.reshape(-1, dy.shape[-1]).sum(0)
        return dx, dw, db, None, None


def _weight_gradient(x: Tensor, dy: Tensor) -> Tensor:
    """dyᵀ·x of rows. oneDNN copies the transpose of its first matrix; as the second one it reads it in place."""
    assert _product is not None
    if dy.numel() <= x.numel() + x.shape[1] * dy.shape[1]:
        return _product(dy.t(), x.t(), None)
    return _product(x.t(), dy.t(), None).t().contiguous()


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `dense`: x [.., in] -> y [.., out].

    Weights, initial values and names in files are those of `torch.nn.Linear`. Tools that ask for exactly that class,
    as `torch.ao.quantization.quantize_dynamic` does, take a layer after `layer.__class__ = torch.nn.Linear`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return dense(input, self.weight, self.bias)


# ---- which of the two computes ----


class Choice(NamedTuple):
    """The sizes from which on oneDNN computes products; NEVER: PyTorch's BLAS computes all.

    few_rows: of up to FEW rows of x, if there are several threads. many_rows: of more. weight_gradient: of these, dW.
    They are the same with and without gradients, so that a forward that is computed again gives equal bits.
    """

    few_rows: int
    many_rows: int
    weight_gradient: int

    def __str__(self) -> str:
        texts = ["blas" if size == NEVER else f"onednn from {size:,} multiplications on" for size in self]
        return f"few rows {texts[0]}, many rows {texts[1]}, gradients of weights {texts[2]}"

    def to_json(self) -> JSONObject:
        """For run.json; None for NEVER."""
        return {name: None if size == NEVER else size for name, size in self._asdict().items()}

    @classmethod
    def from_json(cls, saved: JSONObject) -> Self:
        """What `to_json` wrote; {}, of a version without a choice, is BLAS. Raises InputError for anything else."""
        names = saved if isinstance(saved, dict) else {"": saved}
        sizes = [names.get(name) or NEVER for name in cls._fields]
        if names.keys() - {*cls._fields} or any(type(size) is not int or size < 0 for size in sizes):
            raise InputError(f"dense: expected sizes by {', '.join(cls._fields)}, found {saved!r:.80}; remove them")
        return cls(*sizes)


FIXED = {"blas": Choice(NEVER, NEVER, NEVER), "onednn": Choice(LEAST, 4 * LEAST, 4 * LEAST)}


class _State:
    choice: Choice | None = None
    least = LEAST  # the smallest size that oneDNN computes; LEAST until there is a choice


_state, _lock = _State(), threading.Lock()


def choice() -> Choice:
    """The choice of this process: that of MNEMOS_DENSE, else it is measured at the first call. Raises InputError."""
    if _state.choice is None:
        with _lock:
            if _state.choice is None:
                name = os.environ.get(VARIABLE)
                if name is not None and name not in FIXED:
                    raise InputError(f"{VARIABLE}: expected blas or onednn, found {name!r}; {near_name(name, FIXED)}")
                _put(measure() if name is None else FIXED[name])
    return _state.choice  # type: ignore[return-value]


@contextlib.contextmanager
def using(chosen: Choice) -> Iterator[None]:
    """Inside, this is the choice of the process, in all its threads: it computes as the process that recorded it."""
    before = _state.choice
    _put(chosen)
    try:
        yield
    finally:
        _put(before)


def _put(chosen: Choice | None) -> None:
    _state.choice, _state.least = chosen, LEAST if chosen is None else min(chosen[:2])


def measure() -> Choice:
    """Measure from which size on oneDNN is clearly faster. Cost: 20 to 50 ms, once.

    Only processors with AVX-512 can gain: for AVX2 both have the same instructions.
    """
    if why_no_onednn() or not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return FIXED["blas"]
    assert _product is not None
    product = _product
    with torch.no_grad(), full_precision("cpu"):

        def matrix(*shape: int) -> Tensor:
            return torch.ones(shape, dtype=torch.float32, device="cpu")

        def of_rows(rows: int, width: int, out: int, more: float) -> int:
            x, weight = matrix(rows, width), matrix(out, width)
            return _least_gain(_size(x, weight), lambda: product(x, weight, None), lambda: F.linear(x, weight), more)

        # A model's weights lie in memory, where more is gained than of this one, in a cache: from a quarter on.
        few = of_rows(1, 1024, 2048, _CALL) if torch.get_num_threads() > 1 else NEVER
        few = few if few == NEVER else max(LEAST, few // 4)
        # Smaller products are mostly overhead, and the two libraries seem equal.
        many, x = of_rows(256, 512, 512, _PYTHON), matrix(256, 512)
        size = _size(x, matrix(512, 512))
        weight_gradient = _least_gain(size, lambda: _weight_gradient(x, x), lambda: x.t() @ x, _PYTHON)
    return Choice(few, many, weight_gradient)


_ROUNDS, _MARGIN = 6, 0.95
_CALL, _PYTHON = 10e-6, 40e-6  # seconds by which a call of oneDNN takes longer, and one of `dense` with its gradients


def _least_gain(size: int, ours: Callable[[], Tensor], theirs: Callable[[], Tensor], more: float) -> int:
    """The size, a power of 2, from which on oneDNN's product is faster, or NEVER; estimated from times for one `size`.

    The two run in turn, several times. The least time of each is the one that other programs disturbed least. more:
    seconds that our function in Python takes beside.
    """
    times: list[list[float]] = [[], []]
    for _ in range(1 + _ROUNDS):
        for function, seconds in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    fast, usual = (min(seconds[1:]) for seconds in times)  # the first call compiles
    share = max(fast - _CALL, 0.0) / usual
    if share > _MARGIN:
        return NEVER
    return max(LEAST, 1 << int(size * (_CALL + more) / (1 - share) / usual).bit_length())


# ---- for `mnemos.ops.which` and `mnemos verify` ----


def why_no_onednn() -> str:
    """Why oneDNN cannot compute here, or "" if it can."""
    return "" if _product is not None else "this PyTorch has no oneDNN, or another one"


BACKENDS = Backends(
    "dense",
    Backend("onednn", _by_onednn, _is_chosen, why_no_onednn),
    Backend("blas", F.linear),
)
