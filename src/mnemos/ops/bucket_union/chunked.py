"""Bucket-union attention of many tokens: sorted by place, so that a query's keys are near it, and in blocks of c.

In the order (row and head, bucket, position), the keys of a query's chunk and of the one before are at most 2c − 1
slots before it and, if not causal, c − 1 slots after it. So a block of c queries finds them in its own block and the
two before (causal), or in these and the next: 3c or 4c keys. The places exclude most of them. All rows and heads form
one list; keys of another row or head are excluded too.

Some blocks are computed at a time. The backward computes the weights again from the normalisers, as flash attention
does. It keeps q, k, v, y, one number per token, and R orders and places.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.once import differentiable_once

from .dense import met

SCORES_AT_A_TIME = {"cpu": 2**19, "cuda": 2**25}  # as many as fit a core's cache, or occupy a device
_LOWEST = -1e30
_LEAST = -80.0  # e^x is negligible below; below −87 exp is also ten times as slow


def attend_in_windows(
    q: Tensor, k: Tensor, v: Tensor, place: Tensor, chunk: int, causal: bool, scale: float, dropout: float
) -> Tensor:
    """Attention of all N tokens: q, k [B, N, H, D], v [B, N, H, M], place [B, N, H, R] -> [B, N, H, M].

    Cost: O(N·R·c·(D + M)·H) time, and R²/2 comparisons per score; O(N·(D + M + R)·H) memory, also for the backward
    (N·R·3c·H bytes more with dropout).
    """
    b, n, h, _ = q.shape
    order, code = _sort(place)
    q, k, v = (x.transpose(1, 2).reshape(b * h * n, -1) for x in (q * scale, k, v))
    y = _Windows.apply(q, k, v, order, code, chunk, causal, dropout)
    return y.view(b, h, n, -1).transpose(1, 2)


def _sort(place: Tensor) -> tuple[Tensor, Tensor]:
    """Per round: the tokens of all rows and heads, sorted, [R, L] with L = B·H·N; and their places, made different
    for different rows and heads, in the tokens' original order, [R, L] int32.
    """
    place = place.permute(3, 0, 2, 1).flatten(1, 2)  # [R, B·H, N]
    ordered, order = torch.sort(place, dim=-1, stable=True)
    # Steps of the new places: 0 for the same place, 1 for the next chunk of the bucket, 2 for anything else.
    step = ordered.diff(dim=-1, prepend=ordered[..., :1]).clamp_(max=2)
    step[..., 0] = 2
    order = order + torch.arange(place.shape[1], device=place.device)[:, None] * place.shape[2]
    order, code = order.flatten(1), step.flatten(1).cumsum(-1, dtype=torch.int32)
    return order, torch.empty_like(code).scatter_(-1, order, code)


class _Slab(NamedTuple):
    """Some blocks of one round: the tokens in their slots, and which scores count.

    keys [(blocks + w − 1)·c]: tokens of the list, unless `outside` is True; queries [blocks·c]: the slots from 2c on;
    counts [blocks, c, w·c]: 1 if the score counts, else 0.
    """

    keys: Tensor
    outside: Tensor
    queries: Tensor
    written: Tensor  # as queries; slots beyond the list write to row L, which is not used
    counts: Tensor


class _Scan:
    """Iterates over the slabs of all rounds."""

    def __init__(self, order: Tensor, code: Tensor, chunk: int, causal: bool, dtype: torch.dtype) -> None:
        self.order, self.code, self.chunk, self.dtype = order, code, chunk, dtype
        self.width = 3 if causal else 4  # blocks of keys per block of queries; the third is its own
        device, self.size = order.device, order.shape[1]
        self.blocks = -(-self.size // chunk)
        self.step = max(1, SCORES_AT_A_TIME.get(device.type, SCORES_AT_A_TIME["cpu"]) // (chunk * chunk * self.width))
        query = torch.arange(2 * chunk, 3 * chunk, device=device)[:, None]
        key = torch.arange(self.width * chunk, device=device)
        self.allowed = (key < query if causal else key != query).int()

    def __iter__(self) -> Iterator[_Slab]:
        c, w = self.chunk, self.width
        behind = (self.blocks + w - 3) * c - self.size
        for r, order in enumerate(self.order):
            slots = F.pad(order, (2 * c, behind), value=self.size)
            for start in range(0, self.blocks, self.step):
                blocks = min(self.step, self.blocks - start)
                written = slots[start * c : (start + blocks + w - 1) * c]
                outside, keys = written == self.size, written.clamp(max=self.size - 1)
                own = slice(2 * c, (2 + blocks) * c)
                counts = self.allowed
                for earlier in range(r, -1, -1):
                    code = self.code[earlier].index_select(0, keys).masked_fill_(outside, -(2**30))
                    same = met(code[own].view(blocks, c, 1) - code.unfold(0, w * c, c)[:, None])
                    # A key that was read in an earlier round does not count again.
                    counts = counts & same if earlier == r else counts.bitwise_and_(same.bitwise_xor_(1))
                yield _Slab(keys, outside, keys[own], written[own], counts.to(self.dtype))

    def views(self, x: Tensor) -> Tensor:
        """The keys of each block, as a view: [(blocks + w − 1)·c, D] -> [blocks, D, w·c]."""
        return x.unfold(0, self.width * self.chunk, self.chunk)

    def fold(self, x: Tensor) -> Tensor:
        """The sum over blocks, slot by slot: [blocks, w·c, D] -> [(blocks + w − 1)·c, D]; the adjoint of `views`."""
        blocks, c, w = x.shape[0], self.chunk, self.width
        total = x.new_zeros(blocks + w - 1, c, x.shape[2])
        for i in range(w):
            total[i : i + blocks] += x[:, i * c : (i + 1) * c]
        return total.flatten(0, 1)


class _Windows(torch.autograd.Function):
    """Attention of scaled q, k [L, D] and v [L, M] by order and code [R, L], in float32 or float64."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, order: Tensor, code: Tensor, chunk: int, causal: bool, dropout: float
    ) -> Tensor:
        walk = _Scan(order, code, chunk, causal, q.dtype)
        y = q.new_zeros(len(q) + 1, v.shape[1])  # Σ e^(score − top)·v over the keys so far
        top = q.new_full((len(q) + 1, 1), _LOWEST)
        norm = torch.zeros_like(top)
        kept = []
        for keys, _, queries, written, counts in walk:
            blocks = len(counts)
            query = q.index_select(0, queries).view(blocks, chunk, -1)
            scores = torch.baddbmm((counts - 1).mul_(-_LOWEST), query, walk.views(k.index_select(0, keys)))
            before = top.index_select(0, written).view(blocks, chunk, 1)
            now = torch.maximum(before, scores.amax(-1, keepdim=True))
            weights = scores.sub_(now).clamp_(min=_LEAST).exp_().mul_(counts)
            shrink = (before - now).clamp_(min=_LEAST).exp_()
            total = norm.index_select(0, written).view(blocks, chunk, 1) * shrink + weights.sum(-1, keepdim=True)
            if dropout:
                kept.append(torch.rand_like(weights) >= dropout)
                weights = weights * kept[-1] / (1 - dropout)
            read = y.index_select(0, written).view(blocks, chunk, -1) * shrink
            read.baddbmm_(weights, walk.views(v.index_select(0, keys)).mT)
            y.index_copy_(0, written, read.flatten(0, 1))
            top.index_copy_(0, written, now.flatten(0, 1))
            norm.index_copy_(0, written, total.flatten(0, 1))
        y, top, norm = y[:-1], top[:-1], norm[:-1]
        alone = norm == 0
        y = torch.where(alone, v, y / norm)
        # A query without keys has the weights e^(score − ∞) = 0.
        log_norm = torch.where(alone, torch.inf, top + norm.log())
        ctx.save_for_backward(q, k, v, y, log_norm, order, code, *kept)
        ctx.chunk, ctx.causal, ctx.dropout = chunk, causal, dropout
        return y

    @staticmethod
    @differentiable_once("bucket_union_attention")
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> Any:
        q, k, v, y, log_norm, order, code, *kept = saved
        walk, c = _Scan(order, code, ctx.chunk, ctx.causal, q.dtype), ctx.chunk
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        dv = torch.where(log_norm == torch.inf, dy, 0)
        through = (dy * y).sum(-1, keepdim=True)  # Σ_j of each weight times its gradient
        for i, (keys, outside, queries, written, counts) in enumerate(walk):
            blocks, beyond = len(counts), (written == len(q))[:, None]
            query = q.index_select(0, queries).view(blocks, c, -1)
            key = walk.views(k.index_select(0, keys))
            value = walk.views(v.index_select(0, keys))
            upstream = dy.index_select(0, queries).masked_fill_(beyond, 0).view(blocks, c, -1)
            # Clamped: scores that do not count may be far above the normaliser.
            weights = (query @ key).sub_(log_norm.index_select(0, queries).view(blocks, c, 1))
            weights = weights.clamp_(_LEAST, 1).exp_().mul_(counts)
            slope = upstream @ value
            used = weights
            if kept:
                keep = kept[i] / (1 - ctx.dropout)
                slope, used = slope * keep, weights * keep
            dv.index_add_(0, keys, walk.fold(used.mT @ upstream).masked_fill_(outside[:, None], 0))
            slope = slope.sub_(through.index_select(0, queries).view(blocks, c, 1)).mul_(weights)
            dq.index_add_(0, queries, (slope @ key.mT).flatten(0, 1).masked_fill_(beyond, 0))
            dk.index_add_(0, keys, walk.fold(slope.mT @ query).masked_fill_(outside[:, None], 0))
        return dq, dk, dv, None, None, None, None, None
