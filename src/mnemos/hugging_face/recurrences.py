"""The linear recurrences of recurrent layers, from a state to a state. Plain functions of tensors, any float type.

Memories S [B, H, D, M], keys and queries [B, T, H, D], values [B, T, H, M], log-decays [B, T, H] (at most 0). A token
with log-decay 0 and value 0 (and write strength 0) leaves the memory as it is: padding is made of such tokens.
"""

import torch
from torch import Tensor

CHUNK = 64  # tokens that are computed at once: matrices of CHUNK × CHUNK per head


def decayed(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = a_t·S_{t−1} + k_t v_tᵀ, y_t = q_tᵀ S_t: Mamba-2 (Dao & Gu 2024, eq. 1 and the chunks of §6).

    With g the sum of log-decays since the chunk began, y_t = e^{g_t}·q_tᵀS_0 + Σ_{j≤t} e^{g_t−g_j}·(q_tᵀk_j)·v_j.
    Cost O(T·(CHUNK + D)·M) per head.
    """
    outputs = []
    for q_c, k_c, v_c, decay_c in _chunks(q, k, v, log_decay):
        y, memory = _decayed_chunk(q_c, k_c, v_c, decay_c, memory)
        outputs.append(y)
    return torch.cat(outputs, 2).transpose(1, 2), memory


def _chunks(*tensors: Tensor) -> list[list[Tensor]]:
    """Chunks of tensors [B, T, H, ..] with the heads first, [B, H, CHUNK, ..]."""
    return [list(part) for part in zip(*(x.transpose(1, 2).split(CHUNK, 2) for x in tensors), strict=True)]


def _decayed_chunk(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    g = log_decay.cumsum(-1)
    scores = (q @ k.mT) * _weights(g, -g)
    y = g.exp()[..., None] * (q @ memory) + scores @ v
    left = (g[..., -1:] - g).exp()[..., None]
    return y, g[..., -1, None, None].exp() * memory + (k * left).mT @ v


def _weights(row: Tensor, column: Tensor) -> Tensor:
    """e^{row_t + column_j} for j ≤ t, else 0: [.., T, T] of two [.., T]."""
    t = row.shape[-1]
    past = torch.ones(t, t, dtype=torch.bool, device=row.device).tril()
    return (row[..., :, None] + column[..., None, :]).masked_fill(~past, -torch.inf).exp()


def delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """S_t = a_t·S_{t−1} + k_t u_tᵀ with u_t = β_t·(v_t − a_t·S_{t−1}ᵀk_t), y_t = q_tᵀ S_t: the gated delta rule.

    Yang, Kautz & Hatamizadeh 2024, eq. 10. β = `strength` [B, T, H]. In a chunk the u_t solve the triangular system
    u_t + β_t Σ_{j<t} e^{g_t−g_j}·(k_tᵀk_j)·u_j = β_t·(v_t − e^{g_t}·S_0ᵀk_t); then u takes the place of v in `decayed`.
    """
    outputs = []
    for q_c, k_c, v_c, decay_c, beta in _chunks(q, k, v, log_decay, strength):
        g = decay_c.cumsum(-1)
        system = beta[..., None] * (k_c @ k_c.mT) * _weights(g, -g)
        right = beta[..., None] * (v_c - g.exp()[..., None] * (k_c @ memory))
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        y, memory = _decayed_chunk(q_c, k_c, u, decay_c, memory)
        outputs.append(y)
    return torch.cat(outputs, 2).transpose(1, 2), memory


def stabilised(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, log_write: Tensor, memory: Tensor, top: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S_t = f_t·S_{t−1} + i_t·k_t v_tᵀ, kept as S·e^{−m} with m_t = max(log f_t + m_{t−1}, log i_t): the mLSTM.

    Beck et al. 2024, eqs. 19 to 27. log_write: log i [B, T, H], −inf writes nothing; top: m [B, H]. Returns
    q_tᵀS_t·e^{−m_t} [B, T, H, M], all m_t [B, T, H], and the new S·e^{−m} and m.
    """
    outputs, tops = [], []
    for q_c, k_c, v_c, decay_c, write in _chunks(q, k, v, log_decay, log_write):
        g = decay_c.cumsum(-1)
        m = g + torch.maximum(top[..., None], (write - g).cummax(-1).values)
        scores = (q_c @ k_c.mT) * _weights(g - m, write - g)
        outputs.append((g + top[..., None] - m).exp()[..., None] * (q_c @ memory) + scores @ v_c)
        tops.append(m)
        last = (g[..., -1:] - g + write - m[..., -1:]).exp()[..., None]
        keep = (g[..., -1] + top - m[..., -1]).exp()[..., None, None]
        memory, top = keep * memory + (k_c * last).mT @ v_c, m[..., -1]
    return torch.cat(outputs, 2).transpose(1, 2), torch.cat(tops, 2).transpose(1, 2), memory, top
