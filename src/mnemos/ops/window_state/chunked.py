"""Attention with a window, sinks and a state in PyTorch, over blocks of tokens: `read` computes a call.

Key columns are those of the window that the state brings, then those of the call. A query of column i sees the columns
i + 1 … i + w near; columns up to i are far, of which those of earlier blocks are in sums S and z at the block's start.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.ops.delta import KEY_EPS, delta_rule

from .state import Far, Sizes, WindowState

LARGEST, SMALLEST = 256, 64  # the size of a block, which is that of the window between these
TOGETHER = 512  # tokens that are computed at once


class Tokens(NamedTuple):
    """The tokens of a call: q and sink_q [B, Hk, G, T, D], k [B, Hk, T, D], v [B, Hk, T, M]; raw_q, raw_k as q, k.

    sink_q None: q. raw_q None: features are computed of q and k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink_q: Tensor | None
    raw_q: Tensor | None
    raw_k: Tensor | None

    def part(self, piece: slice) -> "Tokens":
        """Those of some columns."""
        return self.map(lambda x: x[..., piece, :])

    def take(self, order: Tensor) -> "Tokens":
        """The columns `order` [B, T]."""
        return self.map(lambda x: gather(x, order))

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same with `fn` of each tensor."""
        sink_q, raw_q, raw_k = (x if x is None else fn(x) for x in self[3:])
        return Tokens(fn(self.q), fn(self.k), fn(self.v), sink_q, raw_q, raw_k)


def gather(x: Tensor, order: Tensor) -> Tensor:
    """The columns `order` [B, N] of x [B, ..., T, D]."""
    index = order.view(len(order), *[1] * (x.dim() - 3), order.shape[1], 1)
    return x.gather(-2, index.expand(*x.shape[:-2], order.shape[1], x.shape[-1]))


def read(
    tokens: Tokens, sizes: Sizes, far: Far | None, state: WindowState, mask: Tensor | None
) -> tuple[Tensor, WindowState]:
    """y [B, Hk, G, T, M] and the state after the call. mask [B, T] bool: True = valid; y of padding is 0."""
    t = tokens.q.shape[-2]
    if t > TOGETHER:
        outputs = []
        for start in range(0, t, TOGETHER):
            piece = slice(start, start + TOGETHER)
            y, state = read(tokens.part(piece), sizes, far, state, None if mask is None else mask[:, piece])
            outputs.append(y)
        return torch.cat(outputs, -2), state
    if mask is None:
        return _read(tokens, sizes, far, state, None)
    padding = ~mask[:, None, :, None]  # may be NaN, which 0 times it stays
    tokens = tokens.map(lambda x: x.masked_fill(padding if x.dim() == 4 else padding[:, :, None], 0))
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # valid tokens first
    y, state = _read(tokens.take(order), sizes, far, state, mask.sum(1))
    y = gather(y, order.argsort(1))
    return y.masked_fill(~mask[:, None, None, :, None], 0), state


def _read(
    tokens: Tokens, sizes: Sizes, far: Far | None, state: WindowState, count: Tensor | None
) -> tuple[Tensor, WindowState]:
    """The same for rows whose first `count` [B] tokens are valid (None: all)."""
    wide = state.s.dtype
    t, window = tokens.q.shape[-2], sizes.window
    k = torch.cat([state.k, tokens.k], -2)
    v = torch.cat([state.v, tokens.v], -2)
    raw = None if tokens.raw_k is None else torch.cat([state.raw, tokens.raw_k], -2)
    after = _advance(k, v, raw, tokens, sizes, state, count)
    size = min(max(window, SMALLEST), LARGEST, t)
    blocks = -(-t // size)
    pad = blocks * size - t
    # [B, columns]: numbers of the key columns in their rows; below 0 there is no token.
    numbers = state.seen[:, None] - window + torch.arange(window + blocks * size, device=k.device)

    def into_blocks(x: Tensor) -> Tensor:
        """[..., T, D] -> [..., blocks, size, D]"""
        return _pad(x.to(wide), pad).unflatten(-2, (blocks, size))

    def around(x: Tensor) -> Tensor:
        """[B, Hk, w + T, D] -> [B, Hk, blocks, w + size, D]: what the queries of a block may see."""
        return _pad(x.to(wide), pad).unfold(-2, window + size, size).mT

    q = into_blocks(tokens.q) * sizes.scale
    group = q.shape[2]
    q = q.transpose(2, 3).flatten(3, 4)  # [B, Hk, blocks, G·size, D]
    a, c = torch.arange(size, device=k.device)[:, None], torch.arange(window + size, device=k.device)
    near = (c > a) & (c <= a + window)
    near = near & (numbers >= 0).unfold(1, window + size, size)[:, :, None]  # [B, blocks, size, w + size]
    near = near[:, None, :, None]
    scores = _cap(q @ around(k).mT, sizes.softcap).unflatten(3, (group, size)).masked_fill_(~near, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    if sizes.sinks:
        meeting = tokens.q if tokens.sink_q is None else tokens.sink_q
        found = _cap((into_blocks(meeting) * sizes.scale) @ after.sink_k.to(wide)[:, :, None, None].mT, sizes.softcap)
        found = found.transpose(2, 3)  # [B, Hk, blocks, G, size, s]
        place = (numbers[:, window:] - window).unflatten(1, (blocks, size))[..., None]
        away = torch.arange(sizes.sinks, device=k.device) <= place
        found = found.masked_fill_(~away[:, None, :, None], -torch.inf)
        largest = torch.maximum(largest, found.amax(-1, keepdim=True))
        met = (found - largest).exp_().flatten(3, 4)  # [B, Hk, blocks, G·size, s]
    weights = (scores - largest).exp_().flatten(3, 4)
    y, norm = weights @ around(v), weights.sum(-1, keepdim=True)
    if far is not None:
        far_y, far_norm, sums, norms = _read_far(
            tokens, k if raw is None else raw, v, numbers, sizes, far, state, count
        )
        y, norm, after = y + far_y, norm + far_norm, after._replace(s=sums, z=norms)
    if sizes.sinks:
        y = y + met @ after.sink_v.to(wide)[:, :, None]
        norm = norm + met.sum(-1, keepdim=True)
    y = (y / norm).unflatten(3, (group, size)).transpose(2, 3).flatten(3, 4)[..., :t, :]
    return y.to(tokens.v.dtype), after


def _cap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _pad(x: Tensor, count: int) -> Tensor:
    """x [.., T, D] with so many columns of zeros after the last; itself if there are none."""
    return F.pad(x, (0, 0, 0, count)) if count else x


def _read_far(
    tokens: Tokens,
    keys: Tensor,
    v: Tensor,
    numbers: Tensor,
    sizes: Sizes,
    far: Far,
    state: WindowState,
    count: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """γ Σ_far φ·φ v [B, Hk, blocks, G·size, M], the same without v [.., 1], and S and z after the call.

    keys, v [B, Hk, w + T, ·]: of the key columns, whose numbers are `numbers` [B, w + T].
    """
    wide, (group, t) = state.s.dtype, tokens.q.shape[2:4]
    size = min(max(sizes.window, SMALLEST), LARGEST, t)
    blocks = -(-t // size)
    pad = blocks * size - t
    moved = numbers[:, :t] >= sizes.sinks  # the columns that leave the window in this call, without sinks
    if count is not None:
        moved = moved & (torch.arange(t, device=v.device) < count[:, None])
    still = ~moved[:, None, :, None]
    fk = far.key(keys[..., :t, :].to(wide))
    added, one = v[..., :t, :].to(wide), None
    if far.beta is not None:
        fk = fk * torch.rsqrt(fk.square().sum(-1, keepdim=True) + KEY_EPS)
    fk = fk.masked_fill(still, 0)
    if far.beta is not None:
        added, one = _correct(fk, added, far.beta.to(wide), far.decay, state, moved)
        one = _pad(one[..., None], pad).unflatten(-2, (blocks, size))
    fk, added = (_pad(x, pad).unflatten(-2, (blocks, size)) for x in (fk, added))
    fq = far.query((tokens.q if tokens.raw_q is None else tokens.raw_q).flatten(1, 2).to(wide))
    fq = _pad(fq, pad).unflatten(1, (-1, group)).unflatten(-2, (blocks, size))
    fq = fq.transpose(2, 3).flatten(3, 4)  # [B, Hk, blocks, G·size, F]
    inside = (fq @ fk.mT).unflatten(3, (group, size)).tril_()  # [B, Hk, blocks, G, size, size]
    end = fk  # features with what is left at the block's end
    if far.decay:
        age = _age(moved, far.decay, (blocks, size), wide)
        inside = inside * (age[..., None] - age[..., None, :]).clamp(max=0).exp()[:, :, :, None]
        fq = fq * age.exp().repeat(1, 1, 1, group)[..., None]
        end = fk * (age[..., -1:] - age).exp()[..., None]
    inside = inside.flatten(3, 4)
    sums = torch.cat([state.s[:, :, None], end.mT @ added], 2)
    norms = torch.cat([state.z[:, :, None], end.sum(-2) if one is None else (end * one).sum(-2)], 2)
    if far.decay:
        kept = age[..., -1].exp().unbind(2)
        sums, norms = _carry(sums, [x[..., None, None] for x in kept]), _carry(norms, [x[..., None] for x in kept])
    else:
        sums, norms = sums.cumsum(2), norms.cumsum(2)
    y = fq @ sums[:, :, :-1] + inside @ added
    norm = fq @ norms[:, :, :-1, :, None] + (inside.sum(-1, keepdim=True) if one is None else inside @ one)
    norm = norm if one is None else norm.clamp(min=0)
    gamma = far.gamma.to(wide).view(-1, 1, group, 1).expand(-1, blocks, -1, size).reshape(-1, blocks, group * size, 1)
    # Copies: a view of the last block would hold all of them.
    return gamma * y, gamma * norm, sums[:, :, -1].clone(), norms[:, :, -1].clone()


def _age(moved: Tensor, decay: float, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """ln of what is left at each token of what S had when its block began: moved [B, T] -> [B, 1, blocks, size]."""
    count = F.pad(moved, (0, shape[0] * shape[1] - moved.shape[1])).unflatten(1, shape).cumsum(2)
    return decay * count[:, None].to(dtype)


def _carry(x: Tensor, kept: list[Tensor]) -> Tensor:
    """A state and what blocks add to it [B, Hk, 1 + blocks, ...] -> the state before each block and after the last.

    kept: of each block, what it leaves of the state before it.
    """
    found, *added = x.unbind(2)
    states = [found]
    for factor, one in zip(kept, added, strict=True):
        found = factor * found + one
        states.append(found)
    return torch.stack(states, 2)


def _correct(
    fk: Tensor, v: Tensor, beta: Tensor, decay: float, state: WindowState, moved: Tensor
) -> tuple[Tensor, Tensor]:
    """What the delta rule adds for every token, u_t = β (v_t − e^g S_{t−1}ᵀ k_t), and the same of a value of 1.

    The kernel's outputs for queries that are the next keys are what those keys read.
    """
    keys = fk.transpose(1, 2)
    values = F.pad(v.transpose(1, 2), (0, 1), value=1.0)
    start = torch.cat([state.s, state.z[..., None]], -1)
    first = (keys[:, 0, :, None] @ start).transpose(1, 2)  # [B, 1, Hk, M + 1]
    ahead = F.pad(keys[:, 1:], (0, 0, 0, 0, 0, 1))
    rate = beta.expand(*keys.shape[:3])
    every = torch.full_like(rate, decay) if decay else None
    read, _ = delta_rule(ahead, keys, values, rate, every, start, moved, scale=1.0)
    found = math.exp(decay) * torch.cat([first, read[:, :-1]], 1)
    u = (rate[..., None] * (values - found)).transpose(1, 2)
    u = u.masked_fill(~moved[:, None, :, None], 0)
    return u[..., :-1], u[..., -1]


def _advance(
    k: Tensor,
    v: Tensor,
    raw: Tensor | None,
    tokens: Tokens,
    sizes: Sizes,
    state: WindowState,
    count: Tensor | None,
) -> WindowState:
    """The state with the window and the sinks after the call, and S and z before it."""
    t, window = tokens.q.shape[-2], sizes.window
    if count is None:
        kept = [x[..., t:, :].clone() for x in (k, v)]  # a view would hold all tokens
        raw_kept = state.raw if raw is None else raw[..., t:, :].clone()
        seen = state.seen + t
    else:
        order = count[:, None] + torch.arange(window, device=k.device)
        kept = [gather(x, order) for x in (k, v)]
        raw_kept = state.raw if raw is None else gather(raw, order)
        seen = state.seen + count
    sinks = [state.sink_k, state.sink_v]
    if sizes.sinks:
        place = torch.arange(sizes.sinks, device=k.device) - state.seen[:, None]  # [B, s]: the column in the call
        old = (place < 0)[:, None, :, None]
        empty = (place >= (t if count is None else count[:, None]))[:, None, :, None]
        order = place.clamp(0, t - 1)
        sinks = [
            torch.where(old, before, gather(x, order).masked_fill(empty, 0))
            for before, x in zip(sinks, (tokens.k, tokens.v), strict=True)
        ]
    return WindowState(kept[0], kept[1], raw_kept, sinks[0], sinks[1], state.s, state.z, seen)
