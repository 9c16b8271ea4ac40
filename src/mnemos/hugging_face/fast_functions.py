"""What `fast` puts in place of the functions that recurrent layers of Transformers call, by their names there."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemos.attention.recurrent import unit
from mnemos.ops import decayed_attention, delta_rule, selective_scan, short_convolution
from mnemos.ops.rewind import note_as

Function = Callable[..., Any]
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNLIMITED = (0.0, float("inf"))


def _is_ours(x: Tensor) -> bool:
    """Whether the kernels compute it. Exported programs keep the operations of PyTorch, as in Transformers."""
    return x.device.type == "cpu" and x.dtype in _DTYPES and not torch.compiler.is_exporting()


def _starts(x: Tensor, seq_idx: Tensor | None) -> Tensor | None:
    """[B, T] bool, the first tokens of packed sequences: where their number seq_idx [B, T] changes."""
    if seq_idx is None:
        return None
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True).expand(x.shape[0], -1)


def starts(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[1, T] bool: the first tokens of N sequences, some perhaps empty, in x [1, T, ..]; cu_seqlens [N + 1]."""
    found = torch.zeros(x.shape[:2], dtype=torch.bool)
    found[:, cu_seqlens[:-1][cu_seqlens.diff() > 0].long()] = True
    return found


def _convolve(theirs: Function) -> Function:
    """y [B, C, T] of inputs [B, C, T] and weights [C, W]."""

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:
        if not _can_convolve(hidden_states, weight, activation):
            return theirs(hidden_states, weight, bias, activation, seq_idx=seq_idx, **ignored)
        x = hidden_states.mT
        return short_convolution(x, weight, bias, resets=_starts(x, seq_idx), activation=activation)[0].mT

    return causal_conv1d_fn


def _can_convolve(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    return _is_ours(x) and weight.dtype is x.dtype and 2 <= weight.shape[1] <= 8 and activation in (None, "silu")


def _convolve_on(theirs: Function) -> Function:
    """y [B, C, T] of inputs [B, C, T] after the last K, conv_state [B, C, K], which is written."""

    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        before = weight.shape[1] - 1
        if not _can_convolve(hidden_states, weight, activation) or conv_state.dtype is not hidden_states.dtype:
            return theirs(hidden_states, conv_state, weight, bias, activation)
        window = conv_state[..., conv_state.shape[-1] - before :].mT
        y, _ = short_convolution(hidden_states.mT, weight, bias, window, activation=activation)
        conv_state.copy_(torch.cat([conv_state, hidden_states], -1)[..., hidden_states.shape[-1] :])
        return y.mT

    return causal_conv1d_update


def _delta(theirs: Function) -> Function:
    """Chunks, one token after the other, a gate per head or per channel: one operator."""

    def delta(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not _is_ours(value):
            return theirs(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens, **ignored,
            )  # fmt: skip
        resets = None if cu_seqlens is None else starts(value, cu_seqlens)
        if use_qk_l2norm_in_kernel:
            query, key = unit(query), unit(key)
        y, end = delta_rule(query, key, value, beta, g, initial_state, resets=resets)
        return y, end if output_final_state else None

    return delta


def _scan(theirs: Function) -> Function:
    """The state-space duality of Mamba-2: decayed attention with queries C, keys B and values dt·x."""

    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = _UNLIMITED,
        return_final_states: bool = False,
        seq_idx: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not _is_ours(hidden_states):
            return theirs(
                hidden_states, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_states,
                dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states, seq_idx=seq_idx,
                **ignored,
            )  # fmt: skip
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = F.softplus(dt) if dt_softplus else dt
        dt = (dt if tuple(dt_limit) == _UNLIMITED and dt_softplus else dt.clamp(*dt_limit)).float()
        x = hidden_states.float()
        state = None if initial_states is None else initial_states.mT
        resets = _starts(x, seq_idx)
        y, end = decayed_attention(
            C.float(), B.float(), x * dt[..., None], A.float() * dt, state, scale=1.0, resets=resets
        )
        y = y if D is None else torch.addcmul(y, x, D[..., None].float())
        theirs_end = end.mT.contiguous()
        note_as(theirs_end, end, lambda x: x.mT.contiguous())
        return (y, theirs_end) if return_final_states else y

    return mamba2_chunk_scan


def _scan_on(theirs: Function) -> Function:
    """One token of Mamba-2. state [B, H, P, N] is written."""

    def mamba2_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:
        if not _is_ours(hidden_states) or dt.stride(-1) or A.stride()[1:] != (0, 0) or state.dtype is not torch.float32:
            return theirs(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **ignored)
        dt = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).float()
        x = hidden_states.float()
        decay = A[:, 0, 0].float() * dt
        y, end = decayed_attention(
            C[:, None].float(), B[:, None].float(), (x * dt[..., None])[:, None], decay[:, None], state.mT, scale=1.0
        )
        state.copy_(end.mT)
        y = y[:, 0] if D is None else torch.addcmul(y[:, 0], x, D.float())
        y = y if z is None else y * F.silu(z)
        return y.to(hidden_states.dtype)

    return mamba2_selective_state_update


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Steps in float32. As in Transformers, the bias is rounded to the type of dt first."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (F.softplus(dt) if softplus else dt).float()


def _gated(y: Tensor, z: Tensor | None) -> Tensor:
    return y if z is None else y * F.silu(z)


def _selective(theirs: Function) -> Function:
    """The scan of Mamba-1, from zeros: y [B, C, T], and the state [B, C, N]."""

    def mamba_selective_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **ignored: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if not _is_ours(hidden_states):
            return theirs(
                hidden_states, dt, A, B, C, D=D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus,
                return_last_state=return_last_state, **ignored,
            )  # fmt: skip
        steps = _steps(dt.mT.contiguous(), delta_bias, delta_softplus)  # of numbers in the order of the kernel
        y, end = selective_scan(hidden_states.mT.float(), steps, A, B.mT, C.mT, D)
        y = _gated(y, z if z is None else z.mT).mT
        # A view, which `rewindable` does not know: Transformers gives no state, so going back would lose the past.
        return (y, end.view_as(end)) if return_last_state else y

    return mamba_selective_scan


def _selective_on(theirs: Function) -> Function:
    """One token of Mamba-1. state [B, C, N] is written."""

    def mamba_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **ignored: Any,
    ) -> Tensor:
        if not _is_ours(hidden_states):
            return theirs(state, hidden_states, dt, A, B, C, D, dt_bias, dt_softplus, z, **ignored)
        steps = _steps(dt, dt_bias, dt_softplus)[:, None]
        y, end = selective_scan(hidden_states[:, None].float(), steps, A, B[:, None], C[:, None], D, state)
        state.copy_(end)
        return _gated(y[:, 0], z).to(hidden_states.dtype)

    return mamba_selective_state_update


_DELTA = "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel"
# The names of the functions, their parameters (but chunk_size), and what takes their place.
FUNCTIONS: dict[str, tuple[str, Callable[[Function], Function]]] = {
    "causal_conv1d_fn": ("hidden_states weight bias activation", _convolve),
    "causal_conv1d_update": ("hidden_states conv_state weight bias activation", _convolve_on),
    "torch_chunk_gated_delta_rule": (_DELTA, _delta),
    "torch_recurrent_gated_delta_rule": (_DELTA, _delta),
    "chunk_kimi_delta_attention": (_DELTA, _delta),
    "recurrent_kimi_delta_attention": (_DELTA, _delta),
    "mamba2_chunk_scan": (
        "hidden_states dt A B C D dt_bias initial_states dt_softplus dt_limit return_final_states", _scan,
    ),
    "mamba2_selective_state_update": ("state hidden_states dt A B C D dt_bias dt_softplus z", _scan_on),
    "mamba_selective_scan": (
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state use_mambapy use_associative_scan",
        _selective,
    ),
    "mamba_selective_state_update": ("state hidden_states dt A B C D dt_bias dt_softplus z", _selective_on),
}  # fmt: skip


def unknown_parameters(name: str, theirs: Function) -> set[str]:
    """The parameters of Transformers' function that are not known here, and known ones that it lacks."""
    found = {x.name for x in inspect.signature(theirs).parameters.values() if x.kind is not x.VAR_KEYWORD}
    return (found ^ set(FUNCTIONS[name][0].split())) - {"chunk_size"}
