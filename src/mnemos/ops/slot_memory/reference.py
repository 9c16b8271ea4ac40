"""Memory slots by their equations (Memformer, eq. 4 to 8 and §3.4.3): loops over rows, slots and heads.

Tests compare the fast path with it, so it shares no code with it and uses only elementary functions.
"""

import math

import torch
from torch import Tensor


def reference_slot_attention(
    q_m: Tensor,
    k_m: Tensor,
    k_x: Tensor,
    mask: Tensor | None = None,
    temperature: float = 0.25,
    self_logit: Tensor | None = None,
) -> Tensor:
    """Eq. 6 and 7: q_m, k_m [B, K, H, d], k_x [B, L, H, d] to weights [B, H, K, 1 + L]; column 0 is the slot itself.

    self_logit [K, H] is added after the division by the temperature.
    """
    b, slots, heads, width = q_m.shape
    weights = torch.zeros(b, heads, slots, 1 + k_x.shape[1], dtype=torch.float64)
    for row in range(b):
        for slot in range(slots):
            for head in range(heads):
                query = q_m[row, slot, head].double()
                keys = [k_m[row, slot, head].double()]  # itself, and no other slot
                columns = [0]
                for token in range(k_x.shape[1]):
                    if mask is None or bool(mask[row, token]):
                        keys.append(k_x[row, token, head].double())
                        columns.append(1 + token)
                logits = [(query * key).sum() / math.sqrt(width) / temperature for key in keys]
                if self_logit is not None:
                    logits[0] = logits[0] + self_logit[slot, head].double()
                highest = max(float(logit.detach()) for logit in logits)
                powers = [torch.exp(logit - highest) for logit in logits]
                total = sum(powers[1:], powers[0])
                for column, power in zip(columns, powers, strict=True):
                    weights[row, head, slot, column] = power / total
    return weights


def reference_slot_write(
    memory: Tensor,
    q_m: Tensor,
    k_m: Tensor,
    k_x: Tensor,
    v_x: Tensor,
    mask: Tensor | None = None,
    temperature: float = 0.25,
    self_logit: Tensor | None = None,
) -> Tensor:
    """Eq. 8: memory [B, K, D] to the next memory, float64; a slot's own value is its content, split into heads."""
    weights = reference_slot_attention(q_m, k_m, k_x, mask, temperature, self_logit)
    b, heads, slots, _ = weights.shape
    width = memory.shape[2] // heads
    rows = []
    for row in range(b):
        for slot in range(slots):
            parts = []
            for head in range(heads):
                own = memory[row, slot, head * width : (head + 1) * width].double()
                part = weights[row, head, slot, 0] * own
                for token in range(v_x.shape[1]):
                    if mask is None or bool(mask[row, token]):
                        part = part + weights[row, head, slot, 1 + token] * v_x[row, token, head].double()
                parts.append(part)
            rows.append(torch.cat(parts))
    return torch.stack(rows).view(b, slots, -1)


def reference_biased_memory_norm(memory: Tensor, bias: Tensor, radius: float | None = None) -> Tensor:
    """§3.4.3: m ← m + v_bias, then m ← ρ·m/‖m‖ per slot, float64; radius None: ρ = √D."""
    b, slots, width = memory.shape
    radius = math.sqrt(width) if radius is None else radius
    rows = []
    for row in range(b):
        for slot in range(slots):
            moved = memory[row, slot].double() + bias[slot].double()
            rows.append(radius * moved / torch.sqrt((moved * moved).sum()))
    return torch.stack(rows).view(b, slots, width)
