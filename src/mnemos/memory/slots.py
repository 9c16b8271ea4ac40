"""Memory slots that a row carries from segment to segment: what they hold, how they are written, what they forget."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.config import check_fields
from mnemos.ops.slot_memory import biased_memory_norm, slot_attention, slot_write
from mnemos.types import InputError, check_heads


@dataclass(frozen=True)
class SlotsConfig:
    """What a memory of slots is like. As in the paper: radius=1; it does not say the bias.

    slots: K. temperature: τ of the writer, the paper's .25 for images, .125 for text. heads: of the writer; 0: as many
    as the model has. radius: ρ, the length of a slot; None: √D, whose entries are of size one. bias: ‖v_bias‖/ρ at the
    start, the share of its distance to its end that a slot loses a write. self_logit: added to a slot's score of
    itself, learned from this start; None: nothing is. forgetting=False: v_bias is where slots start, and no longer
    added. write=False: slots stay what they are at the start, the same for every row.
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
            ("slots", self.slots >= 0, "at least 0 (no memory)"),
            ("num_heads", self.num_heads >= 0, "at least 0 (as many as the model has)"),
            ("temperature", 0 < self.temperature < math.inf, "above 0"),
            ("radius", self.radius is None or 0 < self.radius < math.inf, "above 0, or None for √width"),
            ("bias", 0 < self.bias < math.inf, "above 0"),
            ("self_logit", self.self_logit is None or math.isfinite(self.self_logit), "a number, or None"),
        ):
            if not right:
                raise InputError(f"memory.{name} must be {wanted}, found {getattr(self, name)}")


class SlotState(NamedTuple):
    """slots [B, K, D], float32 at least, and writes [B] int64, how often: where 0, the row's slots are M_0."""

    slots: Tensor
    writes: Tensor


class SlotMemory(nn.Module):
    """K slots of width D a row, written with what they listen to among tokens (eq. 4–8), and forgetting (§3.4.3).

    A fresh row's slots are M_0 = ρ·v/‖v‖, v (`bias`, [K, D]) one learned vector a slot; it is also what each slot
    drifts towards while it hears nothing new. `self_logit` [K·heads], where the configuration has one, is added to a
    slot's score of itself. Slots and tokens share W_K, as eq. 4 and 5 have it; the projections have no bias.
    Raises InputError for a width that the writer's heads do not divide.
    """

    def __init__(self, dim: int, heads: int, config: SlotsConfig) -> None:
        super().__init__()
        self.config, self.num_heads = config, config.num_heads or heads
        check_heads(dim, self.num_heads)
        self.bias = nn.Parameter(torch.empty(config.slots, dim))
        self.radius = dim**0.5 if config.radius is None else config.radius
        self.self_logit = None
        if config.write:
            self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
            if config.self_logit is not None:
                # A vector, and so no matrix that decays: 0 is no better a guess than any other.
                self.self_logit = nn.Parameter(torch.full((config.slots * self.num_heads,), config.self_logit))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """v_bias in random directions, `bias`·ρ long: at ρ itself a slot would halve its way to the end every write."""
        nn.init.normal_(self.bias)
        self.bias.mul_(self.config.bias * self.radius / self.bias.norm(dim=-1, keepdim=True))

    def initial_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> SlotState:
        """The state of `batch_size` fresh rows."""
        wide = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
        slots = torch.zeros(batch_size, *self.bias.shape, device=device, dtype=wide)
        return SlotState(slots, torch.zeros(batch_size, device=device, dtype=torch.int64))

    def start(self) -> Tensor:
        """M_0 [K, D]."""
        wide = self.bias.to(torch.promote_types(self.bias.dtype, torch.float32))
        return biased_memory_norm(torch.zeros_like(wide)[None], wide, self.radius)[0]

    def contents(self, state: SlotState) -> Tensor:
        """What the slots hold, [B, K, D]: M_0 in rows that are fresh."""
        return torch.where((state.writes == 0)[:, None, None], self.start(), state.slots)

    def forward(
        self, state: SlotState, tokens: Tensor, mask: Tensor | None = None, active: Tensor | None = None
    ) -> SlotState:
        """The state after listening to tokens [B, L, D]; mask [B, L] and active [B] bool.

        Rows that are not active, a finished stream's say, and rows without a valid token stay exactly as they are.
        Cost: O(B·(K + L)·D²) for the projections and O(B·K·L·D); nothing in K².
        """
        if not self.config.write:
            return state
        before = self.contents(state)
        after = slot_write(before, *self._projected(before, tokens), **self._settings(mask))
        after = biased_memory_norm(
            after, self.bias if self.config.forgetting else torch.zeros_like(self.bias), self.radius
        )
        if mask is not None:
            active = mask.any(1) if active is None else active & mask.any(1)
        if active is None:
            return SlotState(after, state.writes + 1)
        return SlotState(torch.where(active[:, None, None], after, state.slots), state.writes + active)

    def write_attention(self, state: SlotState, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """What `forward` listens to: weights [B, heads, K, 1 + L]. For pictures: figures 6 and 7.

        Column 0 is the slot itself: 1 where nothing is written, but for what is forgotten.
        """
        before = self.contents(state)
        q_m, k_m, k_x, _ = self._projected(before, tokens)
        return slot_attention(q_m, k_m, k_x, **self._settings(mask))

    def _projected(self, slots: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_m, k_m [B, K, H, D/H], k_x, v_x [B, L, H, D/H]."""
        slots = slots.to(self.query.weight.dtype)
        found = self.query(slots), self.key(slots), self.key(tokens), self.value(tokens)
        q_m, k_m, k_x, v_x = (x.unflatten(-1, (self.num_heads, -1)) for x in found)
        return q_m, k_m, k_x, v_x

    def _settings(self, mask: Tensor | None) -> dict[str, Any]:
        logit = None if self.self_logit is None else self.self_logit.view(-1, self.num_heads)
        return {"mask": mask, "temperature": self.config.temperature, "self_logit": logit}
