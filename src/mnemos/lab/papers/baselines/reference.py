"""The definitions of BigBird, Reformer and the mixture of logistics, one token or level at a time, in float64.

Tests compare the fast paths with them, so they share no code with these and use only elementary functions. Gradients
are autograd's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# ---- block-sparse attention (Zaheer et al. 2020, section 2), one query at a time ----


def reference_blocks(row: int, blocks: int, window: int, ends: int, drawn: list[int]) -> list[int]:
    """The blocks that block `row` reads. A random block that is read already is listed again."""
    if row < ends or row >= blocks - ends or blocks <= 2 * ends + window + len(drawn):
        return list(range(blocks))
    return [j for j in range(blocks) if j < ends or j >= blocks - ends or abs(j - row) <= (window - 1) / 2] + drawn


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
                at, count = i // block - ends, random_blocks.shape[1]
                drawn = (
                    random_blocks[head, min(max(at, 0), count - 1)].tolist() if count else [0] * random_blocks.shape[2]
                )
                read = reference_blocks(i // block, n, window, ends, drawn)
                keys = [j for part in read for j in range(part * block, min(t, (part + 1) * block)) if valid[j]]
                scores = k[row, keys, head].double() @ q[row, i, head].double() / d**0.5
                weights = torch.exp(scores - scores.max().detach())
                heads.append(weights @ v[row, keys, head].double() / weights.sum())
            queries.append(torch.stack(heads))
        rows.append(torch.stack(queries))
    return torch.stack(rows)


# ---- Reformer attention (Kitaev et al. 2020, section 2): one row and head at a time, qk [T, D], v [T, M] ----


def reference_bucket(x: Tensor, rotations: Sequence[Tensor]) -> int:
    """h(x) = argmax([xR; −xR]); of several hashes the first counts ones, the second counts n₁s, and so on."""
    bucket, size = 0, 1
    for rotation in rotations:
        turned = x @ rotation
        bucket += size * int(torch.argmax(torch.cat([turned, -turned])))
        size *= 2 * rotation.shape[1]
    return bucket


def reference_chunks(buckets: list[int], valid: list[bool], chunk: int) -> list[list[int]]:
    """One round: the tokens sorted by (bucket, position), in chunks. Padding to whole chunks, −1, is at the end."""
    t = len(buckets)
    tokens = sorted((i for i in range(t) if valid[i]), key=lambda i: (buckets[i], i))
    tokens += [-1] * (-(-t // chunk) * chunk - len(tokens))
    return [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]


def reference_row(qk: Tensor, v: Tensor, rounds: list[list[list[int]]], causal: bool, back: int) -> dict[int, Tensor]:
    """The outputs of a row and head's valid tokens, given the chunks of each round."""
    keys = qk / torch.sqrt((qk * qk).sum(1, keepdim=True) + 1e-6 * qk.shape[1])
    circle = [chunk for chunks in rounds for chunk in chunks]
    normalisers: dict[int, list[Tensor]] = {}
    outputs: dict[int, list[Tensor]] = {}
    for at, chunk in enumerate(circle):
        around = [j for offset in range(-back, 1) for j in circle[(at + offset) % len(circle)]]
        for i in (i for i in chunk if i >= 0):
            read = [j for j in around if j >= 0 and j != i and (j < i or not causal)]
            if read:  # a round in which a token can read only itself has the weight e^(−10⁵ − z), which is zero
                scores = keys[read] @ qk[i]
                normalisers.setdefault(i, []).append(torch.log(torch.exp(scores).sum()))
                outputs.setdefault(i, []).append(torch.exp(scores) @ v[read] / torch.exp(scores).sum())
            else:
                outputs.setdefault(i, [])
    combined = {}
    for i, parts in outputs.items():
        if parts:
            z = torch.log(sum(torch.exp(part) for part in normalisers[i]))  # type: ignore[arg-type]
            pairs = zip(normalisers[i], parts, strict=True)
            combined[i] = torch.stack([torch.exp(part - z) * o for part, o in pairs]).sum(0)
        else:  # no other token in any round
            combined[i] = v[i]
    return combined


def reference_reformer(
    qk: Tensor,
    v: Tensor,
    rotations: Sequence[Tensor],
    chunk: int,
    causal: bool,
    mask: Tensor | None = None,
) -> Tensor:
    """Every row and head: qk [B, T, H, D], v [B, T, H, M], each of rotations [R, H, D, n/2] -> [B, T, H, M].

    The result of an invalid token is zero. A sequence of at most one chunk is one chunk, and is not hashed.
    """
    b, t, h, _ = qk.shape
    rows = []
    for row in range(b):
        valid = [True] * t if mask is None else mask[row].tolist()
        heads = []
        for head in range(h):
            off = ~torch.tensor(valid)[:, None]
            x, values = qk[row, :, head].double().masked_fill(off, 0), v[row, :, head].double().masked_fill(off, 0)
            rounds, back = [], 1
            for r in range(rotations[0].shape[0] if t > chunk else 0):
                turns = [rotation[r, head].double() for rotation in rotations]
                buckets = [reference_bucket(x[i].detach(), turns) for i in range(t)]
                rounds.append(reference_chunks(buckets, valid, chunk))
            if not rounds:  # one chunk of all
                rounds, back = [[[i if valid[i] else -1 for i in range(t)]]], 0
            y = reference_row(x, values, rounds, causal, back)
            heads.append(torch.stack([y.get(i, values[i] * 0) for i in range(t)]))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows)


# ---- the mixture of discretised logistics (Salimans et al. 2017, eq. 2) ----


def probabilities(parameters: Tensor, levels: int = 256) -> Tensor:
    """P(x = n) for every level n (Salimans et al. 2017, eq. 2), by differences of distribution functions.

    parameters [.., 3K]: K logits, K means, K log-scales. Levels are evenly spaced from −1 to 1; each has the interval
    of half a step to both sides, the first and the last extend to infinity. Returns [.., levels] float64.
    """
    logits, means, log_scales = parameters.double().chunk(3, -1)
    share = torch.softmax(logits, -1)
    scales = torch.exp(log_scales.clamp(min=-7))
    every = []
    for n in range(levels):
        x = 2 * n / (levels - 1) - 1
        below = 0.0 if n == 0 else torch.sigmoid((x - 1 / (levels - 1) - means) / scales)
        above = 1.0 if n == levels - 1 else torch.sigmoid((x + 1 / (levels - 1) - means) / scales)
        every.append((share * (above - below)).sum(-1))
    return torch.stack(every, -1)
