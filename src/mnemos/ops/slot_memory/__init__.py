"""Memory slots (Memformer, Wu et al. 2022): write attention and forgetting. See README.md and reference.py."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.errors import InputError
from mnemos.ops.padding import zero_invalid
from mnemos.ops.precision import full_precision
from mnemos.ops.signature import Signature

__all__ = ["biased_memory_norm", "slot_attention", "slot_write"]

GUARD = 1e-6  # slots shorter than this are divided by it instead of by their length
SCORES = {"q_m": "B K H d", "k_m": "B K H d", "k_x": "B L H d", "mask": "B L bool ?", "self_logit": "K H | H ?"}
CHECK_ATTENTION = Signature("slot_attention", **SCORES)
CHECK_WRITE = Signature("slot_write", "; D is a multiple of H", memory="B K D", v_x="B L H V", **SCORES)
CHECK_NORM = Signature("biased_memory_norm", memory="B K D", bias="K D")


def slot_attention(
    q_m: Tensor,
    k_m: Tensor,
    k_x: Tensor,
    mask: Tensor | None = None,
    temperature: float = 0.25,
    self_logit: Tensor | None = None,
) -> Tensor:
    """The weights of write attention (eq. 6, 7): [B, H, K, 1 + L]; column 0 is the slot itself, the others the tokens.

        a_i = softmax([q_i·k_i/(√d·τ) + s_i ; q_i·k_x/(√d·τ)])          for every row, head and slot i

    q_m, k_m [B, K, H, d] of the slots, k_x [B, L, H, d] of the tokens, mask [B, L] bool, True = valid, self_logit s
    [K, H] or [H]. A slot never reads another slot. If no token is valid, the slot's own weight is exactly 1.
    Computed in float32 (float64 for float64); under autocast only the products have lower precision. Cost:
    O(B·K·L·H·d) time, O(B·H·K·L) memory; linear in K. Raises InputError for shapes or a temperature that do not fit.
    """
    CHECK_ATTENTION(q_m=q_m, k_m=k_m, k_x=k_x, mask=mask, self_logit=self_logit)
    if not temperature > 0:
        raise InputError(f"slot_attention: expected a temperature above 0, found {temperature}")
    k_x = zero_invalid(k_x, mask)
    wide = torch.promote_types(q_m.dtype, torch.float32)
    scale = q_m.shape[-1] ** -0.5 / temperature
    # The queries are scaled and not the scores, because there are fewer of them.
    q_m = q_m * scale
    itself = (q_m.to(wide) * k_m.to(wide)).sum(-1)
    if self_logit is not None:
        itself = itself + self_logit
    tokens = (q_m.transpose(1, 2) @ k_x.permute(0, 2, 3, 1)).to(wide)
    if mask is not None:
        tokens = tokens.masked_fill(~mask[:, None, None], -torch.inf)
    return torch.softmax(torch.cat([itself.transpose(1, 2)[..., None], tokens], -1), -1)


def slot_write(
    memory: Tensor,
    q_m: Tensor,
    k_m: Tensor,
    k_x: Tensor,
    v_x: Tensor,
    mask: Tensor | None = None,
    temperature: float = 0.25,
    self_logit: Tensor | None = None,
) -> Tensor:
    """The slots after writing tokens to them (eq. 8): m_i ← a_i·[m_i ; v_x] per head; a: `slot_attention`.

    memory [B, K, D] -> [B, K, D] in its dtype; v_x [B, L, H, D/H]; the others as in `slot_attention`. A slot's own
    value is its content, split into heads, without projection or residual. So a slot with the weight 1 for itself keeps
    its content exactly; so do all slots of a row without valid tokens.
    Cost: O(B·K·L·(H·d + D)) time, O(B·H·K·L) memory. Raises InputError for shapes or a temperature that do not fit.
    """
    n = CHECK_WRITE(memory=memory, q_m=q_m, k_m=k_m, k_x=k_x, v_x=v_x, mask=mask, self_logit=self_logit)
    if n["H"] * n["V"] != n["D"]:
        raise InputError(
            f"slot_write: expected v_x [B, L, H, D/H] of memory's D = {n['D']}, found {n['H']} heads of {n['V']}"
        )
    weights = slot_attention(q_m, k_m, k_x, mask, temperature, self_logit)
    v_x = zero_invalid(v_x, mask)
    own = weights[..., 0].transpose(1, 2)[..., None] * memory.unflatten(-1, (v_x.shape[2], -1))
    heard = weights[..., 1:].to(v_x.dtype) @ v_x.transpose(1, 2)
    return (own + heard.transpose(1, 2)).flatten(2).to(memory.dtype)


def biased_memory_norm(memory: Tensor, bias: Tensor, radius: float | None = None) -> Tensor:
    """Forgetting (§3.4.3): m_i ← ρ·(m_i + v_i)/‖m_i + v_i‖ over D, which moves each slot towards ρ·v_i/‖v_i‖.

    memory [B, K, D], bias v [K, D], radius ρ (None: √D, for entries of size one) -> [B, K, D] in memory's dtype,
    computed in float32 at least. The rate depends on r = ‖v‖/ρ: near the limit, each call multiplies the distance to
    it by 1/(1 + r). A slot whose sum is 0 stays 0. Cost: O(B·K·D). Raises InputError for shapes or a radius that do not
    fit.
    """
    CHECK_NORM(memory=memory, bias=bias)
    if radius is not None and not radius > 0:
        raise InputError(f"expected a radius above 0, or None for √D, found {radius}")
    wide = torch.promote_types(memory.dtype, torch.float32)
    radius = memory.shape[-1] ** 0.5 if radius is None else radius
    with full_precision(memory.device.type):
        return (radius * F.normalize(memory.to(wide) + bias.to(wide), dim=-1, eps=GUARD)).to(memory.dtype)
