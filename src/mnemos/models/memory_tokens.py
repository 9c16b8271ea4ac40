"""Memory Transformer (Burtsev et al. 2020) and Recurrent Memory Transformer (RMT, Bulatov et al. 2022)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mnemos.config import with_fields
from mnemos.memory.tokens import TokenMemory, TokensConfig, TokenState
from mnemos.registry import register
from mnemos.types import Device, InputError, State

from .segments import SegmentConfig, SegmentModel


@register
@dataclass(frozen=True)
class MemoryTransformerConfig(SegmentConfig):
    """The sizes of a `MemoryTransformer`."""

    name: ClassVar[str] = "memory-transformer"
    memory_tokens: int = 16  # m
    causal_memory: bool = False  # a memory token attends to itself and earlier ones only

    def build(self) -> "MemoryTransformer":
        """The model, freshly initialised."""
        return MemoryTransformer(self)


class MemoryTransformer(SegmentModel):
    """`logits, state = model(x, state=None, mask=None)`: m learned [mem] tokens in front of every segment.

        [mem_1 … mem_m ; x_1 … x_L]

    x [B, T] int64 token ids, T at least 1; mask [B, T] bool, True = valid; logits [B, T, V] predict the token after
    x[:, i]. The memory tokens attend to each other, and every token to all of them and to the tokens of its segment up
    to itself. In the paper's encoder memory tokens also read the sequence; here that would tell a token its future.

    Nothing passes from one segment to the next: there is no recurrence, and [mem] is a part of the weights. The state
    (`SegmentState`, memory None) is the place of each row and the keys and values within its segment, at most
    2·(m + L)·D numbers per layer and row. So a sequence may be cut anywhere, and at the start of a segment the state
    is empty. Cost: O(T·(m + L)·D + T·D²) time. Segments that are whole in a call run side by side.

    `MemoryTransformer(MemoryTransformerConfig(...))` or `MemoryTransformer(dim=64, ...)` with the configuration's
    fields.
    Raises InputError for impossible shapes, tokens outside the vocabulary, and a state of another model or batch.
    """

    config: MemoryTransformerConfig

    def __init__(self, config: MemoryTransformerConfig | None = None, **fields: Any) -> None:
        super().__init__(with_fields(config or MemoryTransformerConfig(), fields, "MemoryTransformer"))

    def _build_memory(self) -> None:
        c = self.config
        if c.memory_tokens < 0:
            raise InputError(f"memory_tokens: expected at least 0, found {c.memory_tokens}; use 0 for none")
        self.memory = TokenMemory(c.memory_tokens, c.dim) if c.memory_tokens else None
        self.front, self.causal_memory = c.memory_tokens, c.causal_memory

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> None:
        """None: the memory tokens are weights."""
        return None

    def front_tokens(self, memory: State, rows: int) -> Tensor:
        """[mem], the same for every row and segment."""
        assert self.memory is not None
        return self.memory.start.expand(rows, -1, -1)


@register
@dataclass(frozen=True)
class RMTConfig(SegmentConfig):
    """The sizes of an `RMT`."""

    name: ClassVar[str] = "rmt"
    memory: TokensConfig = field(default_factory=TokensConfig)

    def build(self) -> "RMT":
        """The model, freshly initialised."""
        return RMT(self)


class RMT(SegmentModel):
    """`logits, state = model(x, state=None, mask=None)`: memory tokens that every segment reads and rewrites.

        [M_{t−1} ; s_t ; M_{t−1}]  →  Transformer  →  [· ; outputs ; M_t]

    x [B, T] int64 token ids, T at least 1; mask [B, T] bool, True = valid; logits [B, T, V] predict the token after
    x[:, i]. The tokens of a row are read in segments s_1, s_2, … of length L from its start. The m read tokens in front
    do not see the segment; a token sees the read tokens and its segment up to itself; the m write tokens behind see
    everything. Both are M_{t−1}, told apart by their positions, and the last layer's outputs at the write tokens,
    after the final norm, are M_t. M_0 is learned. Reading token by token gives the same outputs as whole segments.

    The state (`SegmentState`) is M, m·D numbers per row, its number of writes, and within a segment the keys and values
    so far, at most 2·(m + L)·D per layer and row. Gradient flows through it: `mnemos.replay` over segments trains with
    all of it, or with that of the last k segments (`truncate_every`), at the activations of one segment. Cost:
    O(T·(2m + L)·D) for attention and O(T·(1 + 2m/L)·D²) for the rest. Positions restart in every segment. Rows may be
    at different places of their segments; a call then runs more and shorter passes.

    `RMT(RMTConfig(...))` or `RMT(dim=64, ...)` with the fields of `mnemos.models.RMTConfig`.
    Raises InputError for impossible shapes, tokens outside the vocabulary, and a state of another model or batch.
    """

    config: RMTConfig

    def __init__(self, config: RMTConfig | None = None, **fields: Any) -> None:
        super().__init__(with_fields(config or RMTConfig(), fields, "RMT"))

    def _build_memory(self) -> None:
        c = self.config
        self.memory = TokenMemory(c.memory.tokens, c.dim) if c.memory.tokens else None
        self.front, self.back = c.memory.tokens, c.memory.tokens * c.memory.write
        self.causal_memory = c.memory.causal

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> TokenState | None:
        """No writes; None without memory tokens."""
        return None if self.memory is None else self.memory.initial_state(batch_size, device, dtype)

    def front_tokens(self, memory: TokenState, rows: int) -> Tensor:
        """M_{t−1} [B, m, D]."""
        assert self.memory is not None
        return self.memory.contents(memory)

    back_tokens = front_tokens

    def write_memory(self, memory: TokenState, outputs: list[Tensor], active: Tensor | None) -> TokenState:
        """M_t: the last layer's outputs."""
        return TokenMemory.written(memory, self.final_norm(outputs[-1]), active)
