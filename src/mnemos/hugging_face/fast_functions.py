"""What `fast` puts in place of the functions that recurrent layers of Transformers call.

Each has the name of its counterpart there, and its parameters; `state_space` is what those of Mamba-2 share.
Keyword-only is what layers pass besides, and what `functional` adds: `valid` [B, T], the tokens that count, and a
state where Transformers takes none. None in place of a result: Transformers' own function has to compute it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mnemos.ops import decayed_attention, delta_rule, selective_scan, short_convolution

Function = Callable[..., Any]
_UNLIMITED = (0.0, float("inf"))


# --- short convolutions ---


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    **ignored: Any,
) -> Tensor | None:
    """y [B, C, T] of inputs [B, C, T] and W taps a channel, weights [C, W]."""
    if not _can_convolve(hidden_states, weight, activation):
        return None
    x = hidden_states.mT
    return short_convolution(x, weight, bias, resets=_first_tokens(x, seq_idx), activation=activation)[0].mT


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | None:
    """y [B, C, T] of inputs [B, C, T] after the last K, conv_state [B, C, K], which is written.

    W − 1 of the K are read: Transformers keeps W inputs.
    """
    if not _can_convolve(hidden_states, weight, activation) or conv_state.dtype is not hidden_states.dtype:
        return None
    window = conv_state[..., conv_state.shape[-1] - weight.shape[1] + 1 :].mT
    y, _ = short_convolution(hidden_states.mT, weight, bias, window, activation=activation)
    conv_state.copy_(torch.cat([conv_state, hidden_states], -1)[..., hidden_states.shape[-1] :])
    return y.mT


def _can_convolve(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    return weight.dtype is x.dtype and 2 <= weight.shape[1] <= 8 and activation in (None, "silu")


# --- the delta rule with a decay per head or channel, in chunks or token by token: one operator ---


def torch_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
    valid: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, Tensor | None]:
    """y [B, T, H, M] of queries and keys [B, T, H or fewer, D], and the state [B, H, D, M]."""
    resets = None
    if cu_seqlens is not None:  # the ends of N sequences, some perhaps empty, in one row: [N + 1]
        resets = torch.zeros(value.shape[:2], dtype=torch.bool)
        resets[:, cu_seqlens[:-1][cu_seqlens.diff() > 0].long()] = True
    if use_qk_l2norm_in_kernel:
        query, key = (_wide(x) for x in (query, key))
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    y, end = delta_rule(query, key, value, beta, g, initial_state, valid, resets=resets)
    return y, end if output_final_state else None


# --- the state-space duality of Mamba-2: decayed attention with queries C, keys B and values dt·x ---


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
    *,
    seq_idx: Tensor | None = None,
    **ignored: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """y [B, T, H, P], and the state [B, H, P, N]."""
    state, resets = None if initial_states is None else initial_states.mT, _first_tokens(hidden_states, seq_idx)
    y, end = state_space(
        hidden_states, dt, A, B, C, chunk_size, D, dt_bias, dt_softplus, dt_limit, initial_state=state, resets=resets
    )
    return (y, end.mT.contiguous()) if return_final_states else y


def state_space(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _UNLIMITED,
    *,
    initial_state: Tensor | None = None,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, P], and the state [B, H, N, P] as `decayed_attention` has it.

    `functional` calls it in place of mamba2_chunk_scan, so it takes a chunk_size, which it does not read.
    """
    dt = _step_sizes(dt, dt_bias, dt_softplus)
    changes_nothing = tuple(dt_limit) == _UNLIMITED and dt_softplus  # a softplus is above 0 already
    dt = _wide(dt if changes_nothing else dt.clamp(*dt_limit))
    x = _wide(hidden_states)
    y, end = decayed_attention(
        _wide(C), _wide(B), x * dt[..., None], A * dt, initial_state, valid, scale=1.0, resets=resets
    )
    return (y if D is None else torch.addcmul(y, x, _wide(D)[..., None])), end


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
) -> Tensor | None:
    """One token. state [B, H, P, N] is written. dt and A are of one number a head, expanded."""
    if dt.stride(-1) or A.stride()[1:] != (0, 0) or state.dtype is not torch.float32:
        return None
    D, dt_bias = None if D is None else D[:, 0], None if dt_bias is None else dt_bias[:, 0]
    x, B, C = (part[:, None] for part in (hidden_states, B, C))
    dt, A = dt[:, None, :, 0], A[:, 0, 0]
    y, end = state_space(x, dt, A, B, C, 1, D, dt_bias, dt_softplus, initial_state=state.mT)
    state.copy_(end.mT)
    return _gated(y[:, 0], z).to(hidden_states.dtype)


# --- the selective scan of Mamba-1 ---


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
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    *,
    initial_state: Tensor | None = None,
    valid: Tensor | None = None,
    **ignored: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """y [B, C, T], from zeros in Transformers, and the state [B, C, N]."""
    steps = _wide(_step_sizes(dt.mT.contiguous(), delta_bias, delta_softplus))  # contiguous: as the kernel reads them
    y, end = selective_scan(_wide(hidden_states.mT), steps, A, B.mT, C.mT, D, initial_state, valid)
    y = _gated(y, None if z is None else z.mT).mT
    return (y, end) if return_last_state else y


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
    """One token. state [B, C, N] is written."""
    steps = _step_sizes(dt, dt_bias, dt_softplus).float()[:, None]
    y, end = selective_scan(hidden_states[:, None].float(), steps, A, B[:, None], C[:, None], D, state)
    state.copy_(end)
    return _gated(y[:, 0], z).to(hidden_states.dtype)


# --- what several of them do ---


def _first_tokens(x: Tensor, seq_idx: Tensor | None) -> Tensor | None:
    """[B, T] bool, the first tokens of packed sequences: where their number seq_idx [B, T] changes."""
    if seq_idx is None:
        return None
    return F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0), value=True).expand(x.shape[0], -1)


def _step_sizes(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """dt + bias, through a softplus if wanted. As in Transformers, the bias is rounded to the type of dt first."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _gated(y: Tensor, z: Tensor | None) -> Tensor:
    return y if z is None else y * F.silu(z)


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: half precision does not hold a long sum."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


# --- which of Transformers' functions they replace ---

FUNCTIONS: dict[str, Function] = {
    function.__name__: function
    for function in (
        causal_conv1d_fn,
        causal_conv1d_update,
        torch_chunk_gated_delta_rule,
        mamba2_chunk_scan,
        mamba2_selective_state_update,
        mamba_selective_scan,
        mamba_selective_state_update,
    )
}
DELTA = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention",
)  # fmt: skip
FUNCTIONS |= dict.fromkeys(DELTA, torch_chunk_gated_delta_rule)


def replacement_for(name: str, theirs: Function) -> Function:
    """The function of this library where the kernels compute it, and Transformers' elsewhere."""
    ours = FUNCTIONS[name]

    def replacement(*args: Any, **options: Any) -> Any:
        # The first two are tokens, or a state and tokens. Exported graphs keep the operations of PyTorch.
        for x in (*args, *options.values())[:2]:
            if not x.is_cpu or x.dtype is torch.float64 or torch.compiler.is_exporting():
                return theirs(*args, **options)
        y = ours(*args, **options)
        return theirs(*args, **options) if y is None else y

    return replacement


def unknown_parameters(name: str, theirs: Function) -> set[str]:
    """The parameters of Transformers' function that are not known here, and known ones that it lacks."""
    ours = inspect.signature(FUNCTIONS[name]).parameters.values()
    known = {x.name for x in ours if x.kind is x.POSITIONAL_OR_KEYWORD}
    needed = {x.name for x in inspect.signature(theirs).parameters.values() if x.kind is not x.VAR_KEYWORD}
    return (known ^ needed) - {"chunk_size"}  # it changes no result, and functions for single tokens have none
