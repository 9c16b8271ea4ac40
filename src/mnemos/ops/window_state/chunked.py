"""Attention with a window, sinks and a state in PyTorch: what it is made of, and blocks of tokens.

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

LARGEST, SMALLEST = 256, 64  # the size of a block, which is that of the window between these


class Sizes(NamedTuple):
    """window w ≥ 1 and sinks s ≥ 0, in tokens; scale of the scores q·k; softcap c: scores become c·tanh(score / c)."""

    window: int
    sinks: int
    scale: float
    softcap: float | None = None


class Far(NamedTuple):
    """How a state holds the tokens between sinks and window.

    query, key: the feature maps [B, H, T, D] -> [B, H, T, F] of H query and of Hk key heads. gamma [H]: the weight γ of
    the far tokens, ≥ 0. beta [Hk]: the rate of the delta rule on [v, 1], with features of keys divided by their length;
    None: sums. decay: the natural logarithm, ≤ 0, of the factor of S and z for each token that enters them.
    """

    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    gamma: Tensor
    beta: Tensor | None = None
    decay: float = 0.0


class WindowState(NamedTuple):
    """The state of B rows, of constant size; zeros are new rows.

    k [B, Hk, w, D] and v [B, Hk, w, M]: the last w tokens, the newest last. raw [B, Hk, w, D]: what their features are
    computed of; [.., 0] if that is k. sink_k [B, Hk, s, D], sink_v [B, Hk, s, M]: the first s tokens. s [B, Hk, F, M]
    and z [B, Hk, F]: the sums over the tokens between, in float32 at least. seen [B] int64: the tokens of each row.
    """

    k: Tensor
    v: Tensor
    raw: Tensor
    sink_k: Tensor
    sink_v: Tensor
    s: Tensor
    z: Tensor
    seen: Tensor


def new_state(k: Tensor, v: Tensor, raw: Tensor | None, sizes: Sizes, far: Far | None) -> WindowState:
    """The state of new rows for k [B, Hk, T, D], v [B, Hk, T, M] and, if features are not k's, raw [B, Hk, T, D]."""
    b, heads = k.shape[:2]
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    features = 0
    if far is not None:
        features = far.key((k if raw is None else raw)[..., :0, :].to(wide)).shape[-1]
    return WindowState(
        k.new_zeros(b, heads, sizes.window, k.shape[-1]),
        v.new_zeros(b, heads, sizes.window, v.shape[-1]),
        k.new_zeros(b, heads, sizes.window, 0 if raw is None else raw.shape[-1]),
        k.new_zeros(b, heads, sizes.sinks, k.shape[-1]),
        v.new_zeros(b, heads, sizes.sinks, v.shape[-1]),
        v.new_zeros(b, heads, features, v.shape[-1], dtype=wide),
        v.new_zeros(b, heads, features, dtype=wide),
        torch.zeros(b, dtype=torch.int64, device=k.device),
    )


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

    def map(self, fn: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same with `fn` of each tensor."""
        sink_q, raw_q, raw_k = (x if x is None else fn(x) for x in self[3:])
        return Tokens(fn(self.q), fn(self.k), fn(self.v), sink_q, raw_q, raw_k)


def gather(x: Tensor, order: Tensor) -> Tensor:
    """The columns `order` [B, N] of x [B, ..., T, D]."""
    index = order.view(len(order), *[1] * (x.dim() - 3), order.shape[1], 1)
    return x.gather(-2, index.expand(*x.shape[:-2], order.shape[1], x.shape[-1]))


def read_blocks(
    tokens: Tokens, sizes: Sizes, far: Far | None, state: WindowState, count: Tensor | None
) -> tuple[Tensor, WindowState]:
    """y [B, Hk, G, T, M] and the state, for rows whose first `count` [B] tokens are valid (None: all)."""
    # --- key columns, and blocks of queries ---
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

    # --- scores of the window ---
    q = into_blocks(tokens.q) * sizes.scale
    group = q.shape[2]
    q = q.transpose(2, 3).flatten(3, 4)  # [B, Hk, blocks, G·size, D]
    a, c = torch.arange(size, device=k.device)[:, None], torch.arange(window + size, device=k.device)
    near = (c > a) & (c <= a + window)
    near = near & (numbers >= 0).unfold(1, window + size, size)[:, :, None]  # [B, blocks, size, w + size]
    near = near[:, None, :, None]
    scores = _cap(q @ around(k).mT, sizes.softcap).unflatten(3, (group, size)).masked_fill_(~near, -torch.inf)
    largest = scores.amax(-1, keepdim=True)

    # --- scores of the sinks that have left the window ---
    if sizes.sinks:
        meeting = tokens.q if tokens.sink_q is None else tokens.sink_q
        sink_keys = after.sink_k.to(wide)[:, :, None, None].mT
        sink_scores = _cap((into_blocks(meeting) * sizes.scale) @ sink_keys, sizes.softcap)
        sink_scores = sink_scores.transpose(2, 3)  # [B, Hk, blocks, G, size, s]
        oldest = (numbers[:, window:] - window).unflatten(1, (blocks, size))[..., None]
        away = torch.arange(sizes.sinks, device=k.device) <= oldest
        sink_scores = sink_scores.masked_fill_(~away[:, None, :, None], -torch.inf)
        largest = torch.maximum(largest, sink_scores.amax(-1, keepdim=True))
        sink_weights = (sink_scores - largest).exp_().flatten(3, 4)  # [B, Hk, blocks, G·size, s]

    # --- one normaliser for all ---
    weights = (scores - largest).exp_().flatten(3, 4)
    y, norm = weights @ around(v), weights.sum(-1, keepdim=True)
    if far is not None:
        far_y, far_norm, sums, norms = _read_far(
            tokens, k if raw is None else raw, v, numbers, sizes, far, state, count
        )
        y, norm, after = y + far_y, norm + far_norm, after._replace(s=sums, z=norms)
    if sizes.sinks:
        y = y + sink_weights @ after.sink_v.to(wide)[:, :, None]
        norm = norm + sink_weights.sum(-1, keepdim=True)
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

    # --- features and values of the tokens that enter the state ---
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

    # --- what queries read of their own block ---
    fq = far.query((tokens.q if tokens.raw_q is None else tokens.raw_q).flatten(1, 2).to(wide))
    fq = _pad(fq, pad).unflatten(1, (-1, group)).unflatten(-2, (blocks, size))
    fq = fq.transpose(2, 3).flatten(3, 4)  # [B, Hk, blocks, G·size, F]
    inside = (fq @ fk.mT).unflatten(3, (group, size)).tril_()  # [B, Hk, blocks, G, size, size]
    end = fk  # features with what is left at the block's end
    if far.decay:
        # The logarithm of what is left at each token of what S had when its block began [B, 1, blocks, size].
        entered = F.pad(moved, (0, pad)).unflatten(1, (blocks, size)).cumsum(2)
        age = far.decay * entered[:, None].to(wide)
        inside = inside * (age[..., None] - age[..., None, :]).clamp(max=0).exp()[:, :, :, None]
        fq = fq * age.exp().repeat(1, 1, 1, group)[..., None]
        end = fk * (age[..., -1:] - age).exp()[..., None]
    inside = inside.flatten(3, 4)

    # --- S and z before each block and after the last: [B, Hk, 1 + blocks, ..] ---
    sums = torch.cat([state.s[:, :, None], end.mT @ added], 2)
    norms = torch.cat([state.z[:, :, None], end.sum(-2) if one is None else (end * one).sum(-2)], 2)
    if far.decay:
        states = [(sums[:, :, 0], norms[:, :, 0])]
        for i, left in enumerate(age[..., -1].exp().unbind(2), 1):
            s, z = states[-1]
            states.append((left[..., None, None] * s + sums[:, :, i], left[..., None] * z + norms[:, :, i]))
        sums, norms = (torch.stack(parts, 2) for parts in zip(*states, strict=True))
    else:
        sums, norms = sums.cumsum(2), norms.cumsum(2)

    # --- y without its normaliser ---
    y = fq @ sums[:, :, :-1] + inside @ added
    norm = fq @ norms[:, :, :-1, :, None] + (inside.sum(-1, keepdim=True) if one is None else inside @ one)
    norm = norm if one is None else norm.clamp(min=0)
    gamma = far.gamma.to(wide).view(-1, 1, group, 1).expand(-1, blocks, -1, size).reshape(-1, blocks, group * size, 1)
    # Copies: a view of the last block would hold all of them.
    return gamma * y, gamma * norm, sums[:, :, -1].clone(), norms[:, :, -1].clone()


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
    reads = math.exp(decay) * torch.cat([first, read[:, :-1]], 1)
    u = (rate[..., None] * (values - reads)).transpose(1, 2)
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
        window_parts = [x[..., t:, :].clone() for x in (k, v)]  # a view would hold all tokens
        window_raw = state.raw if raw is None else raw[..., t:, :].clone()
        seen = state.seen + t
    else:
        order = count[:, None] + torch.arange(window, device=k.device)
        window_parts = [gather(x, order) for x in (k, v)]
        window_raw = state.raw if raw is None else gather(raw, order)
        seen = state.seen + count
    sinks = [state.sink_k, state.sink_v]
    if sizes.sinks:
        column = torch.arange(sizes.sinks, device=k.device) - state.seen[:, None]  # [B, s]: the column in the call
        old = (column < 0)[:, None, :, None]
        empty = (column >= (t if count is None else count[:, None]))[:, None, :, None]
        order = column.clamp(0, t - 1)
        sinks = [
            torch.where(old, before, gather(x, order).masked_fill(empty, 0))
            for before, x in zip(sinks, (tokens.k, tokens.v), strict=True)
        ]
    return WindowState(window_parts[0], window_parts[1], window_raw, sinks[0], sinks[1], state.s, state.z, seen)
