"""Layers that forget and correct: the delta rule, gated linear attention, retention and Mamba-2."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable
from mnemos.config import AttentionConfig
from mnemos.ops.checks import check_mask
from mnemos.ops.convolution import short_convolution
from mnemos.ops.delta import decayed_attention, delta_rule
from mnemos.ops.padding import count_seen, zero_invalid
from mnemos.ops.rotary import Rotary, rotary_of, rotate
from mnemos.registry import register
from mnemos.types import Device, InputError, Splits, StateKind, check_heads, check_input

WIDTH = 4  # tokens that a short convolution reads
Shapes = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]  # of a `RecurrentSums`
EPS = 1e-5  # of the norms, but that of retention, as in the authors' code


@exportable
class RecurrentSums(NamedTuple):
    """The state of a layer that forgets.

    sums [B, H, D, M], float32 (float64 for float64). window [B, W − 1, C]: the last inputs of the short convolution;
    None without one. seen [B] int64: valid tokens since the row began, where positions are rotary; else None.
    """

    sums: Tensor
    window: Tensor | None = None
    seen: Tensor | None = None


@dataclass(frozen=True)
class RecurrentConfig(AttentionConfig):
    """Base of the configurations of layers that forget: causal, and without positions in their inputs."""

    knows_distances: ClassVar[bool] = True

    @property
    def causal_modes(self) -> frozenset[bool]:
        """A sum over the tokens so far is causal."""
        return frozenset({True})

    @property
    def remembers(self) -> bool:
        """Its sums are a memory of all tokens."""
        return True


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
        """See the class."""
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
        """See the class."""
        scale = None if self.weight is None else self.weight.to(x.dtype)
        y = F.rms_norm(x, self.normalized_shape, scale, self.eps)
        if gate is None:
            return y
        return y * (F.silu(gate) if self.gate == "silu" else torch.sigmoid(gate))

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        """The settings in one line."""
        return f"{super().extra_repr()}, gate={self.gate}"


class RecurrentAttention(nn.Module):
    """Base of layers whose memory is one sum a head: `y, state = layer(x, state=None, mask=None)`.

    x, y [B, T, dim]; mask [B, T] bool, True = valid: an invalid token, wherever it stands, leaves the state alone, and
    its y has no meaning. The state is a `RecurrentSums`. A subclass defines `input`, the projection of x, and
    `compute`, which gets checked inputs, and an empty state where none is given. convolved: the channels of its short
    convolution; 0: it has none.
    """

    causal = True
    splits: Splits = "anywhere"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    input: nn.Linear
    placed = False  # whether the state counts tokens

    def __init__(self, dim: int, num_heads: int, widths: Widths, convolved: int = 0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        if min(widths) < 1 or widths.value_heads % widths.key_heads:
            raise InputError(
                f"expected widths and heads of at least 1, and heads of keys that divide the {num_heads} heads, found "
                f"{', '.join(f'{name} {size}' for name, size in widths._asdict().items())}; change them"
            )
        self.dim, self.num_heads, self.widths = dim, num_heads, widths
        self.convolved = convolved

    def compute(self, x: Tensor, state: "RecurrentSums | Nothing", mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        """y and the new state."""
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

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> RecurrentSums:
        """The state of `batch_size` new rows, by default like the weights; None in `forward` means the same."""
        like = self.input.weight
        device, dtype = like.device if device is None else device, dtype or like.dtype
        sums, window, seen = self.state_shapes(batch_size)
        wide = torch.promote_types(dtype, torch.float32)
        return RecurrentSums(
            torch.zeros(sums, dtype=wide, device=device),
            None if window is None else torch.zeros(window, dtype=dtype, device=device),
            None if seen is None else torch.zeros(seen, dtype=torch.int64, device=device),
        )

    def forward(
        self, x: Tensor, state: RecurrentSums | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, RecurrentSums]:
        """See the class."""
        check_input(x, self.dim)
        check_mask(mask, x.shape[:2])
        x = zero_invalid(x, mask)
        if state is None:
            return self.compute(x, NOTHING, mask)
        self._check_state(state, x.shape[0])
        return self.compute(x, state, mask)

    if TYPE_CHECKING:
        __call__ = forward

    def state_shapes(self, rows: int) -> Shapes:
        """The shapes of a state's sums, window and seen; None for a part that it does not have."""
        w = self.widths
        sums = (rows, w.value_heads, w.key_width, w.value_width)
        return sums, (rows, WIDTH - 1, self.convolved) if self.convolved else None, (rows,) if self.placed else None

    def _check_state(self, state: object, rows: int) -> None:
        wanted = self.state_shapes(rows)
        found = (
            tuple(None if part is None else tuple(part.shape) for part in state)
            if isinstance(state, RecurrentSums)
            else type(state).__name__
        )
        if found != wanted:
            raise InputError(
                f"expected a state of the shapes {wanted} (sums, window, seen), found {found}; pass None to begin"
            )


class Nothing(NamedTuple):
    """The parts of a state that is not there."""

    sums: None = None
    window: None = None
    seen: None = None


NOTHING = Nothing()


def head_width(dim: int, num_heads: int) -> int:
    """dim/num_heads. Raises InputError if it is not a whole number of at least 1."""
    check_heads(dim, num_heads)
    return dim // num_heads


def either(size: int | None, default: int) -> int:
    """The given size, or the default for None."""
    return default if size is None else size


def l2_normalize(x: Tensor) -> Tensor:
    """x·rsqrt(Σx² + 1e-6) over the last axis, in float32 at least: queries and keys of length 1."""
    x = widened(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def widened(x: Tensor) -> Tensor:
    """x in float32 at least: decays and lengths are computed in it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def steps(x: Tensor, bias: Tensor) -> Tensor:
    """softplus(x + bias), in float32 at least: Δ of Mamba, which a decay is −e^A times."""
    return F.softplus(widened(x) + widened(bias))


def drawn_rates(heads: int, least: float) -> nn.Parameter:
    """A = log of uniform numbers from `least` to 16, one a head."""
    return nn.Parameter(torch.empty(heads).uniform_(least, 16).log())


def drawn_biases(number: int) -> nn.Parameter:
    """The biases of `steps` whose softplus is log-uniform from .001 to .1 (Mamba)."""
    step = torch.empty(number).uniform_(math.log(1e-3), math.log(1e-1)).exp()
    return nn.Parameter(step + torch.log(-torch.expm1(-step)))


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
    key_width: int | None = None
    value_width: int | None = None
    doubled_beta: bool = False

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "DeltaAttention":
        """The layer, [B, T, dim] -> [B, T, dim]. `dropout` has no effect, because there are no attention weights."""
        d = head_width(dim, num_heads)
        widths = Widths(num_heads, either(self.key_width, d), num_heads, either(self.value_width, d))
        return DeltaAttention(dim, num_heads, widths, "none", self.doubled_beta)


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
    key_width: int | None = None
    value_width: int | None = None
    key_heads: int | None = None
    doubled_beta: bool = False

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "DeltaAttention":
        """The layer, [B, T, dim] -> [B, T, dim]. `dropout` has no effect, because there are no attention weights."""
        d = head_width(dim, num_heads)
        key_heads = either(self.key_heads, num_heads)
        widths = Widths(key_heads, either(self.key_width, d), num_heads, either(self.value_width, 2 * d))
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
    key_width: int | None = None
    value_width: int | None = None
    doubled_beta: bool = False

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "DeltaAttention":
        """The layer, [B, T, dim] -> [B, T, dim]. `dropout` has no effect, because there are no attention weights."""
        d = head_width(dim, num_heads)
        widths = Widths(num_heads, either(self.key_width, d), num_heads, either(self.value_width, d))
        return DeltaAttention(dim, num_heads, widths, "channel", self.doubled_beta)


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

    x [B, T, dim]; mask [B, T] bool, True = valid; y [B, T, dim]. The convolution is causal, over 4 tokens of a channel.
    The norm is an RMS norm of each head with one scale of M channels; its eps is 1e-5 (Qwen3-Next has 1e-6: set
    `layer.norm.eps` for its weights). The state is a `RecurrentSums`: sums [B, H, D, M]
    in float32, and the last three inputs of the convolution, [B, 3, 2·key_heads·D + H·M]. A call costs
    O(T·(dim·(D + M)·H + H·D·M)) time whatever the length so far, and O(T·dim) memory for the backward pass.

    At the start e^A is uniform in .01 to 16 ("channel": 1 to 16), softplus(b) log-uniform in .001 to .1, the
    convolution as `torch.nn.Conv1d`.
    Raises InputError if `num_heads` does not divide `dim`, or key_heads not num_heads.
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
        self.input = nn.Linear(dim, sum(self.parts), bias=False)
        self.convolution = ShortConvolution(convolved)
        self.norm = GatedNorm(m, {"none": None, "head": "silu", "channel": "sigmoid"}[decay])
        self.output = nn.Linear(h * m, dim, bias=False)
        if decay == "channel":
            self.to_decay, self.to_gate = nn.Linear(d, h * d, bias=False), nn.Linear(m, h * m, bias=False)
        if decay != "none":
            self.A_log = drawn_rates(h, least=0.01 if decay == "head" else 1.0)
            self.dt_bias = drawn_biases(h if decay == "head" else h * d)

    def compute(self, x: Tensor, state: RecurrentSums | Nothing, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        """y and the new state."""
        w = self.widths
        qkv, beta, *rest = self.input(x).split(self.parts, -1)
        qkv, window = self.convolution(qkv, state.window, mask)
        qk, v = qkv.split([2 * w.keys, w.values], -1)
        q, k = l2_normalize(qk.unflatten(-1, (2, w.key_heads, -1))).unbind(2)
        beta = (2 if self.doubled_beta else 1) * torch.sigmoid(beta)
        decay, gate = self.decay_and_gate(*rest) if rest else (None, None)
        y, sums = self.recur(q, k, v.unflatten(-1, (w.value_heads, -1)), beta, decay, state.sums, mask)
        return self.output(self.norm(y, gate).flatten(2)), RecurrentSums(sums, window)

    def decay_and_gate(self, decay: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        """The decay [B, T, H] or [B, T, H, D] and the gate [B, T, H, M] from their parts of the projection."""
        heads, rate = (self.num_heads, -1), widened(self.A_log).exp()
        if self.decay == "head":
            return -rate * steps(decay, self.dt_bias), gate.unflatten(-1, heads)
        step = steps(self.to_decay(decay), self.dt_bias).unflatten(-1, heads)
        return -rate[:, None] * step, self.to_gate(gate).unflatten(-1, heads)


RANK, TEMPERATURE = 16, 16  # of GLA's decays
GAIN, RETENTION_EPS = 2**-2.5, 1e-6  # of RetNet's projections at the start, and of its norm


@register
@dataclass(frozen=True)
class GLAConfig(RecurrentConfig):
    """Linear attention with a decay per channel of the keys (gated linear attention).

    Attributes:
        key_width: D, the width of a head's queries and keys. None: half of dim/num_heads, as published.
        value_width: M, the width of a head's values. None: dim/num_heads, as published.
    """

    name: ClassVar[str] = "gla"
    key_width: int | None = None
    value_width: int | None = None

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "GatedLinearAttention":
        """The layer, [B, T, dim] -> [B, T, dim]. `dropout` has no effect, because there are no attention weights."""
        d = head_width(dim, num_heads)
        widths = Widths(num_heads, either(self.key_width, max(1, d // 2)), num_heads, either(self.value_width, d))
        return GatedLinearAttention(dim, num_heads, widths)


@register
@dataclass(frozen=True)
class RetentionConfig(RecurrentConfig):
    """Linear attention with a constant decay per head and rotary positions (retention, RetNet).

    Attributes:
        key_width: D, the width of a head's queries and keys, even. None: dim/num_heads, as published.
        value_width: M, the width of a head's values. None: twice dim/num_heads, as published.
    """

    name: ClassVar[str] = "retention"
    key_width: int | None = None
    value_width: int | None = None

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "Retention":
        """The layer, [B, T, dim] -> [B, T, dim]. `dropout` has no effect, because there are no attention weights."""
        d = head_width(dim, num_heads)
        widths = Widths(num_heads, either(self.key_width, d), num_heads, either(self.value_width, 2 * d))
        return Retention(dim, num_heads, widths)


class GatedLinearAttention(RecurrentAttention):
    """Multi-head gated linear attention: `y, state = layer(x, state=None, mask=None)`.

        q, k, v = W x     g = log σ(W₂ W₁ x + b)/16     S ← Diag(e^g) S + k vᵀ     o = D^-½ Sᵀq
        y = W_o (norm(o) ⊙ SiLU(W_g x))

    for each head, with one decay a channel of the key and W₁ of rank 16 (Yang et al. 2023, arXiv 2312.06635, eq. 4 and
    §4.4). x [B, T, dim]; mask [B, T] bool, True = valid; y [B, T, dim]. The norm is an RMS norm of each head with one
    scale of M channels. The state is a `RecurrentSums` of sums [B, H, D, M] in float32. A call costs
    O(T·(dim·(D + M)·H + H·D·M)) time whatever the length so far, and O(T·dim) memory for the backward pass.
    Raises InputError if `num_heads` does not divide `dim`.
    """

    def __init__(self, dim: int, num_heads: int, widths: Widths) -> None:
        super().__init__(dim, num_heads, widths)
        self.parts = [2 * widths.keys, widths.values, widths.values, RANK]
        self.input = nn.Linear(dim, sum(self.parts), bias=False)
        self.to_decay = nn.Linear(RANK, widths.keys)
        self.norm = GatedNorm(widths.value_width, "silu")
        self.output = nn.Linear(widths.values, dim, bias=False)

    def compute(self, x: Tensor, state: RecurrentSums | Nothing, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        """y and the new state."""
        qk, v, gate, low = self.input(x).split(self.parts, -1)
        q, k = qk.unflatten(-1, (2, self.num_heads, -1)).unbind(2)
        v, gate, low = (part.unflatten(-1, (self.num_heads, -1)) for part in (v, gate, self.to_decay(low)))
        decay = F.logsigmoid(widened(low)) / TEMPERATURE
        y, sums = self.recur(q, k, v, None, decay, state.sums, mask)
        return self.output(self.norm(y, gate).flatten(2)), RecurrentSums(sums)


class Retention(RecurrentAttention):
    """Multi-scale retention: `y, state = layer(x, state=None, mask=None)`.

        q, k = rotate(W x)     v = W_v x     S ← (1 − 2^{−5−h}) S + k vᵀ     o = D^-½ Sᵀq
        y = W_o (norm(o) ⊙ SiLU(W_g x))

    for the heads h = 0, 1, … (Sun et al. 2023, arXiv 2307.08621, eq. 6 to 8). As in the authors' code, the rotation is
    xPos without its scaling, by the angles 10000^{−2i/(D−2)} for the pairs i = 0 … D/2 − 1, and the norm an RMS norm of
    each head without a scale (the paper: GroupNorm), whose eps is 1e-6. Their code also divides each o by a number of
    its own that is at least 1, which only this eps notices.
    x [B, T, dim]; mask [B, T] bool, True = valid; y [B, T, dim]. An invalid token has no position: those after it count
    on. The state is a `RecurrentSums`: sums [B, H, D, M] in float32, and the number of valid tokens. A call costs
    O(T·(dim·(D + M)·H + H·D·M)) time whatever the length so far, and O(T·dim) memory for the backward pass.

    At the start W_o and each of the four projections of x are Xavier-uniform, the latter with a gain of 2^−2.5; a model
    with RMS norms then divides W_o as that of any attention.
    Raises InputError if `num_heads` does not divide `dim`, or for an odd D.
    """

    placed = True

    def __init__(self, dim: int, num_heads: int, widths: Widths) -> None:
        super().__init__(dim, num_heads, widths)
        d = widths.key_width
        self.rotary = Rotary(10000.0 ** (d / max(1, d - 2)))  # base^(−2i/d) is then 10000^(−2i/(d−2))
        rotary_of(self.rotary, d)  # refuses an odd width
        self.parts = [2 * widths.keys, widths.values, widths.values]
        self.input = nn.Linear(dim, sum(self.parts), bias=False)
        self.norm = GatedNorm(widths.value_width, "silu", learned=False, eps=RETENTION_EPS)
        self.output = nn.Linear(widths.values, dim, bias=False)
        self.draw_weights()

    @torch.no_grad()
    def draw_weights(self) -> None:
        """Draw the weights of the start."""
        w = self.widths
        for part in self.input.weight.split([w.keys, w.keys, w.values, w.values]):
            nn.init.xavier_uniform_(part, GAIN)
        nn.init.xavier_uniform_(self.output.weight)

    def compute(self, x: Tensor, state: RecurrentSums | Nothing, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        """y and the new state."""
        b, t, _ = x.shape
        turns = self.rotary.turns(t, self.widths.key_width, state.seen, x.device, mask)
        qk, v, gate = self.input(x).split(self.parts, -1)
        q, k = rotate(qk.unflatten(-1, (2 * self.num_heads, -1)), turns).chunk(2, 2)
        v, gate = v.unflatten(-1, (self.num_heads, -1)), gate.unflatten(-1, (self.num_heads, -1))
        heads = torch.arange(self.num_heads, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        decay = torch.log1p(-torch.exp2(-5 - heads)).expand(b, t, -1)
        y, sums = self.recur(q, k, v, None, decay, state.sums, mask)
        return self.output(self.norm(y, gate).flatten(2)), RecurrentSums(sums, None, count_seen(x, state.seen, mask))


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
    key_width: int = 128
    value_width: int | None = None
    key_heads: int = 1

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "Mamba2Attention":
        """The layer, [B, T, dim] -> [B, T, dim]. `dropout` has no effect, because there are no attention weights."""
        value_width = either(self.value_width, 2 * head_width(dim, num_heads))
        return Mamba2Attention(dim, num_heads, Widths(self.key_heads, self.key_width, num_heads, value_width))


class Mamba2Attention(RecurrentAttention):
    """The mixer of Mamba-2: `y, state = layer(x, state=None, mask=None)`.

        z, xBC, a = W x     v, k, q = SiLU(convolution(xBC))     Δ = softplus(a + b)
        S ← e^{−e^A Δ} S + k (Δ v)ᵀ     o = Sᵀq + skip·v     y = W_o norm(o ⊙ SiLU(z))

    for each head, with one A, b and skip a head (Dao and Gu 2024, arXiv 2405.21060). v, k and q are the x, B and C of
    the paper. x [B, T, dim]; mask [B, T] bool, True = valid; y [B, T, dim]. The convolution is causal, over 4 tokens of
    a channel. The norm is an RMS norm over the heads that share keys, with a scale of all channels. The state is a
    `RecurrentSums`: sums [B, H, N, P] in float32, and the last three inputs of the convolution. A call costs
    O(T·(dim·P·H + H·N·P)) time whatever the length so far, and O(T·dim) memory for the backward pass.

    At the start e^A is uniform in 1 to 16, Δ at x = 0 log-uniform in .001 to .1, the skip 1, the convolution as
    `torch.nn.Conv1d`.
    Raises InputError if `num_heads` does not divide `dim`, or key_heads not num_heads.
    """

    def __init__(self, dim: int, num_heads: int, widths: Widths) -> None:
        convolved = widths.values + 2 * widths.keys
        super().__init__(dim, num_heads, widths, convolved)
        self.parts = [widths.values, convolved, num_heads]
        self.convolution = ShortConvolution(convolved, bias=True)
        self.input = nn.Linear(dim, sum(self.parts), bias=False)
        self.A_log, self.dt_bias = drawn_rates(num_heads, least=1.0), drawn_biases(num_heads)
        self.skip = nn.Parameter(torch.ones(num_heads))
        self.norm = GatedNorm(widths.values // widths.key_heads, None, learned=False)
        self.norm_weight = nn.Parameter(torch.ones(widths.values))
        self.output = nn.Linear(widths.values, dim, bias=False)

    def compute(self, x: Tensor, state: RecurrentSums | Nothing, mask: Tensor | None) -> tuple[Tensor, RecurrentSums]:
        """y and the new state."""
        w = self.widths
        gate, mixed, step = self.input(x).split(self.parts, -1)
        mixed, window = self.convolution(mixed, state.window, mask)
        v, k, q = mixed.split([w.values, w.keys, w.keys], -1)
        k, q = k.unflatten(-1, (w.key_heads, -1)), q.unflatten(-1, (w.key_heads, -1))
        v = v.unflatten(-1, (w.value_heads, -1))
        step = steps(step, self.dt_bias)
        decay = -widened(self.A_log).exp() * step
        y, sums = self.recur(q, k, v * step[..., None], None, decay, state.sums, mask, 1.0)
        y = (y + v * self.skip[:, None]).flatten(2) * F.silu(gate)
        y = self.norm(y.unflatten(-1, (w.key_heads, -1))).flatten(2) * self.norm_weight
        return self.output(y.to(gate.dtype)), RecurrentSums(sums, window)
