"""The delta rule as a layer: DeltaNet, Gated DeltaNet (Qwen3-Next) and Kimi Delta Attention."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mnemos.registry import register

from .recurrent import (
    GatedNorm,
    Nothing,
    RecurrentAttention,
    RecurrentConfig,
    RecurrentSums,
    ShortConvolution,
    Widths,
    drawn_biases,
    drawn_rates,
    either,
    head_width,
    steps,
    unit,
    widened,
)


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
        q, k = unit(qk.unflatten(-1, (2, w.key_heads, -1))).unbind(2)
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
