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
from mnemos.ops.softmax_attention import can_attend
from mnemos.ops.softmax_attention.native import attend

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
    # --- key columns ---
    wide = state.s.dtype
    t, window = tokens.q.shape[-2], sizes.window
    k = torch.cat([state.k, tokens.k], -2)
    v = torch.cat([state.v, tokens.v], -2)
    raw = None if tokens.raw_k is None else torch.cat([state.raw, tokens.raw_k], -2)
    after = _advance(k, v, raw, tokens, sizes, state, count)
    # [B, columns]: numbers of the key columns in their rows; below 0 there is no token.
    numbers = state.seen[:, None] - window + torch.arange(window + t, device=k.device)

    # --- the window: y, and the logarithm of the weights' sum and the largest score [B, Hk, G, T, 1] ---
    q, keys, values = (x.to(wide) for x in (tokens.q, k, v))
    read_window = _read_window if sizes.softcap is None and can_attend(q, keys, values) else _read_window_by_blocks
    y, logs, largest = read_window(q, keys, values, numbers >= 0, sizes)

    # --- scores of the sinks that have left the window [B, Hk, G, T, s] ---
    if sizes.sinks:
        meeting = tokens.q if tokens.sink_q is None else tokens.sink_q
        sink_scores = meeting.to(wide).flatten(2, 3) @ (sizes.scale * after.sink_k.to(wide)).mT
        sink_scores = _cap(sink_scores, sizes.softcap).unflatten(2, meeting.shape[2:4])
        away = torch.arange(sizes.sinks, device=k.device) <= numbers[:, :t, None]
        sink_scores = sink_scores.masked_fill(~away[:, None, None], -torch.inf)
        largest = torch.maximum(largest, sink_scores.amax(-1, keepdim=True))

    # --- one normaliser for all ---
    weight = (logs - largest).exp()
    norm = weight
    if sizes.sinks:
        sink_weights = (sink_scores - largest).exp()
        norm = norm + sink_weights.sum(-1, keepdim=True)
    if far is not None:
        far_y, far_norm, sums, norms = _read_far(
            tokens, k if raw is None else raw, v, numbers, sizes, far, state, count
        )
        after = after._replace(s=sums, z=norms)
        gamma = far.gamma.to(wide).view(-1, tokens.q.shape[2], 1, 1)
        norm = norm + gamma * far_norm
    y = y * (weight / norm)
    if far is not None:
        y = torch.addcmul(y, far_y, gamma / norm)
    if sizes.sinks:
        y = y + ((sink_weights / norm).flatten(2, 3) @ after.sink_v.to(wide)).view_as(y)
    return y.to(tokens.v.dtype), after


def _read_window(q: Tensor, k: Tensor, v: Tensor, there: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernels of softmax attention. there [B, w + T]: which key columns are tokens."""
    shape = q.shape[1:3]
    heads = (x.transpose(1, 2) for x in (q.flatten(1, 2), k, v))
    y, logs, largest = attend(*heads, there, True, sizes.window, sizes.scale)
    logs, largest = (x.unflatten(1, shape)[..., None] for x in (logs, largest))
    return y.transpose(1, 2).unflatten(1, shape), logs, largest


def _read_window_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, there: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in PyTorch's operations."""
    (group, t), window = q.shape[2:4], sizes.window
    size, blocks, pad = _block(window, t)

    def around(x: Tensor) -> Tensor:
        """[B, Hk, w + T, D] -> [B, Hk, blocks, w + size, D]: what the queries of a block may see."""
        return _pad(x, pad).unfold(-2, window + size, size).mT

    a, c = torch.arange(size, device=k.device)[:, None], torch.arange(window + size, device=k.device)
    near = (c > a) & (c <= a + window)
    near = near & F.pad(there, (0, pad), value=True).unfold(1, window + size, size)[:, :, None]
    q = _pad(q * sizes.scale, pad).unflatten(-2, (blocks, size)).transpose(2, 3).flatten(3, 4)
    scores = _cap(q @ around(k).mT, sizes.softcap).unflatten(3, (group, size))  # [B, Hk, blocks, G, size, w + size]
    scores = scores.masked_fill_(~near[:, None, :, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    y = (weights.flatten(3, 4) @ around(v)).unflatten(3, (group, size)) / total
    y, logs, largest = (_by_token(x, t) for x in (y, largest + total.log(), largest))
    return y, logs, largest


def _block(window: int, t: int) -> tuple[int, int, int]:
    """Of t tokens the size of a block, how many blocks there are, and the tokens that the last one lacks."""
    size = min(max(window, SMALLEST), LARGEST, t)
    blocks = -(-t // size)
    return size, blocks, blocks * size - t


def _by_token(x: Tensor, t: int) -> Tensor:
    """[B, Hk, blocks, G, size, D] -> [B, Hk, G, T, D]"""
    return x.transpose(2, 3).flatten(3, 4)[..., :t, :]


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
    """Σ_far φ·φ v [B, Hk, G, T, M], the same without v [.., 1], and S and z after the call.

    keys, v [B, Hk, w + T, ·]: of the key columns, whose numbers are `numbers` [B, w + T].
    """
    wide, (group, t) = state.s.dtype, tokens.q.shape[2:4]
    size, blocks, pad = _block(sizes.window, t)

    # --- features and [value, 1] of the tokens that enter the state ---
    moved = numbers[:, :t] >= sizes.sinks  # the columns that leave the window in this call, without sinks
    if count is not None:
        moved = moved & (torch.arange(t, device=v.device) < count[:, None])
    fk = far.key(keys[..., :t, :].to(wide))
    if far.beta is not None:
        fk = fk * torch.rsqrt(fk.square().sum(-1, keepdim=True) + KEY_EPS)
    fk = fk.masked_fill(~moved[:, None, :, None], 0)
    added = F.pad(v[..., :t, :].to(wide), (0, 1), value=1.0)
    start = torch.cat([state.s, state.z[..., None]], -1)
    if far.beta is not None:
        added = _correct(fk, added, far.beta.to(wide), far.decay, start, moved)
    fk, added = (_pad(x, pad).unflatten(-2, (blocks, size)) for x in (fk, added))

    # --- what queries read of their own block ---
    fq = far.query((tokens.q if tokens.raw_q is None else tokens.raw_q).flatten(1, 2).to(wide))
    fq = _pad(fq, pad).unflatten(1, (-1, group)).unflatten(-2, (blocks, size))
    fq = fq.transpose(2, 3).flatten(3, 4)  # [B, Hk, blocks, G·size, F]
    inside = (fq @ fk.mT).unflatten(3, (group, size))  # [B, Hk, blocks, G, size, size]
    end = fk  # features with what is left at the block's end
    if far.decay:
        # The logarithm of what is left at each token of what S had when its block began [B, 1, blocks, size].
        entered = F.pad(moved, (0, pad)).unflatten(1, (blocks, size)).cumsum(2)
        age = far.decay * entered[:, None].to(wide)
        inside = inside * (age[..., None] - age[..., None, :]).clamp(max=0).exp().tril()[:, :, :, None]
        end = fk * (age[..., -1:] - age).exp()[..., None]
    else:
        inside = inside.tril_()

    # --- [S, z] before each block and after the last: [B, Hk, 1 + blocks, F, M + 1] ---
    sums = torch.cat([start[:, :, None], end.mT @ added], 2)
    if far.decay:
        states = [sums[:, :, 0]]
        for new, left in zip(sums[:, :, 1:].unbind(2), age[..., -1, None, None].exp().unbind(2), strict=True):
            states.append(torch.addcmul(new, left, states[-1]))
        sums = torch.stack(states, 2)
    else:
        sums = sums.cumsum(2)

    # --- [y, 1] without its normaliser ---
    before = (fq @ sums[:, :, :-1]).unflatten(3, (group, size))
    read = (inside.flatten(3, 4) @ added).unflatten(3, (group, size))
    read = read + before if not far.decay else torch.addcmul(read, before, age.exp()[:, :, :, None, :, None])
    read = _by_token(read, t)
    norm = read[..., -1:] if far.beta is None else read[..., -1:].clamp(min=0)
    # Copies: a view of the last block would hold all of them.
    return read[..., :-1], norm, sums[:, :, -1, :, :-1].clone(), sums[:, :, -1, :, -1].clone()


def _correct(fk: Tensor, values: Tensor, beta: Tensor, decay: float, start: Tensor, moved: Tensor) -> Tensor:
    """What the delta rule adds for every token, u_t = β (v_t − e^g S_{t−1}ᵀ k_t), of `values` v and S = `start`.

    The kernel's outputs for queries that are the next keys are what those keys read.
    """
    keys, values = fk.transpose(1, 2), values.transpose(1, 2)
    first = (keys[:, 0, :, None] @ start).transpose(1, 2)  # [B, 1, Hk, M + 1]
    ahead = F.pad(keys[:, 1:], (0, 0, 0, 0, 0, 1))
    rate = beta.expand(*keys.shape[:3])
    every = torch.full_like(rate, decay) if decay else None
    read, _ = delta_rule(ahead, keys, values, rate, every, start, moved, scale=1.0)
    reads = math.exp(decay) * torch.cat([first, read[:, :-1]], 1)
    u = (rate[..., None] * (values - reads)).transpose(1, 2)
    return u.masked_fill(~moved[:, None, :, None], 0)


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
