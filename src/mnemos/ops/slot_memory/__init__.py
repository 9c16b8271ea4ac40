"""Memory slots (Memformer, Wu et al. 2022): write attention and forgetting. See README.md and reference.py."""

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.checks import check_mask
from mnemos.ops.precision import full_precision
from mnemos.types import InputError

__all__ = ["biased_memory_norm", "slot_attention", "slot_write"]

GUARD = 1e-6  # slots shorter than this are divided by it instead of by their length


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
    _check_scores(q_m, k_m, k_x, mask, temperature, self_logit)
    if mask is not None:  # 0·NaN is NaN, also in the backward
        k_x = k_x.masked_fill(~mask[..., None, None], 0)
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
    _check_values(memory, q_m, k_x, v_x)
    weights = slot_attention(q_m, k_m, k_x, mask, temperature, self_logit)
    if mask is not None:
        v_x = v_x.masked_fill(~mask[..., None, None], 0)
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
    if memory.dim() != 3 or bias.shape != memory.shape[1:] or not memory.is_floating_point():
        raise InputError(
            f"expected floating memory [B, K, D] and bias [K, D], found {memory.dtype} {tuple(memory.shape)} and "
            f"{tuple(bias.shape)}"
        )
    if radius is not None and not radius > 0:
        raise InputError(f"expected a radius above 0, or None for √D, found {radius}")
    wide = torch.promote_types(memory.dtype, torch.float32)
    radius = memory.shape[-1] ** 0.5 if radius is None else radius
    with full_precision(memory.device.type):
        return (radius * F.normalize(memory.to(wide) + bias.to(wide), dim=-1, eps=GUARD)).to(memory.dtype)


def _check_scores(
    q_m: Tensor, k_m: Tensor, k_x: Tensor, mask: Tensor | None, temperature: float, self_logit: Tensor | None
) -> None:
    fits = q_m.dim() == k_x.dim() == 4 and q_m.is_floating_point()
    if not fits or k_m.shape != q_m.shape or (k_x.shape[0], *k_x.shape[2:]) != (q_m.shape[0], *q_m.shape[2:]):
        raise InputError(
            f"expected q_m and k_m [B, K, H, d] and k_x [B, L, H, d] of one B, H and d, found {tuple(q_m.shape)}, "
            f"{tuple(k_m.shape)} and {tuple(k_x.shape)}"
        )
    check_mask(mask, k_x.shape[:2])
    if not temperature > 0:
        raise InputError(f"expected a temperature above 0, found {temperature}")
    if self_logit is not None and self_logit.shape not in (q_m.shape[1:3], q_m.shape[2:3]):
        wanted = f"[{q_m.shape[1]}, {q_m.shape[2]}] or [{q_m.shape[2]}]"
        raise InputError(f"expected a self_logit {wanted}, found {tuple(self_logit.shape)}")


def _check_values(memory: Tensor, q_m: Tensor, k_x: Tensor, v_x: Tensor) -> None:
    b, k, h, _ = q_m.shape if q_m.dim() == 4 else (0, 0, 0, 0)
    if memory.dim() != 3 or memory.shape[:2] != (b, k) or not memory.is_floating_point() or memory.shape[2] % max(h, 1):
        raise InputError(
            f"expected floating memory [B, K, D] of the {b} rows and {k} slots of q_m, its D divisible by {h} heads, "
            f"found {memory.dtype} {tuple(memory.shape)}"
        )
    wanted = (*k_x.shape[:2], h, memory.shape[2] // max(h, 1))
    if tuple(v_x.shape) != wanted:
        raise InputError(f"expected v_x [B, L, H, D/H] {wanted}, found {tuple(v_x.shape)}")
