"""Reformer attention by its equations (Kitaev et al. 2020, section 2), one token at a time, in float64.

Tests compare the fast path with it, so it shares no code with it and uses only elementary functions. Gradients are
autograd's. One row and head is computed at a time: qk [T, D], v [T, M], a round's rotations [D, n/2].
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def reference_bucket(x: Tensor, rotations: Sequence[Tensor]) -> int:
    """h(x) = argmax([xR; −xR]); of several hashes the first counts ones, the second counts n₁s, and so on."""
    found, size = 0, 1
    for rotation in rotations:
        turned = x @ rotation
        found += size * int(torch.argmax(torch.cat([turned, -turned])))
        size *= 2 * rotation.shape[1]
    return found


def reference_chunks(buckets: list[int], valid: list[bool], chunk: int) -> list[list[int]]:
    """One round: the tokens sorted by (bucket, position), in chunks. Padding to whole chunks, −1, is at the end."""
    t = len(buckets)
    tokens = sorted((i for i in range(t) if valid[i]), key=lambda i: (buckets[i], i))
    tokens += [-1] * (-(-t // chunk) * chunk - len(tokens))
    return [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]


def reference_row(
    qk: Tensor, v: Tensor, rounds: list[list[list[int]]], causal: bool, back: int, ahead: int
) -> dict[int, Tensor]:
    """The outputs of a row and head's valid tokens, given the chunks of each round."""
    keys = qk / torch.sqrt((qk * qk).sum(1, keepdim=True) + 1e-6 * qk.shape[1])
    circle = [chunk for chunks in rounds for chunk in chunks]
    normalisers: dict[int, list[Tensor]] = {}
    outputs: dict[int, list[Tensor]] = {}
    for place, chunk in enumerate(circle):
        around = [j for offset in range(-back, ahead + 1) for j in circle[(place + offset) % len(circle)]]
        for i in (i for i in chunk if i >= 0):
            read = [j for j in around if j >= 0 and j != i and (j < i or not causal)]
            if read:  # a round in which a token can read only itself has the weight e^(−10⁵ − z), which is zero
                scores = keys[read] @ qk[i]
                normalisers.setdefault(i, []).append(torch.log(torch.exp(scores).sum()))
                outputs.setdefault(i, []).append(torch.exp(scores) @ v[read] / torch.exp(scores).sum())
            else:
                outputs.setdefault(i, [])
    found = {}
    for i, parts in outputs.items():
        if parts:
            z = torch.log(sum(torch.exp(part) for part in normalisers[i]))  # type: ignore[arg-type]
            pairs = zip(normalisers[i], parts, strict=True)
            found[i] = torch.stack([torch.exp(part - z) * o for part, o in pairs]).sum(0)
        else:  # no other token in any round
            found[i] = v[i]
    return found


def reference_reformer(
    qk: Tensor,
    v: Tensor,
    rotations: Sequence[Tensor],
    chunk: int,
    causal: bool,
    mask: Tensor | None = None,
    back: int = 1,
    ahead: int = 0,
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
            rounds = []
            for r in range(rotations[0].shape[0] if t > chunk else 0):
                turns = [rotation[r, head].double() for rotation in rotations]
                rounds.append(
                    reference_chunks([reference_bucket(x[i].detach(), turns) for i in range(t)], valid, chunk)
                )
            only = [[[i if valid[i] else -1 for i in range(t)]]]
            found = reference_row(x, values, rounds, causal, back, ahead) if rounds else {}
            found = found or reference_row(x, values, only, causal, 0, 0)
            heads.append(torch.stack([found.get(i, values[i] * 0) for i in range(t)]))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows)
