"""`fla_on_cpu()`: layers of flash-linear-attention run on a CPU, on the kernels of this library."""

import functools
import importlib
import inspect
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemos import libraries
from mnemos.attention.recurrent import unit
from mnemos.ops import delta_rule, short_convolution
from mnemos.types import InputError

from .fast_functions import starts
from .fla_modules import (
    cross_entropy,
    cross_entropy_gradients,
    gated_norm,
    gated_norm_gradients,
    gated_norm_of,
    gradients,
    norm_gradients,
    norm_of,
    swiglu,
    swiglu_gradients,
    times,
)

# Arguments of theirs that say how their kernels compute, and not what.
_IGNORED = {"chunk_indices", "chunk_size", "cu_seqlens_cpu", "disable_recompute", "layout_fallback", "max_num_seqs"}
_IGNORED |= {"output_contiguous", "safe_gate"}
_served: set["ServedFLA"] = set()  # those that were not undone
_FUSED = "fused_recurrent_gated_delta_rule_fwd"  # not in the registry
_MODULES = (
    "fla.backends",
    "fla.ops.gated_delta_rule.fused_recurrent",
    "fla.ops.kda",
    "fla.modules.causal_conv1d",
    "fla.modules.norm.fused_norm_gate",
    "fla.modules.norm.layernorm",
    "fla.modules.activations.ops",
    "fla.modules.fused_cross_entropy.ops",
    "fla.modules.fused_linear_cross_entropy.ops",
)


class ServedFLA:
    """What `fla_on_cpu` switched on. `undo()` switches it off, and so does leaving a `with` block."""

    def __init__(self) -> None:
        _served.add(self)

    def undo(self) -> None:
        """Let flash-linear-attention run as before, if no other call of `fla_on_cpu` is left to undo.

        A second call does nothing.
        """
        _served.discard(self)

    def __enter__(self) -> "ServedFLA":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def fla_on_cpu() -> ServedFLA:
    """Let layers of flash-linear-attention (fla 0.6) run on a CPU, in training and in evaluation.

        mnemos.fla_on_cpu()                   # for good
        with mnemos.fla_on_cpu():             # or for a while
            y, _, _ = fla.layers.GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=16)(x)

    Their kernels are Triton's, which fail on a CPU. This registers a backend in fla's own registry that takes tensors
    on a CPU: `chunk_gated_delta_rule`, `chunk_kda` and `fused_recurrent_kda_fwd` (`mnemos.ops.delta_rule`), the
    functions of `ShortConvolution` (`mnemos.ops.short_convolution`), and in PyTorch those of norms, SwiGLU and fused
    cross entropies. So `fla.layers.GatedDeltaNet` and `KimiDeltaAttention` run, fla's models of them
    (`GatedDeltaNetForCausalLM`, `KDAForCausalLM`), and models of Transformers that call fla.
    `fused_recurrent_gated_delta_rule_fwd`, which GatedDeltaNet calls without gradients up to 64 tokens, is not in the
    registry: it is replaced in its module.

    Not served are norms fused with a product, a residual of the gated norm or the convolution, context parallelism,
    CUDA graphs, and other layers. Tensors on a GPU run fla's kernels.

    It imports fla, which takes seconds. Raises InputError if fla is missing, has no registry, or was imported with
    FLA_DISABLE_BACKEND_DISPATCH=1.
    """
    _register()
    return ServedFLA()


def _delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` (g [B, T, H]) and `chunk_kda` (g [B, T, H, D])."""
    if use_gate_in_kernel and g is not None:
        g = _decay(g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = beta.float().sigmoid() * (2 if allow_neg_eigval else 1)
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    s = initial_state.mT if initial_state is not None and state_v_first else initial_state
    if cu_seqlens is None:
        y, end = delta_rule(q, k, v, beta, g, s, scale=scale)
    elif s is None and not output_final_state:
        y, end = delta_rule(q, k, v, beta, g, scale=scale, resets=starts(v, cu_seqlens))
    else:
        parts = []
        for n, (a, b) in enumerate(_pieces(cu_seqlens)):
            decay = None if g is None else g[:, a:b]
            parts.append(delta_rule(q[:, a:b], k[:, a:b], v[:, a:b], beta[:, a:b], decay, _row(s, n), scale=scale))
        y, end = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
    if not output_final_state:
        return y, None
    return y, end.mT.contiguous() if state_v_first else end


def _decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The logarithm of the decay: −e^A softplus(g + b), or with a lower bound L ≤ g: L σ(e^A (g + b))."""
    g = g.float() if dt_bias is None else g.float() + dt_bias.float().view(g.shape[2:])
    rate = 1.0 if A_log is None else A_log.float().exp().view(-1, *[1] * (g.dim() - 3))
    return -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)


def _pieces(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(cu_seqlens.tolist()))


def _row(state: Tensor | None, n: int) -> Tensor | None:
    return None if state is None else state[n : n + 1]


def _fused_gated(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, *, beta: Tensor, A_log: Tensor | None = None, **rest: Any
) -> tuple[Tensor, Tensor | None]:
    return _delta(q, k, v, g, beta, A_log=A_log, use_gate_in_kernel=A_log is not None, **rest)


def _fused_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, inplace_final_state: bool = True, **rest: Any
) -> tuple[Tensor, Tensor | None]:
    if not inplace_final_state:
        return _delta(q, k, v, g, beta, **rest)
    y, end = _delta(q, k, v, g, beta, **rest | {"output_final_state": True})
    return y, rest["initial_state"].copy_(end)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, Tensor | None]:
    """`causal_conv1d_fwd`: y [B, T, C], and the last W inputs [N, C, W]."""
    activation = "silu" if activation == "swish" else activation
    window = None if initial_state is None else initial_state[..., 1:].mT
    if cu_seqlens is None:
        y, _ = short_convolution(x, weight, bias, window, activation=activation)
    elif window is None:
        y, _ = short_convolution(x, weight, bias, resets=starts(x, cu_seqlens), activation=activation)
    else:
        y = torch.cat([
            short_convolution(x[:, a:b], weight, bias, window[n : n + 1], activation=activation)[0]
            for n, (a, b) in enumerate(_pieces(cu_seqlens))
        ], 1)  # fmt: skip
    return y, _last(x, weight.shape[1], initial_state, cu_seqlens) if output_final_state else None


def _last(x: Tensor, state_len: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
    """`causal_conv1d_update_states`: the last inputs of each sequence, [N, C, state_len]."""
    if cu_seqlens is not None:
        pieces = [_last(x[:, a:b], state_len, _row(initial_state, n)) for n, (a, b) in enumerate(_pieces(cu_seqlens))]
        return torch.cat(pieces)
    before = x.new_zeros(x.shape[0], x.shape[2], state_len) if initial_state is None else initial_state.to(x.dtype)
    return torch.cat([before, x.mT], -1)[..., x.shape[1] :]


def _convolve_backward(
    x: Tensor,
    dy: Tensor,
    dht: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor | None, ...]:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> list[Tensor]:
        options: dict[str, Any] = {"initial_state": state, "activation": activation, "cu_seqlens": cu_seqlens}
        y, end = _convolve(x, weight, bias, output_final_state=dht is not None, **options)
        return [y] if end is None else [y, end]

    dx, dw, db, ds = gradients(forward, (x, weight, bias, initial_state), [dy] if dht is None else [dy, dht])
    return dx, dw, db, None, ds


def _convolve_token(
    x: Tensor, cache: Tensor, *, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **no: Any
) -> tuple[Tensor, Tensor]:
    """`causal_conv1d_update`: one token a sequence. cache [N, C, W] is written."""
    tokens = x.reshape(cache.shape[0], 1, -1)
    y, _ = _convolve(tokens, weight, bias, initial_state=cache, activation=activation)
    cache.copy_(_last(tokens, cache.shape[2], cache))
    return y.view(x.shape), cache


def _verifier(function: Callable[..., Any], computes: Callable[..., Any]) -> Callable[..., tuple[bool, str | None]]:
    """Whether the function computes a call, and why not. It gets the arguments of the call, as fla's registry has it.

    computes: the function that takes the arguments that it hands on.
    """
    names = list(inspect.signature(function).parameters)
    known = {*names, *inspect.signature(computes).parameters, *_IGNORED}
    dims = {"beta": 3} | ({"x": 3} if computes is _convolve else {})

    def verify(*args: Any, **given: Any) -> tuple[bool, str | None]:
        given |= dict(zip(names, args, strict=False))
        for name, x in given.items():
            if isinstance(x, Tensor) and x.device.type != "cpu":
                return False, "the tensors are not on a CPU"
            if name not in known and x is not None and x is not False:
                return False, f"{name} is not served on a CPU"
            if name in dims and (x is None or x.dim() != dims[name]):
                return False, f"expected {name} with {dims[name]} dimensions"
        if given.get("cu_seqlens") is not None and given[names[0]].shape[0] != 1:
            return False, "cu_seqlens is for one row"
        return True, None

    return verify


@functools.cache
def _register() -> None:
    """Register a backend, available while `_served` is not empty, and let the one function outside call it too."""
    try:
        libraries.transformers()  # which fla imports
        backends, fused, kda, convolution, gated, norm, glu, loss, linear = map(importlib.import_module, _MODULES)
        libraries.tell_untested("fla", importlib.import_module("fla").__version__)
        base, register = backends.BaseBackend, backends.register
        theirs = getattr(fused, _FUSED)
        functions: dict[Any, dict[str, Any]] = {
            "gated_delta_rule": {"chunk_gated_delta_rule": (_delta, _delta)},
            "kda": {"fused_recurrent_kda_fwd": (_fused_kda, _delta)},
            kda.chunk_kda: {"chunk_kda": (_delta, _delta)},
            convolution.causal_conv1d_fwd: {"causal_conv1d_fwd": (_convolve, _convolve)},
            convolution.causal_conv1d_bwd: {"causal_conv1d_bwd": (_convolve_backward, _convolve)},
            convolution.causal_conv1d_update: {"causal_conv1d_update": (_convolve_token, _convolve_token)},
            convolution.causal_conv1d_update_states: {"causal_conv1d_update_states": (_last, _last)},
            gated.layer_norm_gated_fwd: {"layer_norm_gated_fwd": (gated_norm, gated_norm_of)},
            gated.layer_norm_gated_bwd: {"layer_norm_gated_bwd": (gated_norm_gradients, gated_norm_of)},
            norm.layer_norm_fwd: {"layer_norm_fwd": (norm_of, norm_of)},
            norm.layer_norm_bwd: {"layer_norm_bwd": (norm_gradients, norm_gradients)},
            glu.swiglu_fwd: {"swiglu_fwd": (swiglu, swiglu)},
            glu.swiglu_fwdbwd: {"swiglu_fwdbwd": (swiglu_gradients, swiglu_gradients)},
            loss.cross_entropy_fwd: {"cross_entropy_fwd": (cross_entropy, cross_entropy)},
            loss.cross_entropy_bwd: {"cross_entropy_bwd": (cross_entropy_gradients, cross_entropy_gradients)},
            linear.fused_linear_cross_entropy_bwd: {"fused_linear_cross_entropy_bwd": (times, times)},
        }
    except ModuleNotFoundError as error:
        if error.name == "fla":
            raise InputError(
                "expected the library fla, found that it is not installed; run: pip install flash-linear-attention"
            ) from None
        if not (error.name or "").startswith("fla."):
            raise
        raise _other_fla(str(error)) from error
    except AttributeError as error:
        raise _other_fla(str(error)) from error
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        raise InputError("expected fla's registry, found FLA_DISABLE_BACKEND_DISPATCH=1; start without it")
    for place, row in functions.items():
        made: dict[str, Any] = {"backend_type": "mnemos", "priority": -1, "is_available": staticmethod(_is_served)}
        for name, (function, computes) in row.items():
            made |= {name: staticmethod(function), f"{name}_verifier": staticmethod(_verifier(function, computes))}
        register(place)(type("MnemosBackend", (base,), made))
    verify = _verifier(_fused_gated, _delta)

    @functools.wraps(theirs)
    def fused_recurrent(*args: Any, **given: Any) -> Any:
        return (_fused_gated if _served and verify(*args, **given)[0] else theirs)(*args, **given)

    setattr(fused, _FUSED, fused_recurrent)


def _is_served() -> bool:
    return bool(_served)


def _other_fla(found: str) -> InputError:
    return InputError(f"expected the registry of fla 0.6, found another version ({found}); install that one")
