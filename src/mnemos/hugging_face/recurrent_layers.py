"""The recurrent layers of Transformers whose step is known: Mamba, gated delta rules, Griffin, xLSTM and RWKV.

Their own code writes states in place, lets padding change them, and in part ignores the given state for several tokens.
Here each layer is a step from a state to a state, with their weights. `add_steps` makes a layer's forward that step.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mnemos.attention.recurrent import unit
from mnemos.ops import decayed_attention, delta_rule, selective_scan, short_convolution

from .functional_cache import FunctionalCache, join_tokens

CHUNK = 64  # tokens that are computed at once: matrices of CHUNK × CHUNK per head
_LEAST = 2.5e-7  # of Griffin's 1 − a²: the derivative of its root is then at most 1000, as in the authors' code


class MambaState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, C, N]; in Mamba-2 [B, H, N, D]. float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "state space"


def mamba(layer: Any, cache: FunctionalCache, x: Tensor) -> Tensor:
    """The selective state space model (Gu & Dao 2023, Algorithm 2), x [B, T, D] -> y [B, T, D].

    h_t = e^{Δ_t A} h_{t−1} + Δ_t B_t u_t, y_t = C_t h_t + D u_t, of channels u after a convolution. FalconMamba and
    Jamba normalise Δ, B and C. Cost O(T·C·N).
    """
    given = cache.take()
    inner, gate = layer.in_proj(x).chunk(2, -1)
    activation = layer.activation if layer.activation == "silu" else None
    u, window = convolve(inner, given and given.window, layer.conv1d, cache, activation)
    u = u if activation else layer.act(u)
    sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
    rank, b, c = _normalise(layer, layer.x_proj(u).split(sizes, -1))
    wide = memory_dtype(x)
    step, a = F.softplus(layer.dt_proj(rank).to(wide)), -layer.A_log.to(wide).exp()
    y, h = selective_scan(u.to(wide), step, a, b, c, layer.D, given and given.memory, valid_tokens(x, cache))
    cache.new.append(MambaState(window, h))
    return layer.out_proj((y * F.silu(gate.to(wide))).to(x.dtype))


def _normalise(layer: Any, parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Δ, B and C as the layer normalises them; FalconMamba's norms have no weight that counts."""
    if not hasattr(layer, "dt_layernorm"):
        return list(parts)
    norms = layer.dt_layernorm, layer.b_layernorm, layer.c_layernorm
    weighted = hasattr(norms[0], "variance_epsilon")
    return [
        rms(x, norm.variance_epsilon, norm.weight).to(x.dtype) if weighted else rms(x, norm.eps).to(x.dtype)
        for x, norm in zip(parts, norms, strict=True)
    ]


def mamba2(layer: Any, cache: FunctionalCache, x: Tensor) -> Tensor:
    """State space duality (Dao & Gu 2024): one decay per head and token. x [B, T, D] -> y [B, T, D]."""
    given = cache.take()
    gate, inner, step = layer.in_proj(x).split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    activation = layer.activation if layer.activation == "silu" else None
    inner, window = convolve(inner, given and given.window, layer.conv1d, cache, activation)
    inner = inner if activation else layer.act(inner)
    groups, n, wide = layer.n_groups, layer.ssm_state_size, memory_dtype(x)
    u, b, c = inner.to(wide).split([layer.intermediate_size, groups * n, groups * n], -1)
    u = u.unflatten(-1, (layer.num_heads, -1))
    b, c = (z.unflatten(-1, (groups, n)) for z in (b, c))
    step = F.softplus(step.to(wide) + layer.dt_bias).clamp(*layer.time_step_limit)
    h, decay = given and given.memory.to(wide), -step * layer.A_log.to(wide).exp()
    y, h = decayed_attention(c, b, u * step[..., None], decay, h, valid_tokens(x, cache), scale=1.0)
    y = torch.addcmul(y, u, layer.D[:, None].to(wide)).flatten(2) * F.silu(gate.to(wide))
    y = rms(y.unflatten(-1, (-1, layer.norm.group_size)), layer.norm.variance_epsilon).flatten(2) * layer.norm.weight
    cache.new.append(MambaState(window, h))
    return layer.out_proj(y.to(x.dtype))


class DeltaState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, H, D, M], float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "gated delta"


def gated_delta(layer: Any, cache: FunctionalCache, x: Tensor) -> Tensor:
    """Gated DeltaNet (Yang, Kautz & Hatamizadeh 2024), x [B, T, D] -> y [B, T, D]; keys and queries of length 1."""
    given = cache.take()
    inner, gate, strength, rate = _project_delta(layer, x)
    inner, window = convolve(inner, given and given.window, layer.conv1d, cache, "silu")
    wide = memory_dtype(x)
    q, k, v = inner.to(wide).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    q, k = (unit(z.unflatten(-1, (layer.num_k_heads, -1))) for z in (q, k))
    v = v.unflatten(-1, (layer.num_v_heads, -1))
    decay = -layer.A_log.to(wide).exp() * F.softplus(rate.to(wide) + layer.dt_bias)
    s = given and given.memory.to(wide)
    y, s = delta_rule(q, k, v, strength, decay, s, valid_tokens(x, cache))
    cache.new.append(DeltaState(window, s))
    norm, output = (layer.o_norm, layer.o_proj) if hasattr(layer, "o_norm") else (layer.norm, layer.out_proj)
    y = rms(y, norm.variance_epsilon, norm.weight) * F.silu(gate.to(wide))
    return output(y.flatten(2).to(x.dtype))


def _project_delta(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as one tensor; the output gate [B, T, H, M]; β and the decay's logits [B, T, H]."""
    if hasattr(layer, "in_proj_qkvz"):  # Qwen3-Next
        q, k, v, gate, beta, rate = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        return torch.cat([z.flatten(2) for z in (q, k, v)], -1), gate, beta.sigmoid(), rate
    if hasattr(layer, "in_proj_qkv"):  # Qwen3.5
        inner, gate, beta, rate = (p(x) for p in (layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
        beta = beta.sigmoid()
    else:  # OLMo Hybrid, where β may be up to 2
        inner = torch.cat([p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj)], -1)
        gate, rate = layer.g_proj(x), layer.a_proj(x)
        beta = layer.b_proj(x).sigmoid() * (2.0 if layer.allow_neg_eigval else 1.0)
    return inner, gate.unflatten(-1, (layer.num_v_heads, -1)), beta, rate


class GriffinState(NamedTuple):
    """window [B, K − 1, C]: the last inputs of the convolution. memory [B, C], float32."""

    window: Tensor
    memory: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "RG-LRU"


def recurrent_block(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, None]:
    """Griffin's recurrent block (De et al. 2024, §2.4), x [B, T, D] -> y [B, T, D], in a loop over tokens.

    h_t = a_t·h_{t−1} + √(1 − a_t²)·(i_t·u_t) with log a_t = −8·softplus(Λ)·r_t and gates i, r; the first token of a row
    is not scaled.
    """
    given, unit = cache.take(), layer.rg_lru
    u, window = convolve(layer.linear_x(x), given and given.window, layer.conv_1d, cache)
    heads = u.unflatten(-1, (unit.num_attention_heads, -1))
    wide = memory_dtype(x)
    enters = _gate(heads, unit.input_gate_weight, unit.input_gate_bias)
    decays = _gate(heads, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_a = -8.0 * decays.to(wide) * F.softplus(unit.recurrent_param.to(wide))
    first = (cache.positions == 0).to(x.device)[..., None]
    scale = torch.where(first, 1.0, (-torch.expm1(2 * log_a)).clamp(min=_LEAST).sqrt())
    a = mask_padding(log_a, cache).exp()
    new = mask_padding((u * enters).to(wide) * scale, cache)
    h = new.new_zeros(len(x), new.shape[-1]) if given is None else given.memory.to(wide)
    outputs = []
    for t in range(x.shape[1]):
        h = a[:, t] * h + new[:, t]
        outputs.append(h)
    cache.new.append(GriffinState(window, h))
    y = torch.stack(outputs, 1).to(x.dtype) * layer.act_fn(layer.linear_y(x))
    return layer.linear_out(y), None


def _gate(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """σ(W u + b), one matrix per head: [B, T, H, C] -> [B, T, H·C]."""
    return torch.sigmoid(torch.einsum("bthc,hcd->bthd", heads, weight) + bias).flatten(2)


class MatrixState(NamedTuple):
    """memory [B, H, D, M + 1]: the cell, and the normaliser as its last column, times e^{−top}. top [B, H]. float32."""

    memory: Tensor
    top: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "mLSTM"


def matrix_lstm(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, FunctionalCache]:
    """The mLSTM (Beck et al. 2024, eqs. 19 to 27), x [B, T, D] -> y [B, T, D].

    h_t = C_tᵀq_t / max(|n_tᵀq_t|, 1): with a column of ones in the values, the normaliser n is a column of C.
    """
    given, config = cache.take(), layer.config
    q, k, v, gate, write, keep = _project_matrix(layer, x)
    wide, heads = memory_dtype(x), config.num_heads
    q, k, v = (z.to(wide).unflatten(-1, (heads, -1)) for z in (q, k, v))
    v = F.pad(v, (0, 1), value=1.0)
    cap = config.gate_soft_cap
    write, keep = (z.to(wide) if cap is None else cap * torch.tanh(z.to(wide) / cap) for z in (write, keep))
    if given is None:
        memory, top = v.new_zeros(len(x), heads, k.shape[-1], v.shape[-1]), v.new_zeros(len(x), heads)
    else:
        memory, top = given.memory.to(wide), given.top.to(wide)
    keep, write = mask_padding(F.logsigmoid(keep), cache), mask_padding(write, cache, -torch.inf)
    y, m, memory, top = run_stabilised(q * q.shape[-1] ** -0.5, k, v, keep, write, memory, top)
    cache.new.append(MatrixState(memory, top))
    y = y[..., :-1] / (torch.maximum(y[..., -1].abs(), (-m).exp()) + config.eps)[..., None]
    y = layer.multihead_norm(y.to(x.dtype)).flatten(2)
    return layer.out_proj(layer.ogate_act_fn(gate) * y.to(x.dtype)), cache


def _project_matrix(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """q, k, v, the output gate, and the logits of the input and forget gates, of either layout of weights."""
    if layer.config.weight_mode == "single":
        return tuple(
            p(x) for p in (layer.q, layer.k, layer.v, layer.ogate_preact, layer.igate_preact, layer.fgate_preact)
        )
    sizes = [layer.qk_dim, layer.qk_dim, layer.v_dim, layer.v_dim]
    return *layer.qkv_opreact(x).split(sizes, -1), *layer.ifgate_preact(x).chunk(2, -1)


class TimeMixState(NamedTuple):
    """last [B, 1, D]: the last input. weighted, weights, top [B, C]: sums Σ e^{k−m}·v and Σ e^{k−m}, and m; float32."""

    last: Tensor
    weighted: Tensor
    weights: Tensor
    top: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "RWKV"


class ChannelMixState(NamedTuple):
    """last [B, 1, D]: the last input."""

    last: Tensor


def _mix_shifted(
    x: Tensor, last: Tensor | None, cache: FunctionalCache, *shares: Tensor
) -> tuple[list[Tensor], Tensor]:
    """μ·x_t + (1 − μ)·x_{t−1} for every μ of `shares`, and the last input."""
    last = x.new_zeros(len(x), 1, x.shape[-1]) if last is None else last.to(x.dtype)
    joined = join_tokens(last, x, cache.padding)
    return [x * share + joined[:, :-1] * (1 - share) for share in shares], joined[:, -1:].clone()


def time_mix(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, FunctionalCache]:
    """The WKV recurrence (Peng et al. 2023, eqs. 16 to 22): x [B, T, D] -> y [B, T, D], in a loop over tokens."""
    given = cache.take()
    shares = layer.time_mix_key, layer.time_mix_value, layer.time_mix_receptance
    (key, value, receptance), last = _mix_shifted(x, given and given.last, cache, *shares)
    wide = memory_dtype(x)
    k, v = layer.key(key).to(wide), layer.value(value).to(wide)
    first, decay = layer.time_first.to(wide), -layer.time_decay.to(wide).exp()
    a, b, top = [k.new_zeros(len(x), k.shape[-1])] * 3 if given is None else [z.to(wide) for z in given[1:]]
    top = top.masked_fill((cache.seen == 0).to(top.device)[:, None], -1e38)  # new rows have no largest key
    valid = None if cache.valid is None else cache.valid.to(x.device)[..., None]
    outputs = []
    for t in range(x.shape[1]):
        m = torch.maximum(top, first + k[:, t])
        old, now = (top - m).exp(), (first + k[:, t] - m).exp()
        outputs.append((old * a + now * v[:, t]) / (old * b + now))
        m = torch.maximum(top + decay, k[:, t])
        old, now = (top + decay - m).exp(), (k[:, t] - m).exp()
        new = old * a + now * v[:, t], old * b + now, m
        if valid is not None:
            a, b, top = (torch.where(valid[:, t], z, before) for z, before in zip(new, (a, b, top), strict=True))
        else:
            a, b, top = new
    cache.new.append(TimeMixState(last, a, b, top))
    y = torch.stack(outputs, 1).to(x.dtype)
    return layer.output(torch.sigmoid(layer.receptance(receptance)) * y), cache


def channel_mix(layer: Any, cache: FunctionalCache, x: Tensor) -> tuple[Tensor, FunctionalCache]:
    """σ(r)·W_v max(k, 0)² of inputs that are mixed with the one before: x [B, T, D] -> y [B, T, D]."""
    given = cache.take()
    shares = layer.time_mix_key, layer.time_mix_receptance
    (key, receptance), last = _mix_shifted(x, given and given.last, cache, *shares)
    cache.new.append(ChannelMixState(last))
    return torch.sigmoid(layer.receptance(receptance)) * layer.value(layer.key(key).relu().square()), cache


def memory_dtype(x: Tensor) -> torch.dtype:
    """float32 at least: half precision does not hold a long sum."""
    return torch.promote_types(x.dtype, torch.float32)


def convolve(
    x: Tensor, window: Tensor | None, conv: Any, cache: FunctionalCache, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """A depthwise causal convolution of x [B, T, C] and the last K − 1 inputs, which are the next window.

    conv: an nn.Conv1d of kernel K with C groups. window [B, K − 1, C]: zeros in new rows; None: a first call.
    """
    window = window if window is None else window.to(x.dtype)
    return short_convolution(x, conv.weight[:, 0], conv.bias, window, valid_tokens(x, cache), activation=activation)


def valid_tokens(x: Tensor, cache: FunctionalCache) -> Tensor | None:
    """[B, T] bool: which tokens of the call are no padding; None: all."""
    return None if cache.valid is None else cache.valid.to(x.device)


def mask_padding(x: Tensor, cache: FunctionalCache, value: float = 0.0) -> Tensor:
    """x [B, T, ..] with `value` at padding, in memory's type."""
    x = x.to(memory_dtype(x))
    valid = valid_tokens(x, cache)
    return x if valid is None else x.masked_fill(~valid.view(*valid.shape, *[1] * (x.dim() - 2)), value)


def rms(x: Tensor, eps: float, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x / √(mean x² + ε) over the last axis, times a weight; computed in `dtype`, by default memory's type."""
    wide = x.to(dtype or memory_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def _split(*tensors: Tensor) -> list[list[Tensor]]:
    """Chunks of tensors [B, T, H, ..] with the heads first, [B, H, CHUNK, ..]."""
    return [list(part) for part in zip(*(x.transpose(1, 2).split(CHUNK, 2) for x in tensors), strict=True)]


def _weigh(row: Tensor, column: Tensor) -> Tensor:
    """e^{row_t + column_j} for j ≤ t, else 0: [.., T, T] of two [.., T]."""
    t = row.shape[-1]
    past = torch.ones(t, t, dtype=torch.bool, device=row.device).tril()
    return (row[..., :, None] + column[..., None, :]).masked_fill(~past, -torch.inf).exp()


def run_stabilised(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, log_write: Tensor, memory: Tensor, top: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S_t = f_t·S_{t−1} + i_t·k_t v_tᵀ, kept as S·e^{−m} with m_t = max(log f_t + m_{t−1}, log i_t): the mLSTM.

    Beck et al. 2024, eqs. 19 to 27. log_write: log i [B, T, H], −inf writes nothing; top: m [B, H]. Returns
    q_tᵀS_t·e^{−m_t} [B, T, H, M], all m_t [B, T, H], and the new S·e^{−m} and m.
    """
    outputs, tops = [], []
    for q_c, k_c, v_c, decay_c, write in _split(q, k, v, log_decay, log_write):
        g = decay_c.cumsum(-1)
        m = g + torch.maximum(top[..., None], (write - g).cummax(-1).values)
        scores = (q_c @ k_c.mT) * _weigh(g - m, write - g)
        outputs.append((g + top[..., None] - m).exp()[..., None] * (q_c @ memory) + scores @ v_c)
        tops.append(m)
        last = (g[..., -1:] - g + write - m[..., -1:]).exp()[..., None]
        keep = (g[..., -1] + top - m[..., -1]).exp()[..., None, None]
        memory, top = keep * memory + (k_c * last).mT @ v_c, m[..., -1]
    return torch.cat(outputs, 2).transpose(1, 2), torch.cat(tops, 2).transpose(1, 2), memory, top


Step = Callable[..., Any]  # (layer, cache, its input x) -> what the layer's forward returns
STEPS: dict[str, Step] = {
    "MambaMixer": mamba,
    "FalconMambaMixer": mamba,
    "JambaMambaMixer": mamba,
    "Mamba2Mixer": mamba2,
    "BambaMixer": mamba2,
    "GraniteMoeHybridMambaLayer": mamba2,
    "NemotronHMamba2Mixer": mamba2,
    "Zamba2MambaMixer": mamba2,
    "Qwen3NextGatedDeltaNet": gated_delta,
    "Qwen3_5GatedDeltaNet": gated_delta,
    "Qwen3_5MoeGatedDeltaNet": gated_delta,
    "OlmoHybridGatedDeltaNet": gated_delta,
    "RwkvSelfAttention": time_mix,
    "RwkvFeedForward": channel_mix,
    "RecurrentGemmaRecurrentBlock": recurrent_block,
    "xLSTMLayer": matrix_lstm,
}


def add_steps(model: nn.Module) -> None:
    """Let the recurrent layers of a model run the step of `STEPS` when they are called with a `FunctionalCache`.

    With any other cache, and with none, a layer runs its own forward. The forward of the class is wrapped, once per
    process: instances stay as they are, so copies, pickles, hooks and threads need no care. The layers' own forwards
    cannot serve, whatever their arguments: they change states in place, and padding changes the states.
    """
    for kind in {of for layer in model.modules() for of in type(layer).__mro__}:
        if kind.__name__ in STEPS and kind.__module__.startswith("transformers.") and "_functional" not in vars(kind):
            _dispatch(kind, STEPS[kind.__name__])


def _dispatch(kind: Any, step: Step) -> None:
    theirs = kind.forward

    @functools.wraps(theirs)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        cache = next((x for x in (*args, *options.values()) if isinstance(x, FunctionalCache)), None)
        if cache is None:
            return theirs(self, *args, **options)
        return step(self, cache, args[0] if args else options["hidden_states"])

    kind.forward, kind._functional = forward, True
