"""Attention within chunks of sorted tokens, a bounded number of scores at a time, and the sum over rounds.

All rounds form one list of chunks, and each block of queries reads the chunks of its window. A block is a chunk of
queries; for few queries, such as the one of a decoding step, it is a single query. Forward and backward each gather
the keys of some blocks at a time: where there are many, the backward computes their scores again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mnemos.ops.dropout import dropout as drop

SCORES_AT_A_TIME = {"cpu": 2**22, "cuda": 2**26}
ITSELF = -1e5  # a token's score with itself: below every other score, and above what may not be read


def attend_in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Tensor | None,
    valid: Tensor | None,
    chunk: int,
    window: Sequence[int],
    causal: bool,
    dropout: float,
    keep: int,
) -> Tensor:
    """Outputs of the last `keep` of T tokens, N rows: q, k [N, T, D], v [N, T, M] -> [N, keep, M].

    bucket [N, R, T]: the buckets of each round; None: one round of one chunk that holds all tokens, T ≤ chunk. valid
    [N, T] bool. window: the chunks that a chunk reads, relative to itself.
    """
    rows, t, _ = q.shape
    if bucket is None:
        order, window = torch.arange(t, device=q.device).expand(rows, 1, t), (0,)
    else:
        order = _sort(bucket, valid, chunk)
    rounds, length = order.shape[1], order.shape[2]
    slot = torch.empty_like(order).scatter_(2, order, torch.arange(length, device=q.device).expand(order.shape))
    slot = (slot + length * torch.arange(rounds, device=q.device)[:, None])[:, :, t - keep : t]
    position = torch.arange(length, device=q.device).expand(rows, length)
    if length > t or valid is not None:  # slots of no token, and invalid tokens, are beyond every position
        exists = position < t if valid is None else F.pad(valid, (0, length - t))
        position = position.masked_fill(~exists, length)
    chunks = order.reshape(rows, -1, min(chunk, length))
    if keep > chunks.shape[1] // rounds:
        queries, own = chunks, torch.arange(chunks.shape[1], device=q.device).expand(chunks.shape[:2])
    else:
        queries = torch.arange(t - keep, t, device=q.device).expand(rows, rounds, keep).reshape(rows, -1, 1)
        own = slot.reshape(rows, -1) // chunks.shape[2]
    y, z = _over_blocks((q, k, v), queries, own, chunks, window, position, causal, dropout)
    if queries is chunks:
        y, z = (_pick(x.flatten(1, 2), slot.flatten(1)) for x in (y, z))
    y, z = (x.reshape(rows, rounds, keep, -1) for x in (y, z))
    return y[:, 0] if rounds == 1 else (z.softmax(1) * y).sum(1)


def _sort(bucket: Tensor, valid: Tensor | None, chunk: int) -> Tensor:
    """The tokens of each round sorted by (bucket, position), [N, R, whole chunks]; a slot of no token is T or more.

    Invalid tokens, and the slots that fill the last chunk, are at the end.
    """
    end = 2**31  # beyond every bucket, and exact as the float that `pad` takes
    if valid is not None:
        bucket = bucket.masked_fill(~valid[:, None], end)
    bucket = F.pad(bucket, (0, -bucket.shape[2] % chunk), value=end)
    return bucket.argsort(dim=-1, stable=True)


def _over_blocks(
    tensors: tuple[Tensor, Tensor, Tensor],
    queries: Tensor,
    own: Tensor,
    chunks: Tensor,
    window: Sequence[int],
    position: Tensor,
    causal: bool,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Outputs [N, blocks, queries, M] and logarithms of the normalisers [N, blocks, queries, 1] of all blocks.

    queries [N, blocks, queries]: tokens; own [N, blocks]: the chunk around which a block's window lies.
    """
    rows, blocks, each = queries.shape
    width = len(window) * chunks.shape[2]
    most = SCORES_AT_A_TIME.get(queries.device.type, SCORES_AT_A_TIME["cpu"])
    step = max(1, most // (rows * each * width))
    offsets = torch.tensor(list(window), device=own.device)
    around = (own[..., None] + offsets) % chunks.shape[1]  # [N, blocks, W]
    found = []
    for start in range(0, blocks, step):
        part = slice(start, start + step)
        keys = _pick(chunks, around[:, part].flatten(1)).unflatten(1, (-1, len(window))).flatten(2)
        given = (*tensors, queries[:, part], keys, position, causal, dropout)
        if step < blocks and torch.is_grad_enabled():
            found.append(checkpoint(_attend, *given, use_reentrant=False))
        else:
            found.append(_attend(*given))
    y, z = zip(*found, strict=True)
    return torch.cat(y, 1), torch.cat(z, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, position: Tensor, causal: bool, dropout: float
) -> tuple[Tensor, Tensor]:
    """Attention of each block's queries [N, blocks, i] to its keys [N, blocks, j]: outputs and log-normalisers."""
    i, j = (position.gather(1, tokens.flatten(1)).view(tokens.shape) for tokens in (queries, keys))
    last = q.shape[1] - 1  # slots of no token stand for the last one, which their position hides
    q, k, v = (
        _pick(x, tokens.clamp(max=last).flatten(1)).unflatten(1, tokens.shape[1:])
        for x, tokens in ((q, queries), (k, keys), (v, keys))
    )
    i, j = i[..., None], j[..., None, :]
    hidden = j > i if causal else j == position.shape[1]
    scores = (q @ k.mT).masked_fill(hidden, -torch.inf).masked_fill(i == j, ITSELF)
    z = scores.logsumexp(-1, keepdim=True)
    return drop((scores - z).exp(), dropout) @ v, z


def _pick(x: Tensor, at: Tensor) -> Tensor:
    """x[n, at[n]] for every row: x [N, L, D], at [N, K] -> [N, K, D]. Rows are one list: faster than `gather`."""
    first = torch.arange(x.shape[0], device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, (at + first).flatten()).view(*at.shape, *x.shape[2:])
