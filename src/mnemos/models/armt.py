"""Associative Recurrent Memory Transformer (ARMT, Rodkin et al. 2024): memory tokens write a matrix in every layer."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mnemos.config import with_fields
from mnemos.memory.associations import AssociationsConfig, AssociationState, AssociativeMemory
from mnemos.registry import register
from mnemos.types import Device, State

from .blocks import module_list
from .segments import SegmentConfig, SegmentModel

Associations = tuple[AssociationState, ...]  # of each layer


@register
@dataclass(frozen=True)
class ARMTConfig(SegmentConfig):
    """The sizes of an `ARMT`."""

    name: ClassVar[str] = "armt"
    memory: AssociationsConfig = field(default_factory=AssociationsConfig)

    def build(self) -> "ARMT":
        """The model, freshly initialised."""
        return ARMT(self)


class ARMT(SegmentModel):
    """`logits, state = model(x, state=None, mask=None)`: an associative memory in every layer, one write per segment.

        [X^l ; M^l] ← [X^l ; M^l] + what A^l holds for each of them        before layer l
        [X^{l+1} ; M^{l+1}] = Layer_l([X^l ; M^l])
        A^l ← A^l with keys, values and strengths of M^{l+1}, by the delta rule

    x [B, T] int64 token ids, T at least 1; mask [B, T] bool, True = valid; logits [B, T, V] predict the token after
    x[:, i]. The tokens of a row are read in segments of length L from its start, with m memory tokens behind each,
    which see all of it. The memory tokens are learned and the same in every segment: what passes on is in the matrices
    (`AssociativeMemory`, `mnemos.ops.associative`), and every token reads them. Reading token by token gives the same
    outputs as whole segments.

    The state (`SegmentState`) is A [F, D] and its normaliser [F] per layer and row, at least float32, with
    F = 2·ν·key_dim; and within a segment the keys and values so far, at most 2·L·D per layer and row. Gradient flows
    through it: `mnemos.replay` over segments trains with all of it, or with that of the last k segments. Cost:
    O(T·(m + L)·D) for attention, O(T·F·D) for the memory and O(T·(1 + m/L)·D²) for the rest. Positions restart in every
    segment. Rows may be at different places of their segments; a call then runs more and shorter passes.

    `ARMT(ARMTConfig(...))` or `ARMT(dim=64, ...)` with the fields of `mnemos.models.ARMTConfig`.
    Raises InputError for impossible shapes, tokens outside the vocabulary, and a state of another model or batch.
    """

    config: ARMTConfig

    def __init__(self, config: ARMTConfig | None = None, **fields: Any) -> None:
        super().__init__(with_fields(config or ARMTConfig(), fields, "ARMT"))
        for association in self.associations:
            association.reset_parameters()  # after the initialisation of all weights

    def _build_memory(self) -> None:
        c = self.config
        self.back = c.memory.tokens * c.memory.write
        self.causal_memory = c.memory.causal
        self.memory_tokens = nn.Parameter(torch.randn(self.back, c.dim) * c.dim**-0.5) if self.back else None
        self.associations = module_list(AssociativeMemory(c.dim, c.memory) for _ in range(c.layers if self.back else 0))

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> Associations:
        """Empty matrices; none without memory tokens."""
        return tuple(memory.initial_state(batch_size, device, dtype) for memory in self.associations)

    def back_tokens(self, memory: State, rows: int) -> Tensor:
        """The learned memory tokens, the same for every row and segment."""
        assert self.memory_tokens is not None
        return self.memory_tokens.expand(rows, -1, -1)

    def recall(self, memory: Associations, layer: int, x: Tensor) -> Tensor:
        """x and what the layer's matrix holds for it."""
        return self.associations[layer].read(memory[layer], x) if memory else x

    def write_memory(self, memory: Associations, outputs: list[Tensor], active: Tensor | None) -> Associations:
        """Every layer's matrix after a write from its memory tokens."""
        of_layers = zip(self.associations, memory, outputs, strict=True)
        return tuple(layer.write(state, tokens, active) for layer, state, tokens in of_layers)
