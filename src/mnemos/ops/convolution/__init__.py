"""Short causal convolutions along the tokens, one a channel, with a window that is the state. See README.md.

A backend computes run(x, weight, bias, state, mask, resets, activation) -> y and the state after the call, in x's
dtype. It gets checked tensors of any strides.
"""

from torch import Tensor

from mnemos.errors import InputError
from mnemos.ops.backend import Backend, Backends
from mnemos.ops.kernel_call import why_no_kernels
from mnemos.ops.signature import Signature

from . import chunked, native

__all__ = ["BACKENDS", "short_convolution"]

BACKENDS = Backends(
    "short_convolution",
    Backend("native", native.convolve, native.takes, why_no_kernels),
    Backend("chunked", chunked.convolve),
)
CHECK = Signature(
    "short_convolution",
    "; the weight of a Conv1d is weight[:, 0], the state has W − 1 inputs",
    x="B T C",
    weight="C W",
    bias="C ?",
    state="B V C ?",
    mask="B T bool ?",
    resets="B T bool ?",
)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    mask: Tensor | None = None,
    resets: Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution over the last W valid tokens: y, and the state after it.

        y_t = a(bias + Σ_i weight[:, i] ⊙ x_{t − W + 1 + i})          i = 0 … W − 1, a the activation

    It is `torch.nn.Conv1d(C, C, W, groups=C, padding=W − 1)` without its last W − 1 outputs, and weight is that layer's
    `weight[:, 0]`. A sequence may be split into calls anywhere.

    x, y [B, T, C], T ≥ 0. weight [C, W], W ≥ 1. bias [C]. activation: None or "silu", z·σ(z).
    state [B, W − 1, C], the last W − 1 valid inputs, the latest one last, in x's dtype; never changed, and gradients
    flow through it. None: zeros, as the window is padded where a sequence starts.
    mask [B, T] bool, True = valid: an invalid token is not read, and its y is 0.
    resets [B, T] bool: True empties the window before the token, also before an invalid one: the first tokens of
    packed sequences.
    backend: "auto", or one of `mnemos.ops.backends("short_convolution")`.

    Half precision is computed in float32, and y is rounded once. Cost O(B·T·C·W) and kept memory: README.md. Raises
    InputError for shapes, dtypes, an activation or a backend that do not fit.
    """
    sizes = CHECK(x=x, weight=weight, bias=bias, state=state, mask=mask, resets=resets)
    if not sizes["W"] or sizes.get("V", sizes["W"] - 1) != sizes["W"] - 1:
        raise InputError(
            f"short_convolution: expected a weight [C, W], W at least 1, and a state [B, W − 1, C], found "
            f"{list(weight.shape)} and {None if state is None else list(state.shape)}"
        )
    if activation not in (None, "silu"):
        raise InputError(f"short_convolution: expected an activation of None or 'silu', found {activation!r}")
    run = BACKENDS.choose(backend, x, weight).run
    state = state if state is None else state.to(x.dtype)
    return run(x, weight, bias, state, mask, resets, activation)
