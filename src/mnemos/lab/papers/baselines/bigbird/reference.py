"""Block-sparse attention by its definition (Zaheer et al. 2020, section 2), one query at a time, in float64.

Tests compare the fast path with it, so it shares no code with it and uses only elementary functions. Gradients are
autograd's.
"""

import torch
from torch import Tensor


def reference_blocks(row: int, blocks: int, window: int, ends: int, drawn: list[int]) -> list[int]:
    """The blocks that block `row` reads. A random block that is read already is listed again."""
    if row < ends or row >= blocks - ends or blocks <= 2 * ends + window + len(drawn):
        return list(range(blocks))
    found = [j for j in range(blocks) if j < ends or j >= blocks - ends or abs(j - row) <= (window - 1) / 2]
    return found + drawn


def reference_block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    random_blocks: Tensor,
    block: int,
    window: int = 3,
    ends: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """q, k [B, T, H, D], v [B, T, H, M], random_blocks [H, n − 2·ends, R] -> [B, T, H, M]; 0 for invalid tokens."""
    b, t, h, d = q.shape
    n = -(-t // block)
    rows = []
    for row in range(b):
        valid = [True] * t if mask is None else mask[row].tolist()
        queries = []
        for i in range(t):
            heads = []
            for head in range(h):
                if not valid[i]:
                    heads.append(torch.zeros(v.shape[3], dtype=torch.float64))
                    continue
                place, count = i // block - ends, random_blocks.shape[1]
                drawn = random_blocks[head, min(max(place, 0), count - 1)].tolist() if count else []
                drawn = drawn if count else [0] * random_blocks.shape[2]
                read = reference_blocks(i // block, n, window, ends, drawn)
                keys = [j for part in read for j in range(part * block, min(t, (part + 1) * block)) if valid[j]]
                scores = k[row, keys, head].double() @ q[row, i, head].double() / d**0.5
                weights = torch.exp(scores - scores.max().detach())
                heads.append(weights @ v[row, keys, head].double() / weights.sum())
            queries.append(torch.stack(heads))
        rows.append(torch.stack(queries))
    return torch.stack(rows)
