"""Relative attention with a segment memory (Transformer-XL, Dai et al. 2019) as a layer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mnemos.config import AttentionConfig
from mnemos.memory.segment_memory import Segments
from mnemos.registry import register
from mnemos.types import Device, InputError, Splits

from .relative_heads import RelativeHeads


@register
@dataclass(frozen=True)
class RelativeConfig(AttentionConfig):
    """softmax([(q+u)·k + (q+v)·W_R R_(i−j)]/√(D/H))·v over the segment and a memory of inputs before it.

    Attributes:
        memory: the number of tokens kept from before the segment, if causal; 0: none.
        same_length: if causal, a query attends to exactly `memory` tokens before it, wherever segments end.
        clamp: the greatest distance in tokens; larger distances count as this one. 0: no limit.
        detached: no gradient flows into an earlier call. If False it does, and memory replay can carry it.
    """

    name: ClassVar[str] = "relative"
    knows_distances: ClassVar[bool] = True
    at_evaluation: ClassVar[tuple[str, ...]] = ("memory", "same_length", "clamp")
    memory: int = 224
    same_length: bool = False
    clamp: int = 0
    detached: bool = True

    @property
    def remembers(self) -> bool:
        """Whether it has a memory of segments."""
        return self.memory > 0

    def build(self, dim: int, num_heads: int, causal: bool = False, dropout: float = 0.0) -> "RelativeAttention":
        """The layer, [B, T, dim] -> [B, T, dim]."""
        return RelativeAttention(dim, num_heads, causal, dropout, self)


class RelativeAttention(RelativeHeads[Segments]):
    """Multi-head relative self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. Positions enter as distances only, so the model around
    the layer needs no positions (`position="none"`). R: sinusoids. W_R (`position`), u and v (`content_bias`,
    `position_bias`) belong to the layer. No other part has a bias, as in the paper's code.

    Causal: the state is a `Segments`, the layer's inputs at the last `memory` tokens; keys and values are computed from
    them with the present weights. A query attends to all of them and to its own segment up to itself, so the cuts are
    part of the computation (splits = "segments"). With same_length it attends to the `memory` tokens before it, and the
    cuts have no effect (splits = "anywhere"). The state is detached on the way in and out, unless `detached` is False.
    Not causal: there is no state (None), and distances have both signs. The output of a padded query is finite and has
    no meaning.

    Cost of a call with N = memory + T: O(N·D² + T·N·D) time, or O(T·D² + T·N·D·H) for few tokens, which read the inputs
    directly (see `RelativeHeads`). The state has N·D numbers per row, half as many as keys and values.
    Raises InputError if D is not divisible by H, memory or clamp is below 0, or a state has another width.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        config: RelativeConfig | None = None,
    ) -> None:
        c = config or RelativeConfig()
        cuts: Splits = "anywhere" if c.same_length else "segments"
        window = c.memory + 1 if causal and c.same_length else None
        super().__init__(dim, num_heads, causal, dropout, cuts, c.memory, c.clamp, c.detached, window)
        self.config = c

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> Segments:
        """No tokens."""
        return Segments.empty(batch_size, self.dim, device, dtype)

    def check_state(self, state: Segments, batch_size: int) -> None:
        """Raise InputError unless the state holds inputs [B, N, D]."""
        found = tuple(state.x.shape) if isinstance(state, Segments) else type(state).__name__
        if found[::2] != (batch_size, self.dim):
            raise InputError(
                f"expected a state of inputs [{batch_size}, N, {self.dim}], found {found}; use initial_state"
            )

    def widened(self, state: Segments) -> Segments:
        """The inputs of a whole memory."""
        return state.widened(self.config.memory)

    def attended(self, x: Tensor, state: Segments | None, mask: Tensor | None) -> tuple[Tensor, Segments | None]:
        """The heads before projection, [B, T, H, D/H], and the new state."""
        if not self.causal:
            return self.read(x, x, mask), None
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        if state is None:
            context = Segments(x, valid)
        else:
            context = (state.detach() if self.config.detached else state).append(x, valid)
            mask = context.valid
        heads = self.read(x, context.x, mask)
        kept = context.last(self.config.memory)
        return heads, kept.detach() if self.config.detached else kept
