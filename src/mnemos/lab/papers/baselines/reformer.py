"""Reformer (Kitaev et al. 2020) as published: attention in chunks of the tokens sorted by hash. See README.md.

Read `reformer_attention` first: it hashes, sorts, attends in chunks and adds the rounds. All rounds form one list of
chunks, and each block of queries reads its chunk and the one before. Forward and backward each gather the keys of some
blocks at a time, so that the number of scores in memory is bounded.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.config import AttentionConfig
from mnemos.memory.key_values import KeyValues, check_key_values
from mnemos.ops.checks import check_dropout
from mnemos.ops.dense_layer import Linear
from mnemos.ops.dropout import dropout as drop
from mnemos.ops.padding import zero_invalid
from mnemos.ops.precision import full_precision
from mnemos.ops.signature import Signature
from mnemos.registry import register
from mnemos.types import Device, InputError

_CHECK = Signature("reformer_attention", qk="B T H D", v="B T H M", mask="B T bool ?")
WINDOW = (-1, 0)  # the chunks that a chunk reads, relative to itself
SCORES_AT_A_TIME = {"cpu": 2**22, "cuda": 2**26}
ITSELF = -1e5  # a token's score with itself: below every other score, and above what may not be read


@register
@dataclass(frozen=True)
class ReformerConfig(AttentionConfig):
    """Locality-sensitive hashing as published: attention in chunks of the tokens sorted by hash, over several rounds.

    Attributes:
        rounds: the number of hash rounds R. Cost and accuracy grow with it.
        chunk: the number of tokens c per chunk. Sequences of at most c tokens get softmax attention.
        buckets: the number of buckets per round, an even number; None: twice the number of chunks, 2·⌈T/c⌉, as
            the paper recommends. To hash costs O(buckets) per token.
    """

    name: ClassVar[str] = "reformer"
    rounds: int = 4
    chunk: int = 32
    buckets: int | None = None

    def build(self, dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0) -> "ReformerAttention":
        return ReformerAttention(dim, num_heads, causal, dropout, self)


class ReformerAttention(MultiHeadAttention[KeyValues]):
    """Multi-head Reformer self-attention: `y, state = layer(x, state=None, mask=None)`.

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. Queries and keys are one projection; no projection has a
    bias. `reformer_attention` has the equations. Every training forward draws new rotations from PyTorch's
    generator, as the paper does, and none if T ≤ chunk. In evaluation they are always the same.

    causal=True: a token reads only itself and earlier tokens. Yet later tokens move the borders of chunks, and so
    decide which earlier tokens it reads (`future_free` is False); likewise the padding (`padding_free`). The state is a
    `KeyValues` of the N tokens so far, whose k are the shared queries and keys. A call sorts all N+T tokens and returns
    the outputs of the last T; what earlier calls returned stays as it was. A sequence in parts therefore differs from
    the same sequence as a whole (splits "segments"). Not causal: there is no state (None).

    Cost of a call: O((N+T)·R·buckets·D) to hash, and O((N+T)·R·c·D) to attend, or O(T·R·c·D) for T up to (N+T)/c. The
    state is O(N·D) memory per row. Queries and hashes are computed in float32 under any autocast. Raises InputError if
    D is not divisible by H, buckets is odd, or rounds or chunk is below 1.
    """

    future_free = False
    padding_free = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        settings: ReformerConfig | None = None,
    ) -> None:
        super().__init__(dim, num_heads, causal, dropout, splits="segments")
        self.settings = s = settings or ReformerConfig()
        if s.rounds < 1 or s.chunk < 1 or (s.buckets is not None and (s.buckets < 2 or s.buckets % 2)):
            raise InputError(
                "expected at least one round, one token per chunk and an even number of buckets (or None), found "
                f"rounds={s.rounds}, chunk={s.chunk}, buckets={s.buckets}; change them"
            )
        self.query_key, self.value = Linear(dim, dim, bias=False), Linear(dim, dim, bias=False)
        self.output = Linear(dim, dim, bias=False)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> KeyValues:
        return KeyValues.empty(batch_size, self.num_heads, self.dim // self.num_heads, device, dtype)

    def check_state(self, state: KeyValues, batch_size: int) -> None:
        check_key_values(state, batch_size, self.num_heads, self.dim // self.num_heads)

    def rotations(self, length: int, device: Device = None) -> Tensor:
        s, generator = self.settings, None if self.training else torch.Generator().manual_seed(0)
        buckets = s.buckets or 2 * -(-length // s.chunk)
        return draw_rotations(s.rounds, self.num_heads, self.dim // self.num_heads, buckets, generator, device)

    def compute_heads(self, x: Tensor, state: KeyValues | None, mask: Tensor | None) -> tuple[Tensor, KeyValues | None]:
        if torch.compiler.is_exporting():
            raise InputError(
                "Reformer attention draws rotations for the number of tokens, which an exported program leaves open; "
                "use another attention"
            )
        b, t, _ = x.shape
        v = self.value(x).unflatten(-1, (self.num_heads, -1))
        with full_precision(x.device.type):  # under any autocast, because the bucket of a token must not depend on it
            qk = self.query_key(x.to(self.query_key.weight.dtype)).unflatten(-1, (self.num_heads, -1))
        if not self.causal:
            return self._attend(qk, v, mask, t), None
        if state is None:
            return self._attend(qk, v, mask, t), self.empty(b, x.device, v.dtype).append(qk, v, mask)
        new = state.append(qk.to(state.k.dtype), v.to(state.v.dtype), mask)
        return self._attend(new.k, new.v, new.valid, t).to(v.dtype), new

    def _attend(self, qk: Tensor, v: Tensor, valid: Tensor | None, last: int) -> Tensor:
        """Outputs of the last tokens. Where one chunk holds all tokens no rotation is drawn."""
        s, n = self.settings, qk.shape[1]
        unused = qk.new_zeros(s.rounds, 1, qk.shape[3], 1)
        rotations = self.rotations(n, qk.device) if n > s.chunk else unused
        return reformer_attention(qk, v, rotations, s.chunk, self.causal, valid, self.active_dropout, last)


def draw_rotations(
    rounds: int,
    heads: int,
    width: int,
    buckets: int,
    generator: torch.Generator | None = None,
    device: Device = None,
) -> Tensor:
    """Standard normal numbers [rounds, heads, width, buckets/2], drawn from `generator`.

    None: PyTorch's default generator. A generator draws on its own device, so that equal seeds give equal rotations.
    """
    source = device if generator is None else generator.device
    return torch.randn(rounds, heads, width, buckets // 2, generator=generator, device=source).to(device)


def reformer_attention(
    qk: Tensor,
    v: Tensor,
    rotations: Tensor,
    chunk: int = 32,
    causal: bool = True,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    last: int | None = None,
) -> Tensor:
    """y_i = Σ_r exp(z_i^r − z_i)·o_i^r, z_i = log Σ_r exp z_i^r: attention in chunks, combined over rounds.

    In round r the tokens are sorted by (bucket, position), where a token's bucket is argmax([xR; −xR]), and cut into
    chunks of c. o_i^r is softmax attention of token i over its own chunk and the one before, and z_i^r the logarithm
    of its normaliser. The scores are q_i·k_j with keys of length one, k = q/|q|. A token reads itself only if it can
    read no other token. Causal: only tokens at earlier positions. The chunks of all rounds form one circle: the first
    chunk of a round looks back to the last chunk of the round before. README.md says why.

    qk [B, T, H, D], v [B, T, H, M]. rotations: [R, H or 1, D, n/2] for R rounds of n buckets (`draw_rotations`). mask
    [B, T] bool, True = valid: an invalid token is read by no other, is sorted to the end of every round, and has the
    result 0. dropout: the fraction of the weights dropped. last: compute only the outputs of the last so many tokens.
    -> y [B, T or last, H, M] in v's dtype, computed in float32 (float64 for float64).

    T ≥ 0, of any divisibility. At T ≤ c there is one chunk and no hash: y is softmax attention.
    Hashing has no gradient; qk gets the gradients of queries and of keys.
    Cost: O(T·R·2·c·(D + M)·H) time and O(T·R·(D + M)·H) memory.
    Raises InputError for shapes, dtypes or dropout that do not fit.
    """
    _CHECK(qk=qk, v=v, mask=mask)
    check_dropout(dropout)
    b, t, h, d = qk.shape
    keep = t if last is None else last
    qk, v = zero_invalid(qk, mask), zero_invalid(v, mask)
    if not keep or not b:
        return v[:, t - keep :]
    rows, device = b * h, v.device
    valid = None if mask is None else mask.repeat_interleave(h, 0)
    wide = torch.float64 if torch.float64 in (qk.dtype, v.dtype) else torch.float32
    with full_precision(device.type):
        # --- keys of length one; the 10⁻⁶, which the published code adds, bounds the derivative at 0 ---
        q = qk.to(torch.promote_types(qk.dtype, torch.float32))
        keys = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6 * d)

        # --- the tokens of each round sorted by (bucket, position) [B·H, R, L]; a slot of no token is T or more ---
        order = torch.arange(t, device=device).expand(rows, 1, t)  # one chunk holds all tokens
        window: tuple[int, ...] = (0,)
        if t > chunk:
            # Hashed in float32 at least, one round at a time: lower precision would tell similar tokens apart.
            with torch.no_grad():
                turned = (q.transpose(1, 2) @ rotation for rotation in rotations.to(q.dtype))
                buckets = [torch.cat([one, -one], -1).argmax(-1) for one in turned]
            bucket, end = torch.stack(buckets, 2).flatten(0, 1), 2**31  # beyond every bucket, and exact as a float
            if valid is not None:
                bucket = bucket.masked_fill(~valid[:, None], end)
            order, window = F.pad(bucket, (0, -t % chunk), value=end).argsort(dim=-1, stable=True), WINDOW
        rounds, length = order.shape[1:]
        slot = torch.empty_like(order).scatter_(2, order, torch.arange(length, device=device).expand(order.shape))
        slot = (slot + length * torch.arange(rounds, device=device)[:, None])[:, :, t - keep : t]
        position = torch.arange(length, device=device).expand(rows, length)
        if length > t or valid is not None:  # slots of no token, and invalid tokens, are beyond every position
            exists = position < t if valid is None else F.pad(valid, (0, length - t))
            position = position.masked_fill(~exists, length)

        # --- blocks of queries: whole chunks, or single queries where they are few, as in a decoding step ---
        q, k, values = (x.to(wide).transpose(1, 2).flatten(0, 1) for x in (q, keys, v))
        chunks = order.reshape(rows, -1, min(chunk, length))
        if keep > chunks.shape[1] // rounds:
            queries, own = chunks, torch.arange(chunks.shape[1], device=device).expand(chunks.shape[:2])
        else:
            queries = torch.arange(t - keep, t, device=device).expand(rows, rounds, keep).reshape(rows, -1, 1)
            own = slot.reshape(rows, -1) // chunks.shape[2]

        # --- attention of some blocks at a time; where these are several steps, the backward computes scores again ---
        _, blocks, size = queries.shape
        most = SCORES_AT_A_TIME.get(device.type, SCORES_AT_A_TIME["cpu"])
        step = max(1, most // (rows * size * len(window) * chunks.shape[2]))
        around = (own[..., None] + torch.tensor(window, device=device)) % chunks.shape[1]  # [B·H, blocks, W]
        parts = []
        for start in range(0, blocks, step):
            part = slice(start, start + step)
            read = _pick(chunks, around[:, part].flatten(1)).unflatten(1, (-1, len(window))).flatten(2)
            inputs = (q, k, values, queries[:, part], read, position, causal, dropout)
            if step < blocks and torch.is_grad_enabled():
                parts.append(checkpoint(_attend, *inputs, use_reentrant=False))
            else:
                parts.append(_attend(*inputs))
        y, z = (torch.cat(each, 1) for each in zip(*parts, strict=True))

        # --- back to positions, and the sum over rounds ---
        if queries is chunks:
            y, z = (_pick(x.flatten(1, 2), slot.flatten(1)) for x in (y, z))
        y, z = (x.reshape(rows, rounds, keep, -1) for x in (y, z))
        y = y[:, 0] if rounds == 1 else (z.softmax(1) * y).sum(1)
    y = y.unflatten(0, (b, h)).transpose(1, 2).to(v.dtype)
    return zero_invalid(y, None if mask is None else mask[:, t - keep :])


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
