"""Bucket-union attention by its equations: a T×T mask per row and head, in float64.

Tests compare the fast paths with it, so it shares no code with them and uses only elementary functions. Gradients are
autograd's. One row and head is computed as the paper writes it: qk [T, D], v [T, M], a round's rotation R [D, b/2].
"""

import torch
from torch import Tensor


def reference_buckets(qk: Tensor, rotation: Tensor) -> list[int]:
    """h(x) = argmax([xR; −xR]) of every token (Kitaev et al. 2020, section 2)."""
    found = []
    for x in qk.detach():
        turned = x @ rotation
        found.append(int(torch.argmax(torch.cat([turned, -turned]))))
    return found


def reference_round(buckets: list[int], valid: list[bool], chunk: int, causal: bool) -> Tensor:
    """P_i of one round as a T×T mask, with chunks counted within each bucket; a token is not in its own P_i."""
    t = len(buckets)
    chunks = []  # per token the chunk of its bucket
    for i in range(t):
        rank = sum(valid[j] and buckets[j] == buckets[i] for j in range(i))
        chunks.append(rank // chunk)
    seen = torch.zeros(t, t, dtype=torch.bool)
    for i in range(t):
        for j in range(t):
            same = valid[i] and valid[j] and buckets[i] == buckets[j]
            near = chunks[j] in (chunks[i], chunks[i] - 1)
            seen[i, j] = same and near and i != j and (j < i or not causal)
    return seen


def reference_scores(qk: Tensor, scale: float) -> Tensor:
    """scale·q_i·k_j, where keys are normalised queries."""
    keys = qk / torch.sqrt((qk * qk).sum(1, keepdim=True) + 1e-6)
    return scale * qk @ keys.T


def reference_union(qk: Tensor, v: Tensor, rounds: list[Tensor], scale: float) -> Tensor:
    """Eq. 3 over P_i = ∪_r P_i^(r): each key once; a token without keys reads itself."""
    scores, rows = reference_scores(qk, scale), []
    for i in range(qk.shape[0]):
        keys = [j for j in range(qk.shape[0]) if any(seen[i, j] for seen in rounds)]
        rows.append(torch.softmax(scores[i, keys], 0) @ v[keys] if keys else v[i])
    return torch.stack(rows)


def reference_rounds(qk: Tensor, v: Tensor, rounds: list[Tensor], scale: float) -> Tensor:
    """The same in the appendix's form: o_i = Σ_r exp(z_r − z)·o_r, with log N_ij subtracted from every score.

    N_ij is the number of rounds in which i reads j; z_r is the logarithm of a round's normaliser, z that of all.
    """
    scores, count = reference_scores(qk, scale), torch.stack(rounds).double().sum(0)
    rows = []
    for i in range(qk.shape[0]):
        outputs, normalisers = [], []
        for seen in rounds:
            if seen[i].any():
                corrected = (scores[i] - torch.log(count[i]))[seen[i]]
                outputs.append(torch.softmax(corrected, 0) @ v[seen[i]])
                normalisers.append(torch.logsumexp(corrected, 0))
        if outputs:
            shares = torch.softmax(torch.stack(normalisers), 0)
            rows.append(sum(share * o for share, o in zip(shares, outputs, strict=True)))
        else:
            rows.append(v[i])
    return torch.stack(rows)


def reference_bucket_union(
    qk: Tensor,
    v: Tensor,
    rotations: Tensor,
    chunk: int,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
    combine: object = reference_union,
) -> Tensor:
    """Every row and head: qk [B, T, H, D], v [B, T, H, M], rotations [R, H or 1, D, b/2], mask [B, T] -> [B, T, H, M].

    combine: one of the two forms above. The result of an invalid token is zero.
    """
    scale = qk.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for b in range(qk.shape[0]):
        valid = [True] * qk.shape[1] if mask is None else mask[b].tolist()
        off = ~torch.tensor(valid, dtype=torch.bool)[:, None]
        heads = []
        for h in range(qk.shape[2]):
            x, values = qk[b, :, h].double().masked_fill(off, 0), v[b, :, h].double().masked_fill(off, 0)
            rounds = []
            for rotation in rotations.double():
                buckets = reference_buckets(x, rotation[h % rotation.shape[0]])
                rounds.append(reference_round(buckets, valid, chunk, causal))
            heads.append(combine(x, values, rounds, scale))  # type: ignore[operator]
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows)
