"""GRC attention (Cached Transformers, eq. 2 to 5): any attention of ours beside a gated recurrent cache."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.memory.gated_cache import GatedCache, begin_forward, end_forward
from mnemos.memory.grc import GRC
from mnemos.ops.gated_cache.resample import grid_shape
from mnemos.ops.linear_attention import linear_attention
from mnemos.types import InputError, Output, State

from .gated_walk import Walk, walk
from .softmax import SoftmaxAttention, attend


class GatedState(NamedTuple):
    """The inner attention's state and, where the cache moves within the stream, the walk's (else None)."""

    inner: State
    walk: Walk | None


class GatedCacheAttention(GatedCache):
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
        super().__init__(dim, num_heads, grc or GRC())
        self.inner: Any = SoftmaxAttention(dim, num_heads, causal) if inner is None else inner
        self.dim, self.num_heads, self.causal, self.grid, self.prefix = dim, num_heads, causal, grid, prefix
        self._check()
        d, head = self.cache_dim, self.cache_dim // num_heads
        pads = self.grc.lift == "pad"
        self.query, self.key = nn.Linear(d, d), nn.Linear(d, d)
        self.value = nn.Linear(d, d if pads else dim)
        self.lift = nn.Linear(d, d) if pads else None
        self.pad = dim // num_heads - head
        on = self.grc.convolution if self.grc.convolution is not None else grid is not None
        self.convolution = nn.Conv2d(dim, dim, 3, padding=1, groups=d) if on else None
        self._projected: tuple[tuple, Tensor, Tensor] | None = None

    def _check(self) -> None:
        inner, grc = self.inner, self.grc
        if (inner.dim, inner.num_heads, inner.causal) != (self.dim, self.num_heads, self.causal):
            raise InputError(
                f"inner attention must match width {self.dim}, {self.num_heads} heads, causal={self.causal}; "
                f"found {inner.dim}, {inner.num_heads}, causal={inner.causal}"
            )
        if self.causal and (self.prefix or self.grid):
            raise InputError("causal GRC attention walks along time: it takes no grid and no class token")
        if grc.resample == "grid":
            grid_shape(self.grid, self.cache.shape[0])
        if grc.convolution and (self.grid is None or self.dim % self.cache_dim):
            raise InputError(
                f"convolution=True needs a grid and width % cache width = 0, found grid={self.grid}, "
                f"{self.dim} % {self.cache_dim}; give a grid, or ratio 1/n"
            )
        if grc.convolution is None and self.grid is not None and self.dim % self.cache_dim:
            raise InputError(
                f"the official preset's convolution needs width % cache width = 0, found "
                f"{self.dim} % {self.cache_dim}; use ratio 1/n or convolution=False"
            )

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
        return self.grc.scope == "stream"

    @property
    def block(self) -> int:
        """Causal: tokens between two updates."""
        return self.grc.block or self.cache.shape[0]

    @property
    def moves(self) -> bool:
        """Whether the cache that is read changes with the tokens of this call."""
        return self.training or self.grc.scope == "stream" or self.grc.inference == "transient"

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
        source = x if self.grc.source == "input" else projected
        assert source is not None
        summary = source[..., : self.cache_dim]
        query = self.query(x[..., : self.cache_dim]).unflatten(-1, (self.num_heads, -1))
        if self.causal and self.moves:
            o_mem, walked = self._walk(query, summary, walked, mask)
        elif self.moves:
            o_mem, walked = self._whole(query, summary, walked, mask)
        else:
            o_mem = self._frozen(query)
            if self.causal and walked is None:  # a state has one structure, whether the cache moves or not
                slots, d = self.cache.shape
                walked = Walk.fresh(x.shape[0], slots, d, self.block, x.device, self.cache.dtype)
        if self.lift is not None:
            # `pad`: both branches are projected, each by its own, and mixed by groups of D/H channels.
            assert projected is not None
            o_mem = F.pad(self.lift(o_mem.flatten(2)).unflatten(-1, (self.num_heads, -1)), (0, self.pad))
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
            y = y + self._convolve(x)
        if began:
            end_forward([self])
        return y, state

    def _whole(self, query: Tensor, summary: Tensor, walked: Walk | None, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Not causal: C_t of all the tokens, read by all of them."""
        if self.prefix:
            summary, mask = summary[:, self.prefix :], None if mask is None else mask[:, self.prefix :]
        stream = self.grc.scope == "stream"
        # A copy: the buffer is written at the next forward, perhaps before this one's backward.
        before = self.cache.clone()
        if stream and walked is not None:
            before = torch.where((walked.seen == 0)[:, None, None], before, walked.cache)
        new = self.update(summary, before, mask, self.grid)
        if stream:
            seen = new.new_zeros(new.shape[0], dtype=torch.int64) if walked is None else walked.seen
            empty = summary[:, :0].to(new.dtype), torch.zeros(summary.shape[0], 0, dtype=torch.bool, device=new.device)
            return self._read(query, new), Walk(new, *empty, seen + summary.shape[1])
        if self.training:
            mean, rows = self.batch_mean(new, None if mask is None else mask.any(1))
            self.stage(mean, rows)
            if self.grc.read == "mean":
                mean, rows = self.read_mean(mean, rows)
                new = torch.where(rows > 0, mean, before)[None]
        return self._read(query, new), None

    def _walk(self, query: Tensor, summary: Tensor, walked: Walk | None, mask: Tensor | None) -> tuple[Tensor, Walk]:
        """Causal: block by block, each reading the cache that the blocks before it built."""
        shared = self.grc.scope == "shared"
        start = self.cache.clone()
        pieces, after, written = walk(summary.to(start.dtype), mask, walked, start, self.block, self.update)
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
            return query.new_zeros(*query.shape[:3], self.value.out_features // self.num_heads), after
        queries = query.split([n for n, _ in pieces], 1)
        return torch.cat([self._read(q, cache) for q, (_, cache) in zip(queries, pieces, strict=True)], 1), after

    def _read(self, query: Tensor, cache: Tensor) -> Tensor:
        """o_mem [B, T, H, M] of queries [B, T, H, Dm/H] over a cache [B or 1, Tm, Dm]."""
        return self._attend(query, self._split(self.key, cache), self._split(self.value, cache))

    def _split(self, projection: nn.Module, cache: Tensor) -> Tensor:
        return projection(cache).unflatten(-1, (self.num_heads, -1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        b, t = query.shape[:2]
        if key.shape[0] == 1 < b:  # one cache for all rows: one long row of queries reads it
            return self._attend(query.flatten(0, 1)[None], key, value).unflatten(1, (b, t)).squeeze(0)
        if self.grc.branch == "linear":
            return linear_attention(query, key, value, causal=False)[0]
        return attend(query, key, value, None, False)

    def train(self, mode: bool = True) -> Any:
        """As of any module; forgets the projected keys and values of a frozen cache."""
        self._projected = None
        return super().train(mode)

    def _frozen(self, query: Tensor) -> Tensor:
        """The stored cache, read as it is: keys and values are projected once, until a tensor behind them changes.

        Versions tell of most changes. Fused optimisers keep theirs secret, but need a forward with gradient, after
        which nothing is kept. Whoever writes through `.data` calls eval() again.
        """
        tensors = (self.cache, *self.key.parameters(), *self.value.parameters())
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
            self._projected = None
            return self._read(query, self.cache[None])
        stamp = (query.dtype, *((t.data_ptr(), t._version) for t in tensors))
        if self._projected is None or self._projected[0] != stamp:
            self._projected = (
                stamp,
                self._split(self.key, self.cache[None]),
                self._split(self.value, self.cache[None]),
            )
        return self._attend(query, *self._projected[1:])

    def _convolve(self, x: Tensor) -> Tensor:
        assert self.convolution is not None
        tokens = x[:, self.prefix :]
        if self.grid is None or tokens.shape[1] != self.grid[0] * self.grid[1]:
            raise InputError(
                f"expected the {self.grid} grid of tokens that the layer was built for, found {tokens.shape[1]}"
            )
        image = self.convolution(tokens.transpose(1, 2).unflatten(2, self.grid))
        return F.pad(image.flatten(2).transpose(1, 2), (0, 0, self.prefix, 0))


def gated(attention: Any, grc: GRC, length: int, **where: Any) -> GatedCacheAttention:
    """Put a gated cache around an attention; `length` is what "auto" means there."""
    if grc.length == "auto":
        grc = replace(grc, length=length)
    return GatedCacheAttention(attention.dim, attention.num_heads, attention, grc, attention.causal, **where)
