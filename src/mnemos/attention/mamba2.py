"""Mamba-2's mixer (state-space duality): linear attention that forgets, with steps Δ, a skip and shared keys."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    widened,
)


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
