"""Layers that forget and correct: the delta rule, gated linear attention, retention and Mamba-2.

They are one layer: a projection of x, in some a short convolution, then queries, keys and values of heads whose memory
is a matrix S that each token decays and corrects (`mnemos.ops.delta`), a norm with a gate and a projection back. Read
`RecurrentAttention`, which has the state, and then the `compute` of a layer, which has its equations.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.config import AttentionConfig, check_mode
from mnemos.ops.convolution import short_convolution
from mnemos.ops.delta import decayed_attention, delta_rule
from mnemos.ops.dense_layer import Linear
from mnemos.ops.positions import Rotary, count_seen, rotary_of
from mnemos.registry import register
from mnemos.types import Device, InputError, check_heads

from .multi_head import SelfAttention

WIDTH = 4  # tokens that a short convolution reads
Shapes = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]  # of a `RecurrentSums`
EPS = 1e-5  # of the norms, but that of retention, as in the authors' code


class Widths(NamedTuple):
    """The heads of queries and keys, their width D, the heads of values, which these serve in turn, and their width M.

    Value head h has the query and key head h // (value_heads / key_heads).
    """

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int

    @property
    def keys(self) -> int:
        """The width of all keys of a token."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """The width of all values of a token."""
        return self.value_heads * self.value_width


@dataclass(frozen=True)
class RecurrentConfig(AttentionConfig):
    """Base of the configurations of layers that forget: causal, without positions in their inputs, and without dropout.

    shares: D and M of a head where they are None, as shares of dim/num_heads.
    """

    knows_distances: ClassVar[bool] = True
    shares: ClassVar[tuple[float, float]] = (1, 1)
    key_width: int | None = None
    value_width: int | None = None

    @property
    def causal_modes(self) -> frozenset[bool]:
        """A sum over the tokens so far is causal."""
        return frozenset({True})

    def widths(self, dim: int, num_heads: int, key_heads: int | None = None) -> Widths:
        """The heads and widths of a layer; key_heads None: as many as there are heads of values."""
        check_heads(dim, num_heads)
        key, value = (max(1, int(share * (dim // num_heads))) for share in self.shares)
        return Widths(
            num_heads if key_heads is None else key_heads,
            key if self.key_width is None else self.key_width,
            num_heads,
            value if self.value_width is None else self.value_width,
        )


# --- The base: the state, and what the layers share ---


@exportable
class RecurrentSums(NamedTuple):
    """The state of a layer that forgets.

    sums [B, H, D, M], float32 (float64 for float64). window [B, W − 1, C]: the last inputs of the short convolution;
    None without one. seen [B] int64: valid tokens since the row began, where positions are rotary; else None.
    """

    sums: Tensor
    window: Tensor | None = None
    seen: Tensor | None = None


EMPTY_STATE = RecurrentSums(None)  # type: ignore[arg-type]  # None is zeros to the operators, and costs nothing


class RecurrentAttention(SelfAttention[RecurrentSums]):
    """Base of layers whose memory is one sum a head: `y, state = layer(x, state=None, mask=None)`.

    x, y [B, T, dim]; mask [B, T] bool, True = valid: an invalid token, wherever it stands, leaves the state alone, and
    its y has no meaning. The state is a `RecurrentSums`. A call costs O(T·(dim·(D + M)·H + H·D·M)) time whatever the
    length so far, and O(T·dim) memory for the backward pass.

    A subclass defines `input`, the projection of x, and `compute`, which gets checked inputs. convolved: the channels
    of its short convolution, which is causal and over 4 tokens of a channel; 0: it has none.
    Raises InputError for widths below 1, or if heads do not divide: `num_heads` `dim`, and key_heads `num_heads`.
    """

    counts_tokens = False  # whether the state has `seen`
    input: nn.Linear

    def __init__(self, dim: int, num_heads: int, widths: Widths, convolved: int = 0) -> None:
        super().__init__(dim, num_heads, causal=True, state_kind="constant")
        if min(widths) < 1 or widths.value_heads % widths.key_heads:
            raise InputError(
                f"expected widths and heads of at least 1, and heads of keys that divide the {num_heads} heads, found "
                f"{', '.join(f'{name} {size}' for name, size in widths._asdict().items())}; change them"
            )
        self.widths, self.convolved = widths, convolved

    def compute(self, x: Tensor, state: RecurrentSums, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        """y and the new state. The parts of `state` are None in new rows."""
        raise NotImplementedError

    def recur(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        decay: Tensor | None,
        sums: Tensor | None,
        mask: Tensor | None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The function `delta_rule`, or `decayed_attention` without β; programs have another form of it."""
        if beta is not None:
            return delta_rule(q, k, v, beta, decay, sums, mask, scale)
        assert decay is not None
        return decayed_attention(q, k, v, decay, sums, mask, scale)

    def state_shapes(self, rows: int) -> Shapes:
        """The shapes of a state's sums, window and seen; None for a part that it does not have."""
        w = self.widths
        window = (rows, WIDTH - 1, self.convolved) if self.convolved else None
        return (rows, w.value_heads, w.key_width, w.value_width), window, (rows,) if self.counts_tokens else None

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> RecurrentSums:
        narrow = dtype or torch.get_default_dtype()
        dtypes = torch.promote_types(narrow, torch.float32), narrow, torch.int64
        shapes = self.state_shapes(batch_size)
        return RecurrentSums(
            *(s if s is None else torch.zeros(s, dtype=d, device=device) for s, d in zip(shapes, dtypes, strict=True))  # type: ignore[arg-type]
        )

    def check_state(self, state: RecurrentSums, batch_size: int) -> None:
        wanted, shapes = self.state_shapes(batch_size), None
        if isinstance(state, RecurrentSums):
            shapes = tuple([part if part is None else tuple(part.shape) for part in state])
        if shapes != wanted:
            raise InputError(
                f"expected a state of the shapes {wanted} (sums, window, seen), found "
                f"{shapes or type(state).__name__}; pass None to begin"
            )

    def forward(
        self, x: Tensor, state: RecurrentSums | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, RecurrentSums]:
        return self.compute(self.checked(x, state, mask), EMPTY_STATE if state is None else state, mask)

    if TYPE_CHECKING:
        __call__ = forward


class ShortConvolution(nn.Module):
    """SiLU of a causal convolution over `WIDTH` tokens, one a channel: x [B, T, C], window, mask -> y, new window.

    Weights (and biases, if any) start uniform in ±1/√WIDTH, as those of `torch.nn.Conv1d` do.
    """

    def __init__(self, channels: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, WIDTH))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(WIDTH**-0.5), WIDTH**-0.5)

    def forward(self, x: Tensor, window: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        window = None if window is None else window.to(x.dtype)
        return short_convolution(x, self.weight, self.bias, window, mask, activation="silu")

    if TYPE_CHECKING:
        __call__ = forward


class GatedNorm(nn.RMSNorm):
    """An RMS norm over the last axis, times an activation of a gate of the same shape, if there is one.

    `eps` may be set later, for the weights of a model that has another.
    """

    def __init__(
        self, width: int, gate: Literal["silu", "sigmoid"] | None, learned: bool = True, eps: float = EPS
    ) -> None:
        super().__init__(width, eps, learned)
        self.gate = gate

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        scale = None if self.weight is None else self.weight.to(x.dtype)
        y = F.rms_norm(x, self.normalized_shape, scale, self.eps)
        if gate is None:
            return y
        return y * (F.silu(gate) if self.gate == "silu" else torch.sigmoid(gate))

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gate={self.gate}"


def l2_normalize(x: Tensor) -> Tensor:
    """x·rsqrt(Σx² + 1e-6) over the last axis, in float32 at least: queries and keys of length 1."""
    x = at_least_float32(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or float64: decays and lengths are computed in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softplus_dt(x: Tensor, bias: Tensor) -> Tensor:
    """softplus(x + bias), in float32 at least: Δ of Mamba, which a decay is −e^A times."""
    return F.softplus(at_least_float32(x) + at_least_float32(bias))


def draw_rates(heads: int, least: float) -> nn.Parameter:
    """A = log of uniform numbers from `least` to 16, one a head."""
    return nn.Parameter(torch.empty(heads).uniform_(least, 16).log())


def draw_biases(number: int) -> nn.Parameter:
    """The biases of `softplus_dt` whose softplus is log-uniform from .001 to .1 (Mamba)."""
    step = torch.empty(number).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(step + torch.log(-torch.expm1(-step)))


# --- The delta rule: DeltaNet, Gated DeltaNet and Kimi Delta Attention ---


@register
@dataclass(frozen=True)
class DeltaConfig(RecurrentConfig):
    """The delta rule (DeltaNet): a token replaces what its key held, by the share β.

    Attributes:
        key_width: D, the width of a head's queries and keys. None: dim/num_heads, as published.
        value_width: M, the width of a head's values. None: dim/num_heads, as published.
        doubled_beta: β up to 2 in place of 1, with which a token can reverse what a key held (Grazzi et al. 2024).
    """

    name: ClassVar[str] = "delta"
    doubled_beta: bool = False

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "DeltaAttention":
        check_mode(self, causal)
        return DeltaAttention(dim, num_heads, self.widths(dim, num_heads), "none", self.doubled_beta)


@register
@dataclass(frozen=True)
class GatedDeltaConfig(RecurrentConfig):
    """The delta rule with a decay per head (Gated DeltaNet; the layer of Qwen3-Next, Qwen 3.5 and OLMo Hybrid).

    Attributes:
        key_width: D, the width of a head's queries and keys. None: dim/num_heads.
        value_width: M, the width of a head's values. None: twice dim/num_heads, as the paper has it.
        key_heads: the heads of queries and keys, which num_heads/key_heads heads of values share. None: num_heads;
            Qwen3-Next: num_heads/2, all of one width.
        doubled_beta: β up to 2 in place of 1, with which a token can reverse what a key held (Grazzi et al. 2024).
    """

    name: ClassVar[str] = "gated-delta"
    shares: ClassVar[tuple[float, float]] = (1, 2)
    key_heads: int | None = None
    doubled_beta: bool = False

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "DeltaAttention":
        check_mode(self, causal)
        widths = self.widths(dim, num_heads, self.key_heads)
        return DeltaAttention(dim, num_heads, widths, "head", self.doubled_beta)


@register
@dataclass(frozen=True)
class KimiDeltaConfig(RecurrentConfig):
    """The delta rule with a decay per channel of the keys (Kimi Delta Attention, KDA; the layer of Kimi Linear).

    Attributes:
        key_width: D, the width of a head's queries and keys. None: dim/num_heads.
        value_width: M, the width of a head's values. None: dim/num_heads.
        doubled_beta: β up to 2 in place of 1, with which a token can reverse what a key held (Grazzi et al. 2024).
    """

    name: ClassVar[str] = "kimi-delta"
    doubled_beta: bool = False

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "DeltaAttention":
        check_mode(self, causal)
        return DeltaAttention(dim, num_heads, self.widths(dim, num_heads), "channel", self.doubled_beta)


class DeltaAttention(RecurrentAttention):
    """Multi-head delta rule: `y, state = layer(x, state=None, mask=None)`.

        q, k, v = SiLU(convolution(W x))      q, k of length 1      β = σ(W_β x)
        S' = e^g S     S ← S' + k (β (v − S'ᵀk))ᵀ     o = D^-½ Sᵀq     y = W_o (norm(o) ⊙ gate)

    for each head, with the decay g, the gate and their sources:

        "none"     g = 0; no gate. DeltaNet (Yang et al. 2024, arXiv 2406.06484)
        "head"     g = −e^A softplus(w_a x + b), one a head; SiLU(W_g x). Gated DeltaNet (Yang, Kautz and Hatamizadeh
                   2024, arXiv 2412.06464)
        "channel"  g = −e^A softplus(W_f₂ W_f₁ x + b), one a channel of the key; σ(W_g₂ W_g₁ x), W_f₁ of rank D and
                   W_g₁ of rank M. Kimi Linear (2025, arXiv 2510.26692)

    The norm is an RMS norm of each head with one scale of M channels; its eps is 1e-5 (Qwen3-Next has 1e-6: set
    `layer.norm.eps` for its weights). The state has the last three inputs of the convolution,
    [B, 3, 2·key_heads·D + H·M]. At the start e^A is uniform in .01 to 16 ("channel": 1 to 16), and softplus(b)
    log-uniform in .001 to .1.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        widths: Widths,
        decay: Literal["none", "head", "channel"] = "head",
        doubled_beta: bool = False,
    ) -> None:
        h, d, m = num_heads, widths.key_width, widths.value_width
        convolved = 2 * widths.keys + widths.values
        super().__init__(dim, num_heads, widths, convolved)
        self.decay, self.doubled_beta = decay, doubled_beta
        # q, k and v together, β, and what the decay and the gate are made of.
        self.parts = [convolved, h, *{"none": [], "head": [h, h * m], "channel": [d, m]}[decay]]
        self.input = Linear(dim, sum(self.parts), bias=False)
        self.convolution = ShortConvolution(convolved)
        self.norm = GatedNorm(m, {"none": None, "head": "silu", "channel": "sigmoid"}[decay])
        self.output = Linear(h * m, dim, bias=False)
        if decay == "channel":
            self.to_decay, self.to_gate = Linear(d, h * d, bias=False), Linear(m, h * m, bias=False)
        if decay != "none":
            self.A_log = draw_rates(h, least=0.01 if decay == "head" else 1.0)
            self.dt_bias = draw_biases(h if decay == "head" else h * d)

    def compute(self, x: Tensor, state: RecurrentSums, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        w, heads = self.widths, (self.num_heads, -1)
        qkv, beta, *rest = self.input(x).split(self.parts, -1)
        qkv, window = self.convolution(qkv, state.window, mask)
        qk, v = qkv.split([2 * w.keys, w.values], -1)
        q, k = l2_normalize(qk.unflatten(-1, (2, w.key_heads, -1))).unbind(2)
        beta = (2 if self.doubled_beta else 1) * torch.sigmoid(beta)
        decay = gate = None
        if self.decay == "head":
            decay, gate = rest
            decay = -at_least_float32(self.A_log).exp() * softplus_dt(decay, self.dt_bias)
        elif self.decay == "channel":
            decay, gate = rest
            step = softplus_dt(self.to_decay(decay), self.dt_bias).unflatten(-1, heads)
            decay, gate = -at_least_float32(self.A_log).exp()[:, None] * step, self.to_gate(gate)
        y, sums = self.recur(q, k, v.unflatten(-1, heads), beta, decay, state.sums, mask)
        y = self.norm(y, None if gate is None else gate.unflatten(-1, heads))
        return self.output(y.flatten(2)), RecurrentSums(sums, window)


# --- Gated linear attention ---

RANK, TEMPERATURE = 16, 16  # of its decays


@register
@dataclass(frozen=True)
class GLAConfig(RecurrentConfig):
    """Linear attention with a decay per channel of the keys (gated linear attention).

    Attributes:
        key_width: D, the width of a head's queries and keys. None: half of dim/num_heads, as published.
        value_width: M, the width of a head's values. None: dim/num_heads, as published.
    """

    name: ClassVar[str] = "gla"
    shares: ClassVar[tuple[float, float]] = (0.5, 1)

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "GatedLinearAttention":
        check_mode(self, causal)
        return GatedLinearAttention(dim, num_heads, self.widths(dim, num_heads))


class GatedLinearAttention(RecurrentAttention):
    """Multi-head gated linear attention: `y, state = layer(x, state=None, mask=None)`.

        q, k, v = W x     g = log σ(W₂ W₁ x + b)/16     S ← Diag(e^g) S + k vᵀ     o = D^-½ Sᵀq
        y = W_o (norm(o) ⊙ SiLU(W_g x))

    for each head, with one decay a channel of the key and W₁ of rank 16 (Yang et al. 2023, arXiv 2312.06635, eq. 4 and
    §4.4). The norm is an RMS norm of each head with one scale of M channels.
    """

    def __init__(self, dim: int, num_heads: int, widths: Widths) -> None:
        super().__init__(dim, num_heads, widths)
        self.parts = [2 * widths.keys, widths.values, widths.values, RANK]
        self.input = Linear(dim, sum(self.parts), bias=False)
        self.to_decay = Linear(RANK, widths.keys)
        self.norm = GatedNorm(widths.value_width, "silu")
        self.output = Linear(widths.values, dim, bias=False)

    def compute(self, x: Tensor, state: RecurrentSums, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        qk, v, gate, low = self.input(x).split(self.parts, -1)
        q, k = qk.unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        v, gate, low = (part.unflatten(-1, (self.num_heads, -1)) for part in (v, gate, self.to_decay(low)))
        decay = F.logsigmoid(at_least_float32(low)) / TEMPERATURE
        y, sums = self.recur(q, k, v, None, decay, state.sums, mask)
        return self.output(self.norm(y, gate).flatten(2)), RecurrentSums(sums)


# --- Retention ---

GAIN, RETENTION_EPS = 2**-2.5, 1e-6  # of the projections at the start, and of the norm


@register
@dataclass(frozen=True)
class RetentionConfig(RecurrentConfig):
    """Linear attention with a constant decay per head and rotary positions (retention, RetNet).

    Attributes:
        key_width: D, the width of a head's queries and keys, even. None: dim/num_heads, as published.
        value_width: M, the width of a head's values. None: twice dim/num_heads, as published.
    """

    name: ClassVar[str] = "retention"
    shares: ClassVar[tuple[float, float]] = (1, 2)

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "Retention":
        check_mode(self, causal)
        return Retention(dim, num_heads, self.widths(dim, num_heads))


class Retention(RecurrentAttention):
    """Multi-scale retention: `y, state = layer(x, state=None, mask=None)`.

        q, k = rotate(W x)     v = W_v x     S ← (1 − 2^{−5−h}) S + k vᵀ     o = D^-½ Sᵀq
        y = W_o (norm(o) ⊙ SiLU(W_g x))

    for the heads h = 0, 1, … (Sun et al. 2023, arXiv 2307.08621, eq. 6 to 8). As in the authors' code, the rotation is
    xPos without its scaling, by the angles 10000^{−2i/(D−2)} for the pairs i = 0 … D/2 − 1, and the norm an RMS norm of
    each head without a scale (the paper: GroupNorm), whose eps is 1e-6. Their code also divides each o by a number of
    its own that is at least 1, which only this eps notices. An invalid token has no position: those after it count on.

    At the start W_o and each of the four projections of x are Xavier-uniform, the latter with a gain of 2^−2.5; a model
    with RMS norms then divides W_o as that of any attention. Raises InputError for an odd D.
    """

    counts_tokens = True

    def __init__(self, dim: int, num_heads: int, widths: Widths) -> None:
        super().__init__(dim, num_heads, widths)
        d = widths.key_width
        self.rotary = Rotary(10000.0 ** (d / max(1, d - 2)))  # base^(−2i/d) is then 10000^(−2i/(d−2))
        rotary_of(self.rotary, d)  # refuses an odd width
        self.parts = [2 * widths.keys, widths.values, widths.values]
        self.input = Linear(dim, sum(self.parts), bias=False)
        self.norm = GatedNorm(widths.value_width, "silu", learned=False, eps=RETENTION_EPS)
        self.output = Linear(widths.values, dim, bias=False)
        self.draw_weights()

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Draw the weights of the start. A model calls it in place of its own initialisation."""
        w = self.widths
        for part in self.input.weight.split([w.keys, w.keys, w.values, w.values]):
            nn.init.xavier_uniform_(part, GAIN)
        nn.init.xavier_uniform_(self.output.weight)

    def compute(self, x: Tensor, state: RecurrentSums, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        b, t, _ = x.shape
        qk, v, gate = self.input(x).split(self.parts, -1)
        q, k = self.rotary.rotate(qk.unflatten(-1, (2 * self.num_heads, -1)), state.seen, mask).chunk(2, 2)
        v, gate = v.unflatten(-1, (self.num_heads, -1)), gate.unflatten(-1, (self.num_heads, -1))
        heads = torch.arange(self.num_heads, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        decay = torch.log1p(-torch.exp2(-5 - heads)).expand(b, t, -1)
        y, sums = self.recur(q, k, v, None, decay, state.sums, mask)
        return self.output(self.norm(y, gate).flatten(2)), RecurrentSums(sums, None, count_seen(x, state.seen, mask))


# --- Mamba-2 ---


@register
@dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """Linear attention with a decay per head, steps Δ and keys that heads share (Mamba-2, SSD).

    Attributes:
        key_width: N, the width of queries and keys (C and B): the size of the state space.
        value_width: P, the width of a head's values. None: twice dim/num_heads, as published.
        key_heads: the groups of queries and keys, each of which num_heads/key_heads heads share.
    """

    name: ClassVar[str] = "mamba2"
    shares: ClassVar[tuple[float, float]] = (1, 2)
    key_width: int = 128
    key_heads: int = 1

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "Mamba2Attention":
        check_mode(self, causal)
        return Mamba2Attention(dim, num_heads, self.widths(dim, num_heads, self.key_heads))


class Mamba2Attention(RecurrentAttention):
    """The mixer of Mamba-2: `y, state = layer(x, state=None, mask=None)`.

        z, xBC, a = W x     v, k, q = SiLU(convolution(xBC))     Δ = softplus(a + b)
        S ← e^{−e^A Δ} S + k (Δ v)ᵀ     o = Sᵀq + skip·v     y = W_o norm(o ⊙ SiLU(z))

    for each head, with one A, b and skip a head (Dao and Gu 2024, arXiv 2405.21060). v, k and q are the x, B and C of
    the paper, N = D and P = M. The norm is an RMS norm over the heads that share keys, with a scale of all channels.
    At the start e^A is uniform in 1 to 16, Δ at x = 0 log-uniform in .001 to .1, the skip 1.
    """

    def __init__(self, dim: int, num_heads: int, widths: Widths) -> None:
        convolved = widths.values + 2 * widths.keys
        super().__init__(dim, num_heads, widths, convolved)
        self.parts = [widths.values, convolved, num_heads]
        self.convolution = ShortConvolution(convolved, bias=True)
        self.input = Linear(dim, sum(self.parts), bias=False)
        self.A_log, self.dt_bias = draw_rates(num_heads, least=1.0), draw_biases(num_heads)
        self.skip = nn.Parameter(torch.ones(num_heads))
        self.norm = GatedNorm(widths.values // widths.key_heads, None, learned=False)
        self.norm_weight = nn.Parameter(torch.ones(widths.values))
        self.output = Linear(widths.values, dim, bias=False)

    def compute(self, x: Tensor, state: RecurrentSums, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        w = self.widths
        gate, mixed, step = self.input(x).split(self.parts, -1)
        mixed, window = self.convolution(mixed, state.window, mask)
        v, k, q = mixed.split([w.values, w.keys, w.keys], -1)
        k, q = k.unflatten(-1, (w.key_heads, -1)), q.unflatten(-1, (w.key_heads, -1))
        v = v.unflatten(-1, (w.value_heads, -1))
        step = softplus_dt(step, self.dt_bias)
        decay = -at_least_float32(self.A_log).exp() * step
        y, sums = self.recur(q, k, v * step[..., None], None, decay, state.sums, mask, 1.0)
        y = (y + v * self.skip[:, None]).flatten(2) * F.silu(gate)
        y = self.norm(y.unflatten(-1, (w.key_heads, -1))).flatten(2) * self.norm_weight
        return self.output(y.to(gate.dtype)), RecurrentSums(sums, window)
