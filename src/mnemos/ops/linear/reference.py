"""Linear attention by its equations (Katharopoulos et al. 2020): loops over rows, heads and tokens, in float64.

Tests compare the backends with it, so it shares no code with them and uses only elementary functions. Gradients are
autograd's. A schedule computes one row and head as the paper writes it: q [T, D], k [N, D], v [N, M], the sums S [C, M]
and Z [C] over earlier tokens, and `eps` added to every denominator.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]
Result = tuple[Tensor, Tensor, Tensor]  # V' [T, M], S [C, M], Z [C]


def reference_elu(x: Tensor) -> Tensor:
    """Eq. 7: elu(x) + 1, that is x + 1 where x is positive and e^x elsewhere."""
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, torch.zeros_like(x), x)))


def reference_relu(x: Tensor) -> Tensor:
    """max(x, 0)."""
    return torch.where(x > 0, x, torch.zeros_like(x))


def reference_polynomial(x: Tensor) -> Tensor:
    """A map with φ(q)·φ(k) = (q·k)²: all D² products x_i·x_j of the last axis."""
    return torch.stack([x[..., i] * x[..., j] for i in range(x.shape[-1]) for j in range(x.shape[-1])], -1)


def reference_bidirectional(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, valid: list[bool], phi: Map, eps: float
) -> Result:
    """Eq. 3 to 5: every query reads every valid key, and the given sums."""
    for j in range(k.shape[0]):
        if valid[j]:
            s = s + torch.outer(phi(k[j]), v[j])
            z = z + phi(k[j])
    rows = [(phi(query) @ s) / (phi(query) @ z + eps) for query in q]  # eq. 5
    return torch.stack(rows) if rows else s.new_zeros(0, s.shape[1]), s, z


def reference_similarity(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, valid: list[bool], phi: Map, eps: float
) -> Result:
    """Eq. 8 with sim(q, k) = φ(q)·φ(k): each query with each key that is not after it; O(T²), no running sums."""
    rows = []
    for i in range(q.shape[0]):
        numerator, denominator = phi(q[i]) @ s, phi(q[i]) @ z + eps
        for j in range(i + 1):
            if valid[j]:
                similarity = phi(q[i]) @ phi(k[j])
                numerator, denominator = numerator + similarity * v[j], denominator + similarity
        rows.append(numerator / denominator)
    for j in range(k.shape[0]):
        if valid[j]:
            s, z = s + torch.outer(phi(k[j]), v[j]), z + phi(k[j])
    return torch.stack(rows), s, z


def reference_causal(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, z: Tensor, valid: list[bool], phi: Map, eps: float
) -> Result:
    """Eq. 9 to 12, and equally eq. 16 to 20: S_i and Z_i from S_{i-1} and Z_{i-1}."""
    rows = []
    for i in range(q.shape[0]):
        if valid[i]:
            s = s + torch.outer(phi(k[i]), v[i])  # eq. 10, 18
            z = z + phi(k[i])  # eq. 11, 19
        query = phi(q[i] if valid[i] else torch.zeros_like(q[i]))
        rows.append((query @ s) / (query @ z + eps))  # eq. 12, 20
    return torch.stack(rows), s, z


def reference_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Callable[..., Result] = reference_causal,
    phi: Map = reference_elu,
    state: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    eps: float = 1e-6,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A schedule for every row and head: q [B, T, H, D], k [B, N, H, D], v [B, N, H, M], state (s, z), mask [B, N].

    Where `resets` [B, T] is True, S and Z are zero before the token. Returns y [B, T, H, M], s [B, H, C, M] and
    z [B, H, C], all float64.
    """
    q, k, v = q.double(), k.double(), v.double()
    rows, sums, norms = [], [], []
    for b in range(q.shape[0]):
        valid = [True] * k.shape[1] if mask is None else mask[b].tolist()
        heads = []
        for h in range(q.shape[2]):
            if state is None:
                width = phi(k[0, 0, 0]).shape[-1]
                s, z = torch.zeros(width, v.shape[-1]).double(), torch.zeros(width).double()
            else:
                s, z = state[0][b, h].double(), state[1][b, h].double()
            starts = [i for i in range(1, q.shape[1]) if resets is not None and resets[b, i]]
            parts = []
            for start, end in zip([0, *starts], [*starts, None], strict=True):
                if resets is not None and resets[b, start]:
                    s, z = torch.zeros_like(s), torch.zeros_like(z)
                tokens = (x[b, start:end, h] for x in (q, k, v))
                y, s, z = schedule(*tokens, s, z, valid[start:end], phi, eps)
                parts.append(y)
            heads.append((torch.cat(parts), s, z))
        rows.append(torch.stack([y for y, _, _ in heads], 1))
        sums.append(torch.stack([s for _, s, _ in heads]))
        norms.append(torch.stack([z for _, _, z in heads]))
    return torch.stack(rows), torch.stack(sums), torch.stack(norms)
