"""Memory slots that a row carries from segment to segment: how they are read, written and forgotten."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.config import check_fields
from mnemos.ops.dense_layer import Linear
from mnemos.ops.slot_memory import biased_memory_norm, slot_attention, slot_write
from mnemos.types import Device, InputError, check_heads


@dataclass(frozen=True)
class SlotsConfig:
    """The settings of a memory of slots. The paper has radius=1 and does not state the bias.

    slots: K. temperature: τ of the writer; the paper has .25 for images and .125 for text. num_heads: of the writer; 0:
    as many as the model has. radius: ρ, the norm of a slot; None: √D, which gives entries of size one (in a Memformer
    with preset="paper": 1). bias: ‖v_bias‖/ρ
    at the start, the share of the distance to its end point that a slot loses per write. self_logit: the initial value
    of a learned term added to a slot's score of itself; None: no such term. forgetting=False: v_bias is only the start
    of the slots, and writes do not add it but still scale every slot to ρ. write=False: slots keep their start values,
    which are equal for all rows.
    """

    slots: int = 64
    temperature: float = 0.25
    num_heads: int = 0
    radius: float | None = None
    bias: float = 0.03
    self_logit: float | None = None
    forgetting: bool = True
    write: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "memory")
        for name, right, wanted in (
            ("slots", self.slots >= 0, "at least 0 (0: no memory)"),
            ("num_heads", self.num_heads >= 0, "at least 0 (0: as many as the model has)"),
            ("temperature", 0 < self.temperature < math.inf, "above 0"),
            ("radius", self.radius is None or 0 < self.radius < math.inf, "above 0, or None for √dim"),
            ("bias", 0 < self.bias < math.inf, "above 0"),
            ("self_logit", self.self_logit is None or math.isfinite(self.self_logit), "a number, or None"),
        ):
            if not right:
                raise InputError(f"memory.{name}: expected {wanted}, found {getattr(self, name)}; change it")


@exportable
class SlotState(NamedTuple):
    """slots [B, K, D], at least float32, and writes [B] int64, their number; where it is 0, the row's slots are M_0."""

    slots: Tensor
    writes: Tensor

    @property
    def memory_name(self) -> str:
        return "slots"


class SlotMemory(nn.Module):
    """K slots of width D per row: each write attends to a segment's tokens (eq. 4–8), with forgetting (§3.4.3).

    The slots of a new row are M_0 = ρ·v/‖v‖, where v (`bias`, [K, D]) is one learned vector per slot. A slot that
    attends to no token drifts towards M_0. `self_logit` [K·heads], if configured, is added to a slot's score of itself.
    Slots and tokens share W_K, as in eq. 4 and 5; the projections have no bias.
    Raises InputError if the writer's heads do not divide the width.
    """

    def __init__(self, dim: int, heads: int, config: SlotsConfig) -> None:
        super().__init__()
        self.config, self.num_heads = config, config.num_heads or heads
        check_heads(dim, self.num_heads)
        self.bias = nn.Parameter(torch.empty(config.slots, dim))
        self.radius = dim**0.5 if config.radius is None else config.radius
        self.self_logit = None
        if config.write:
            self.query, self.key, self.value = (Linear(dim, dim, bias=False) for _ in range(3))
            if config.self_logit is not None:
                # A vector, so that weight decay, which applies to matrices, leaves it: 0 is no better a prior.
                self.self_logit = nn.Parameter(torch.full((config.slots * self.num_heads,), config.self_logit))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """v_bias in random directions with norm `bias`·ρ. With norm ρ, a slot would lose half of itself per write."""
        nn.init.normal_(self.bias)
        self.bias.mul_(self.config.bias * self.radius / self.bias.norm(dim=-1, keepdim=True))

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> SlotState:
        """The state of `batch_size` new rows, by default like the weights."""
        device = self.bias.device if device is None else device
        wide = torch.promote_types(dtype or self.bias.dtype, torch.float32)
        slots = torch.zeros(batch_size, *self.bias.shape, device=device, dtype=wide)
        return SlotState(slots, torch.zeros(batch_size, device=device, dtype=torch.int64))

    def start(self) -> Tensor:
        """M_0 [K, D]."""
        wide = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))
        return biased_memory_norm(torch.zeros_like(wide)[None], wide, self.radius)[0]

    def contents(self, state: SlotState) -> Tensor:
        """The slots [B, K, D]; M_0 in new rows."""
        return torch.where((state.writes == 0)[:, None, None], self.start(), state.slots)

    def forward(
        self, state: SlotState, tokens: Tensor, mask: Tensor | None = None, active: Tensor | None = None
    ) -> SlotState:
        """The state after a write from tokens [B, L, D]; mask [B, L] and active [B] bool.

        Rows that are not active (those of a finished stream, for example) and rows without a valid token do not change.
        Cost: O(B·(K + L)·D²) for the projections and O(B·K·L·D) for the attention; no term in K².
        """
        if not self.config.write:
            return state
        before = self.contents(state)
        q_m, k_m, k_x = self._queries_and_keys(before, tokens)
        v_x = self.value(tokens).unflatten(-1, (self.num_heads, -1))
        after = slot_write(before, q_m, k_m, k_x, v_x, mask, self.config.temperature, self._self_logits())
        bias = self.bias if self.config.forgetting else torch.zeros_like(self.bias)
        after = biased_memory_norm(after, bias, self.radius)
        if mask is not None:
            active = mask.any(1) if active is None else active & mask.any(1)
        if active is None:
            return SlotState(after, state.writes + 1)
        return SlotState(torch.where(active[:, None, None], after, state.slots), state.writes + active)

    def write_attention(self, state: SlotState, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The attention weights of `forward`, [B, heads, K, 1 + L], for figures (the paper's 6 and 7).

        Column 0 is the slot itself: with weight 1 there, the write changes the slot only by forgetting.
        """
        q_m, k_m, k_x = self._queries_and_keys(self.contents(state), tokens)
        return slot_attention(q_m, k_m, k_x, mask, self.config.temperature, self._self_logits())

    def _queries_and_keys(self, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q_m, k_m [B, K, H, D/H] of the slots, and k_x [B, L, H, D/H] of the tokens."""
        slots = slots.to(self.query.weight.dtype)
        q_m, k_m, k_x = self.query(slots), self.key(slots), self.key(tokens)
        heads = self.num_heads, -1
        return q_m.unflatten(-1, heads), k_m.unflatten(-1, heads), k_x.unflatten(-1, heads)

    def _self_logits(self) -> Tensor | None:
        return None if self.self_logit is None else self.self_logit.view(-1, self.num_heads)

    if TYPE_CHECKING:
        __call__ = forward
