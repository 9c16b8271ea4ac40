"""GRC attention (Cached Transformers, eq. 2 to 5): any attention of ours beside a gated recurrent cache."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.memory.gated_cache import begin_forward, end_forward
from mnemos.memory.grc import GRC
from mnemos.types import InputError, Output, State

from .gated_branch import GatedBranch
from .gated_walk import Walk, walk
from .softmax import SoftmaxAttention


class GatedState(NamedTuple):
    """The inner attention's state and, where the cache moves within the stream, the walk's (else None)."""

    inner: State
    walk: Walk | None


class GatedCacheAttention(GatedBranch):
    """An attention that also attends to a gated recurrent cache: `y, state = layer(x, state=None, mask=None)`.

        O^h = σ(λ_h)·o_mem^h + (1 − σ(λ_h))·o_self^h,   o_mem = softmax(q(X)·k(C)ᵀ/√(Dm/H))·v(C)

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. `inner` is any attention of this library (None:
    softmax), `grc` the switches (`mnemos.GRC`), `grid` the (height, width) of an image's tokens, `prefix` how
    many class tokens stand before the tokens that are summarised (they read the cache, and are not written).
    Cost beside the inner attention: O(T·Tm·D) to read, O(Tm·Dm²) to update, whatever came before.

    scope="shared": one cache [Tm, Dm] for the batch, a saved buffer: a training forward reads C_t, built from the
    stored cache and its own tokens, and stores the mean of C_t over the batch (see memory/gated_cache.py for when).
    eval() stores nothing. scope="stream": a cache a row, part of the state, with gradient through it.

    causal=True: a token must not read what it or a later one wrote, so the tokens are walked in blocks on an absolute
    grid (`grc.block`, else Tm, tokens): a block reads the cache that the blocks before it built. Sequences no longer
    than one block leave the gates without gradient. Rows are then split and resumed anywhere. With read="mean" each
    block's mean is a reduction over processes: all must be given calls of one length.

    write=False: every update starts from the stored cache, which no forward changes (see `GRC.unwritten`).

    Raises InputError for a length that is not a number, impossible widths, a grid that does not fit.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        inner: nn.Module | None = None,
        grc: GRC | None = None,
        causal: bool = False,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> None:
        inner = SoftmaxAttention(dim, num_heads, causal) if inner is None else inner
        _check(inner, dim, num_heads, causal, prefix or grid)
        super().__init__(dim, num_heads, grc or GRC(), inner, grid=grid, prefix=prefix)
        self.causal = causal

    @property
    def splits(self) -> str:
        """Where a sequence may be cut and resumed: "anywhere", "segments" (a cache a row, not causal) or "never"."""
        if self.causal:
            return self.inner.splits
        return "segments" if self.grc.scope == "stream" else "never"

    @property
    def rows_independent(self) -> bool:
        """Whether a row's output depends on that row alone; reading the batch mean makes it depend on all."""
        return self.grc.read == "sample"

    @property
    def state_gradient(self) -> bool:
        """Whether gradient flows through the incoming and outgoing state."""
        carried = self.causal or self.grc.write
        return self.grc.scope == "stream" and carried and self.inner.state_gradient

    @property
    def block(self) -> int:
        """Causal: tokens between two updates."""
        return self.grc.block or self.cache.shape[0]

    def initial_state(self, batch_size: int, device: Any = None, dtype: Any = None) -> GatedState | None:
        """The state of `batch_size` fresh rows; None is short for it."""
        inner = self.inner.initial_state(batch_size, device, dtype)
        if not self.causal and self.grc.scope == "shared":
            return None if inner is None else GatedState(inner, None)
        slots, d = self.cache.shape
        device = self.cache.device if device is None else device
        block = self.block if self.causal else 0
        return GatedState(inner, Walk.fresh(batch_size, slots, d, block, device, self.cache.dtype))

    def heads(self, x: Tensor, state: GatedState | None = None, mask: Tensor | None = None) -> Output:
        """The mixed heads [B, T, H, D/H], before `project`, and the new state."""
        inner_state, walked = (None, None) if state is None else state
        o_self, inner_state = self.inner.heads(x, inner_state, mask)
        projected = None
        if self.grc.source == "output" or self.lift is not None:
            projected = self.inner.project(o_self)
        x = x[..., : self.cache_dim]
        source = x if projected is None or self.grc.source == "input" else projected[..., : self.cache_dim]
        query = self.queries(x)
        if not self.moves:
            o_mem = self.frozen(query)
            if self.causal and walked is None:  # a state has one structure, whether the cache moves or not
                slots, d = self.cache.shape
                walked = Walk.fresh(x.shape[0], slots, d, self.block, x.device, self.cache.dtype)
        else:
            summary, valid = self.summarised(source, mask)
            if self.causal:
                o_mem, walked = self._walk(query, summary, walked, valid)
            elif self.grc.scope == "stream":
                o_mem, walked = self._carried(query, summary, walked, valid)
            else:
                o_mem = self.read(query, self.current(summary, valid))
        if self.lift is not None:  # "pad": both branches are projected, each by its own, and mixed by groups of D/H
            assert projected is not None
            o_mem = self.lifted(o_mem)
            o_self = projected.unflatten(-1, (self.num_heads, -1))
        share = torch.sigmoid(self.mix).to(o_self.dtype)[:, None]
        mixed = torch.lerp(o_self, o_mem.to(o_self.dtype), share)
        keeps = inner_state is not None or walked is not None
        return mixed, GatedState(inner_state, walked) if keeps else None

    def project(self, heads: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]: the inner attention's own projection, which both branches share."""
        return heads.flatten(2) if self.lift is not None else self.inner.project(heads)

    def forward(self, x: Tensor, state: GatedState | None = None, mask: Tensor | None = None) -> Output:
        """See the class."""
        began = self.training and not self.owned and begin_forward([self])
        heads, state = self.heads(x, state, mask)
        y = self.project(heads)
        if self.convolution is not None:
            y = y + self.convolve(x)
        if began:
            end_forward([self])
        return y, state

    def _carried(self, query: Tensor, summary: Tensor, walked: Walk | None, mask: Tensor | None) -> tuple[Tensor, Walk]:
        """Not causal, a cache a row: C_t of all the row's tokens, read by all of them."""
        before = self.cache.clone()
        if walked is not None:
            before = torch.where((walked.seen == 0)[:, None, None], before, walked.cache)
        new = self.update(summary, before, mask, self.grid)
        seen = new.new_zeros(new.shape[0], dtype=torch.int64) if walked is None else walked.seen
        empty = summary[:, :0].to(new.dtype), torch.zeros(summary.shape[0], 0, dtype=torch.bool, device=new.device)
        after = new if self.grc.write else before.expand_as(new)
        return self.read(query, new), Walk(after, *empty, seen + summary.shape[1])

    def _walk(self, query: Tensor, summary: Tensor, walked: Walk | None, mask: Tensor | None) -> tuple[Tensor, Walk]:
        """Causal: block by block, each reading the cache that the blocks before it built."""
        shared = self.grc.scope == "shared"
        start = self.cache.clone()

        def advance(tokens: Tensor, cache: Tensor, valid: Tensor | None) -> Tensor:
            return self.update(tokens, cache if self.grc.write else start, valid)

        pieces, after, written = walk(summary.to(start.dtype), mask, walked, start, self.block, advance)
        if shared and self.training:
            self.stage(*self.batch_mean(after.cache, written))
        if shared and self.grc.read == "mean" and self.training:
            counted = None if mask is None else mask.any(1)
            means = [self.read_mean(*self.batch_mean(cache, counted)) for _, cache in pieces]
            pieces = [
                (n, torch.where(rows > 0, mean, start)[None])
                for (n, _), (mean, rows) in zip(pieces, means, strict=True)
            ]
        if shared:
            after = Walk(after.cache.detach(), after.partial.detach(), after.valid, after.seen)
        if not pieces:  # no token, nothing read
            width = self.value.out_features // self.num_heads
            return query.new_zeros(*query.shape[:3], width), after
        queries = query.split([n for n, _ in pieces], 1)
        return torch.cat([self.read(q, cache) for q, (_, cache) in zip(queries, pieces, strict=True)], 1), after


def _check(inner: Any, dim: int, num_heads: int, causal: bool, placed: Any) -> None:
    if (inner.dim, inner.num_heads, inner.causal) != (dim, num_heads, causal):
        raise InputError(
            f"inner attention must match width {dim}, {num_heads} heads, causal={causal}; "
            f"found {inner.dim}, {inner.num_heads}, causal={inner.causal}"
        )
    if causal and placed:
        raise InputError("causal GRC attention walks along time: it takes no grid and no class token")


def gated(attention: Any, grc: GRC, length: int, **where: Any) -> GatedCacheAttention:
    """Put a gated cache around an attention; `length` is what "auto" means there."""
    if grc.length == "auto":
        grc = replace(grc, length=length)
    return GatedCacheAttention(attention.dim, attention.num_heads, attention, grc, attention.causal, **where)
