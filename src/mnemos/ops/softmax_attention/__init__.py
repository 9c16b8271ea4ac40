"""Causal and windowed softmax attention on the CPU, which computes what a window sees and no more; see README.md.

reference.py has the equations; native.py the C++ kernels. PyTorch's `scaled_dot_product_attention` computes other calls
(attention/softmax.py).
"""

from torch import Tensor

from mnemos._compat import rewritten
from mnemos.errors import InputError
from mnemos.ops.kernel_call import can_skip_dispatcher, why_no_kernels
from mnemos.ops.signature import Signature

from . import native

__all__ = ["can_attend", "softmax_attention"]

CHECK = Signature(
    "softmax_attention", "; H is a multiple of K", q="B T H D", k="B S K D", v="B S K M", mask="B S bool ?"
)


def can_attend(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels are built and take these tensors, and no compiler, counter or transform is at work."""
    return not why_no_kernels() and native.takes(q, k, v) and can_skip_dispatcher(q, k, v) and not rewritten()


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    window: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """y_i = Σ_j e^{scale·q_i·k_j} v_j / Σ_j e^{scale·q_i·k_j} over the keys j that query i reads.

    q [B, T, H, D], k [B, S, K, D], v [B, S, K, M], float32 on the CPU, of any strides; y [B, T, H, M]. K divides H:
    query head h reads head h // (H / K) of the keys and values, without copies of them. scale: D^−½ if None.
    causal: the T queries are the last of the S positions, S ≥ T, and read no key behind them. window: with causal, the
    last `window` of those keys, the query's own among them. mask [B, S] bool, True = valid: other keys are not read.
    A query that reads nothing has a y of zeros, and no gradient.

    Differentiable once. Cost: O(D + M) for each query, each key that it reads, and each head. Besides its inputs, the
    backward needs y and two numbers for each query and head.
    Raises InputError for shapes and options that do not fit, RuntimeError without kernels.
    """
    n = CHECK(q=q, k=k, v=v, mask=mask)
    if not n["K"] or not n["H"] or n["H"] % n["K"] or (causal and n["S"] < n["T"]):
        raise InputError(f"softmax_attention: expected H a multiple of K and, if causal, S at least T, found {n}")
    if window is not None and (window < 1 or not causal):
        raise InputError(
            f"softmax_attention: expected a window of at least 1 and causal=True, found {window}, {causal=}"
        )
    if not native.takes(q, k, v):
        raise InputError(f"softmax_attention: expected float32 on the CPU and widths of at least 1, found {q.dtype}")
    return native.attend(q, k, v, mask, causal, min(window or 0, n["S"]), n["D"] ** -0.5 if scale is None else scale)[0]
