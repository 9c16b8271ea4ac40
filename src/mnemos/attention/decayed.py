"""Linear attention that forgets, as a layer: gated linear attention (GLA) and retention (RetNet)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.ops.padding import count_seen
from mnemos.ops.rotary import Rotary, rotary_of, rotate
from mnemos.registry import register

from .recurrent import (
    GatedNorm,
    Nothing,
    RecurrentAttention,
    RecurrentConfig,
    RecurrentSums,
    Widths,
    either,
    head_width,
    widened,
)

RANK, TEMPERATURE = 16, 16  # of GLA's decays
GAIN, EPS = 2**-2.5, 1e-6  # of RetNet's projections at the start, and of its norm


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
        self.norm = GatedNorm(widths.value_width, "silu", learned=False, eps=EPS)
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
