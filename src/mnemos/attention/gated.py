"""GRC attention (Cached Transformers, eq. 2 to 5): an attention of this library mixed with a gated recurrent cache."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from mnemos._compat import exportable
from mnemos.memory.gated_cache import begin_forward, end_forward
from mnemos.memory.grc import GRC
from mnemos.memory.grid import Unfinished, stretches
from mnemos.ops.checks import check_mask
from mnemos.ops.padding import count_seen, take, valid_first, zero_invalid
from mnemos.types import (
    Device,
    HeadAttention,
    InputError,
    Splits,
    State,
    StateKind,
    check_stateful,
    combined_state_kind,
    is_future_free,
    is_padding_free,
)

from .gated_branch import GatedBranch
from .multi_head import widened
from .softmax import SoftmaxAttention


@exportable
class Walk(NamedTuple):
    """The place of each row in its sequence of updates. A row of zeros is new and starts from the stored cache.

    cache [B, Tm, Dm]: the cache that the row reads now. partial [B, block, Dm], valid [B, block] bool: the tokens of
    the unfinished block. seen [B] int64: valid tokens since the row began; its place in the block is seen % block.
    """

    cache: Tensor
    partial: Tensor
    valid: Tensor
    seen: Tensor

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "cache"

    @staticmethod
    def fresh(batch: int, slots: int, width: int, block: int, device: Device, dtype: torch.dtype | None) -> "Walk":
        """`batch` new rows."""
        return Walk(
            torch.zeros(batch, slots, width, device=device, dtype=dtype),
            torch.zeros(batch, block, width, device=device, dtype=dtype),
            torch.zeros(batch, block, device=device, dtype=torch.bool),
            torch.zeros(batch, device=device, dtype=torch.int64),
        )


def update_in_blocks(
    source: Tensor,
    mask: Tensor | None,
    state: Walk | None,
    start: Tensor,
    block: int,
    update: Callable[[Tensor, Tensor], Tensor],
) -> tuple[list[tuple[int, Tensor]], Walk, Tensor]:
    """Process tokens `source` [B, T, Dm] in blocks.

    Returns pieces (number of tokens, the cache [B, Tm, Dm] that they read), the new state, and which rows [B] bool
    were written, by at least one valid token. A new row (every row, if `state` is None) starts from `start` [Tm, Dm];
    `update(block tokens, cache)` computes the next cache. Rows may be at different places of their blocks: a piece ends
    wherever the block of some row ends, so there are T/block pieces for each different place. mask [B, T] bool: padding
    stands behind the valid tokens of its row, and takes no place in a block.
    """
    b, t, width = source.shape
    if state is None:  # known without reading a tensor: a read makes a device wait and breaks a compiled graph
        state = Walk.fresh(b, start.shape[0], width, block, source.device, source.dtype)
        place = [0] * b
    else:
        place = (state.seen % block).tolist()
    cache = torch.where((state.seen == 0)[:, None, None], start, state.cache)
    unfinished = Unfinished(state.partial, state.valid)
    written = torch.zeros(b, dtype=torch.bool, device=source.device)
    pieces = []
    # The places are those of rows without padding: the numbers of valid tokens need not be read.
    for begin, stop, at, _, done in stretches(place, [t] * b, block):
        pieces.append((stop - begin, cache))
        unfinished = unfinished.with_more(source[:, begin:stop], None if mask is None else mask[:, begin:stop], at)
        if any(done):
            new, rows = update(unfinished.tokens, cache), torch.tensor(done, device=source.device)
            rows = rows if mask is None else rows & mask[:, stop - 1]
            written = written | rows
            every = mask is None and all(done)
            cache = new if every else torch.where(rows[:, None, None], new, cache)
            unfinished = unfinished.emptied(None if every else rows)
    return pieces, Walk(cache, *unfinished, count_seen(source, state.seen, mask)), written


@exportable
class GatedState(NamedTuple):
    """The inner attention's state and, where rows carry a cache, the state of its updates (else None)."""

    inner: State
    walk: Walk | None


class GatedCacheAttention(GatedBranch):
    """An attention that also attends to a gated recurrent cache: `y, state = layer(x, state=None, mask=None)`.

        O^h = σ(λ_h)·o_mem^h + (1 − σ(λ_h))·o_self^h,   o_mem = softmax(q(X)·k(C)ᵀ/√(Dm/H))·v(C)

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. `inner` is any `HeadAttention` (None: softmax), `grc` has
    the switches (`mnemos.GRC`), `grid` is the (height, width) of an image's tokens, and `prefix` the number of class
    tokens before the tokens that are summarised (class tokens read the cache and are not written).
    Cost in addition to the inner attention: O(T·Tm·D) to read and O(Tm·Dm²) to update, at any length.

    scope="shared": one cache [Tm, Dm] for the batch, a saved buffer. A training forward reads C_t, computed from the
    stored cache and the forward's own tokens, and stores the mean of C_t over the batch (memory/stored.py says when).
    A forward in eval mode stores nothing. scope="stream": a cache per row, part of the state, with gradient through it.

    causal=True: a token must not read what it or a later token wrote. The tokens are therefore processed in blocks on
    an absolute grid (of `grc.block` tokens, else Tm), and a block reads the cache that the earlier blocks built. In
    sequences of at most one block the gates get a gradient of zero. Rows may be split and resumed wherever `inner`
    allows it. With read="mean" the mean of each block is a reduction over processes, so all processes need calls of one
    length.

    write=False: every update starts from the stored cache, and no forward changes it (see `GRC.unwritten`).

    Raises InputError for a length that is not a number, impossible widths, or a grid that does not fit.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        inner: HeadAttention | None = None,
        grc: GRC | None = None,
        causal: bool = False,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> None:
        inner = SoftmaxAttention(dim, num_heads, causal) if inner is None else inner
        _check(inner, dim, num_heads, causal, prefix or grid)
        super().__init__(dim, num_heads, grc or GRC(), inner, grid=grid, prefix=prefix)
        if self.grc.mix == "channels" and self.lift is None:
            raise InputError(
                'GRC.mix: a layer of mnemos with lift="project" mixes its "heads", found "channels"; leave mix out'
            )
        self.causal = causal

    @property
    def splits(self) -> Splits:
        """Where a sequence may be cut: "anywhere", "segments" (a cache per row, not causal) or "never"."""
        if self.causal:
            return self.inner.splits
        return "segments" if self.grc.scope == "stream" else "never"

    @property
    def state_kind(self) -> StateKind:
        """That of the inner attention; a cache per row adds a state of constant size."""
        own: StateKind = "constant" if self.causal or self.grc.scope == "stream" else "none"
        return combined_state_kind([self.inner.state_kind, own])

    @property
    def rows_independent(self) -> bool:
        """Whether a row's output depends on that row alone; reading the batch mean makes it depend on all rows."""
        return (self.grc.constant or self.grc.read == "sample") and self.inner.rows_independent

    @property
    def state_gradient(self) -> bool:
        """Whether gradient flows through the incoming and outgoing state."""
        carried = self.causal or self.grc.write
        return self.grc.scope == "stream" and carried and self.inner.state_gradient

    @property
    def future_free(self) -> bool:
        """Whether later tokens leave the outputs of earlier ones unchanged: where they do so in the inner attention."""
        return is_future_free(self.inner)

    @property
    def padding_free(self) -> bool:
        """Whether outputs are independent of the number of padded tokens: where they are in the inner attention."""
        return is_padding_free(self.inner)

    @property
    def eval_as_trained(self) -> bool:
        """Whether eval mode reads the cache that training reads; frozen, it reads the stored one."""
        return self.grc.constant or self.grc.inference != "frozen"

    @property
    def block(self) -> int:
        """Causal: the number of tokens between two updates."""
        return self.grc.block or self.cache.shape[0]

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> GatedState | None:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        inner = self.inner.initial_state(batch_size, device, dtype)
        if not self.causal and self.grc.scope == "shared":
            return None if inner is None else GatedState(inner, None)
        slots, d = self.cache.shape
        device = self.cache.device if device is None else device
        block = self.block if self.causal else 0
        return GatedState(inner, Walk.fresh(batch_size, slots, d, block, device, self.cache.dtype))

    def widened(self, state: GatedState) -> GatedState:
        """The same state with that of the inner attention `widened`."""
        return GatedState(widened(self.inner, state.inner), state.walk)

    def heads(
        self, x: Tensor, state: GatedState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, GatedState | None]:
        """The mixed heads [B, T, H, D/H], before `project`, and the new state."""
        check_mask(mask, x.shape[:2])
        x = zero_invalid(x, mask)
        check_stateful(self.state_kind, state)
        if state is not None:
            _check_state(state, (x.shape[0], *self.cache.shape))
        inner_state, walk = (None, None) if state is None else state
        o_self, inner_state = self.inner.heads(x, inner_state, mask)
        projected = None
        if self.grc.source == "output" or self.lift is not None:
            projected = self.inner.project(o_self)
        x = x[..., : self.cache_dim]
        source = x if projected is None or self.grc.source == "input" else projected[..., : self.cache_dim]
        own = o_self if self.lift is None else None  # what is mixed where it is read
        if not self.moves:
            found = self.frozen(self.queries(x))
            found = found if own is None else self.mix_heads(own, found)
            if self.causal and walk is None:  # a state has the same structure with and without updates
                slots, d = self.cache.shape
                walk = Walk.fresh(x.shape[0], slots, d, self.block, x.device, self.cache.dtype)
        else:
            summary, valid = self.summarised(source, mask)
            if self.causal:
                found, walk = self.read_in_blocks(x, own, summary, walk, valid)
            elif self.grc.scope == "stream":
                cache, walk = self._carried(summary, walk, valid)
                found = self.answer(x, cache, own)
            else:
                found = self.answer(x, self.current(summary, valid), own)
        if self.lift is not None:  # "pad": each branch has its own projection; groups of D/H channels are mixed
            assert projected is not None
            found = self.mix_heads(projected.unflatten(-1, (self.num_heads, -1)), self.lifted(found))
        keeps = inner_state is not None or walk is not None
        return found, GatedState(inner_state, walk) if keeps else None

    def project(self, heads: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]: the inner attention's projection, which both branches share."""
        return heads.flatten(2) if self.lift is not None else self.inner.project(heads)

    def forward(
        self, x: Tensor, state: GatedState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, GatedState | None]:
        """See the class."""
        began = self.training and not self.owned and begin_forward([self])
        heads, state = self.heads(x, state, mask)
        y = self.project(heads)
        if self.convolution is not None:
            y = y + self.convolve(zero_invalid(x, mask))
        if began:
            end_forward([self])
        return y, state

    if TYPE_CHECKING:
        __call__ = forward

    def _carried(self, summary: Tensor, walk: Walk | None, mask: Tensor | None) -> tuple[Tensor, Walk]:
        """Not causal, a cache per row: the C_t that all tokens of a row update and read, and the new state."""
        before = self.contents()
        if walk is not None:
            before = torch.where((walk.seen == 0)[:, None, None], before, walk.cache)
        new = self.update(summary, before, mask, self.grid)
        empty = summary[:, :0].to(new.dtype), torch.zeros(summary.shape[0], 0, dtype=torch.bool, device=new.device)
        after = new if self.grc.write else before.expand_as(new)
        return new, Walk(after, *empty, count_seen(summary, None if walk is None else walk.seen, mask))

    def read_in_blocks(
        self, x: Tensor, own: Tensor | None, summary: Tensor, walk: Walk | None, mask: Tensor | None
    ) -> tuple[Tensor, Walk]:
        """Causal: block by block; each block reads the cache that the earlier blocks built. The result of `answer`.

        Programs have another form of it.
        """
        shared = self.grc.scope == "shared"
        start = self.contents()

        def update(tokens: Tensor, cache: Tensor) -> Tensor:
            return self.update(tokens, cache if self.grc.write else start)

        order = None
        if mask is not None:  # blocks count valid tokens: padding goes behind those of its row
            order = valid_first(mask)
            x, summary, mask = (take(part, order) for part in (x, summary, mask))
            own = own if own is None else take(own, order)
        pieces, after, written = update_in_blocks(summary.to(start.dtype), mask, walk, start, self.block, update)
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
        if not pieces:  # a call of no tokens
            width = self.map("value").out_features // self.num_heads
            return x.new_zeros(*x.shape[:2], self.num_heads, width), after
        lengths = [n for n, _ in pieces]
        parts = zip(x.split(lengths, 1), [None] * len(pieces) if own is None else own.split(lengths, 1), strict=True)
        found = [self.answer(of, cache, beside) for (of, beside), (_, cache) in zip(parts, pieces, strict=True)]
        # Of one piece, no block was completed before the last token.
        y = self.beside_gates(found[0]) if len(found) == 1 else torch.cat(found, 1)
        return y if order is None else take(y, order.argsort(1)), after


def _check(inner: object, dim: int, num_heads: int, causal: bool, placed: object) -> None:
    if not isinstance(inner, HeadAttention):
        raise InputError(
            f"inner: expected an attention with the methods and declarations of mnemos.types.HeadAttention, found "
            f"{type(inner).__name__}; add what it lacks, such as `heads` and `project`, or leave the cache out"
        )
    if (inner.dim, inner.num_heads, inner.causal) != (dim, num_heads, causal):
        raise InputError(
            f"inner: expected an attention of dim {dim}, {num_heads} heads, causal={causal}; found dim {inner.dim}, "
            f"{inner.num_heads} heads, causal={inner.causal}; build both alike"
        )
    if causal and placed:
        raise InputError("causal=True: expected no grid and no class token, found one; use causal=False for images")


def _check_state(state: GatedState, caches: tuple[int, ...]) -> None:
    found: object = type(state).__name__
    if isinstance(state, GatedState):
        if state.walk is None or state.walk.cache.shape == caches:
            return
        found = list(state.walk.cache.shape)
    raise InputError(
        f"expected a state with caches {list(caches)}, found {found}; use the layer's own initial_state, and select or "
        "reset to change its rows"
    )


class ImageTokens(TypedDict, total=False):
    """Where an attention's tokens come from: the (height, width) of an image's tokens, and its class tokens."""

    grid: tuple[int, int] | None
    prefix: int


def gated(attention: HeadAttention, grc: GRC, length: int, **where: Unpack[ImageTokens]) -> GatedCacheAttention:
    """Put a gated cache around an attention; `length` is the number of slots that "auto" and "paper" stand for."""
    if isinstance(grc.length, str):
        grc = replace(grc, length=length)
    return GatedCacheAttention(attention.dim, attention.num_heads, attention, grc, attention.causal, **where)
