"""GRC attention (Cached Transformers, eq. 2 to 5): an attention of this library mixed with a gated recurrent cache.

`GatedBranch` reads a cache, that of a layer here or of a model of others (`mnemos.hosts`). `GatedCacheAttention` mixes
what it reads into an attention; causal, it goes through the tokens in blocks (`RowBlocks`). What the cache is and when
it is stored: `mnemos.memory.gated_cache`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import exportable, is_plain
from mnemos.memory.gated_cache import GRC, GatedCache, Projection, begin_forward, end_forward
from mnemos.memory.row_blocks import CacheState, RowBlocks
from mnemos.modes import in_graph
from mnemos.ops.dense_layer import Linear, dense
from mnemos.ops.gated_cache import batch_mean, native
from mnemos.ops.gated_cache.resampling import grid_shape
from mnemos.ops.linear import linear_attention
from mnemos.ops.padding import zero_invalid
from mnemos.ops.positions import count_seen
from mnemos.ops.precision import autocasts
from mnemos.types import (
    Device,
    HeadAttention,
    InputError,
    Splits,
    State,
    StateKind,
    check_stateful,
    combined_state_kind,
    is_padding_free,
)

from .multi_head import padded_state
from .softmax import SoftmaxAttention, attend


class GatedBranch(GatedCache):
    """Base of the layers that mix a gated cache into an attention: maps to queries, keys and values, and `lift`.

        o_mem = softmax(q(X)·k(C)ᵀ/√(Dm/H))·v(C)

    Queries, keys and values come from Dm channels. With an attention of this library (`inner`), whose projection
    follows the mixing, values have D/H channels per head; so have they in a foreign attention whose heads, of
    `heads_dim` channels together, are mixed. With one whose output is already projected to `out_dim` channels, values
    have Dm/H channels per head and `lift` maps them to `out_dim`. lift="pad" (the
    official release) maps Dm to Dm in both cases and pads each head with zeros. `grid` is the (height, width) of an
    image's tokens, and `prefix` the number of class tokens before the tokens that are summarised (class tokens read
    the cache and are not written).
    """

    inner: HeadAttention
    maps = "query", "key", "value"  # the names of the maps

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grc: GRC,
        inner: HeadAttention | None = None,
        out_dim: int | None = None,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
        heads_dim: int | None = None,
    ) -> None:
        super().__init__(dim, num_heads, grc)
        self.dim, self.num_heads, self.grid, self.prefix = dim, num_heads, grid, prefix
        d, grc = self.cache_dim, self.grc
        if grc.resample == "grid":
            grid_shape(grid, self.cache.shape[0])
        if grc.convolution and (grid is None or dim % d):
            raise InputError(
                f"convolution=True: expected a grid and a dim divisible by the cache's width, found {grid=}, {dim=} "
                f"and cache width {d}; give a grid, or ratio 1/n"
            )
        if grc.convolution is None and grid is not None and dim % d:
            raise InputError(
                f"the official preset's convolution: expected a dim divisible by the cache's width, found {dim=} and "
                f"cache width {d}; use ratio 1/n or convolution=False"
            )
        if inner is not None:
            self.inner = inner
        pads = grc.lift == "pad"
        for name, width in zip(self.maps, (d, d, d if pads or out_dim else heads_dim or dim), strict=True):
            self.add_module(name, self.linear(d, width))
        self.lift = self.linear(d, d) if pads else self.linear(d, out_dim) if out_dim else None
        self.pad = ((out_dim or dim) - d) // num_heads if pads else 0
        on = grc.convolution if grc.convolution is not None else grid is not None
        self.convolution = nn.Conv2d(dim, dim, 3, padding=1, groups=d) if on else None
        # Of a frozen cache: the precision and the weights with which its keys and values were projected, and these.
        self._frozen: tuple[torch.dtype | None, list[Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def moves(self) -> bool:
        """Whether the cache that is read depends on the tokens of this call."""
        return (self.training and not self.learned) or self.grc.scope == "stream" or self.grc.inference == "transient"

    def map(self, role: str) -> nn.Linear | Projection:
        """The map to queries, keys or values, by its role: "query", "key" or "value"."""
        module: nn.Linear | Projection = getattr(self, self.maps[GatedBranch.maps.index(role)])
        return module

    def queries(self, x: Tensor) -> Tensor:
        """q(X) [B, T, H, Dm/H] of the first Dm channels of the layer's input, x [B, T, Dm]."""
        # A matrix whose rows are strided is multiplied without a copy.
        q = self.map("query")(x.flatten(0, 1))
        return q.view(*x.shape[:2], self.num_heads, q.shape[1] // self.num_heads)

    def summarised(self, source: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tokens that the cache summarises, [B, T, Dm], and their mask: all but the class tokens."""
        if not self.prefix:
            return source, mask
        return source[:, self.prefix :], None if mask is None else mask[:, self.prefix :]

    def current(self, source: Tensor, mask: Tensor | None) -> Tensor:
        """The shared cache that these tokens update and read: C_t [B, Tm, Dm], or its mean [1, Tm, Dm].

        In training the batch mean becomes the stored cache's successor.
        """
        before = self.contents()
        new, mean, rows = self.written(source, before, mask, self.grid, self.training)
        if mean is not None and rows is not None:
            self.stage(mean, rows)
            if self.grc.read == "mean":
                mean, rows = self.read_mean(mean, rows)
                new = torch.where(rows > 0, mean, before)[None]
        return new

    def answer(self, x: Tensor, cache: Tensor, own: Tensor | None = None) -> Tensor:
        """o_mem [B, T, H, M] of inputs x [B, T, Dm] over a cache [B or 1, Tm, Dm]; with `own`, mixed with it (eq. 2).

        own [B, T, H, M]: the attention's own heads. On the CPU in float32 one kernel projects, attends and mixes.
        """
        linears = [self.map(role) for role in GatedBranch.maps]
        composed = torch.compiler.is_compiling() or self.grc.branch != "softmax" or autocasts(x.device.type)
        if not composed and all(map(is_plain_linear, linears)):
            weights = [w for one in linears for w in (one.weight, one.bias)]
            tensors = (x, cache, own, None if own is None else self.mix, *weights)
            kernel = native.Reading(self._compose, self.num_heads)
            if native.takes(*tensors) and kernel.fits(*tensors):
                return native.fused(kernel, *tensors)
        o_mem = self._attend(self.queries(x), self._split("key", cache), self._split("value", cache))
        return o_mem if own is None else self.mix_heads(own, o_mem)

    def in_blocks(
        self,
        x: Tensor,
        own: Tensor | None,
        source: Tensor,
        state: CacheState | None,
        mask: Tensor | None,
        start: Tensor,
        read: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
    ) -> tuple[Tensor, CacheState]:
        """What `answer`, or `read`, gives block by block, and the new state; new rows start from `start` [Tm, Dm].

        Each block reads the cache that the earlier blocks of its row's `source` [B, T, Dm] built.
        """
        blocks = RowBlocks(
            source,
            mask,
            state,
            start,
            self.grc.block or len(self.cache),
            lambda tokens, cache: self.update(tokens, cache if self.grc.write else start),
        )
        caches, after = blocks.caches, blocks.after()
        if self.grc.scope == "shared":
            if self.training:
                self.stage(*batch_mean(blocks.last, blocks.written))
                if self.grc.read == "mean":
                    counted = None if mask is None else mask.any(1)
                    means = [self.read_mean(*batch_mean(cache, counted)) for cache in caches]
                    caches = [torch.where(rows > 0, mean, start)[None] for mean, rows in means]
            # A tensor without a gradient stays the same one: what is computed of a cache may be kept beside it.
            after = after.map(lambda part: part.detach() if part.requires_grad else part)
        y = blocks.read(read or self.answer, caches, x, own)
        # Before the first update no gate has a gradient.
        return self.beside_gates(y) if blocks.caches[-1] is blocks.caches[0] else y, after

    def mix_heads(self, own: Tensor, o_mem: Tensor) -> Tensor:
        """(1 − σ(λ))·own + σ(λ)·o_mem, for each head."""
        return torch.lerp(own, o_mem.to(own.dtype), torch.sigmoid(self.mix).to(own.dtype)[:, None])

    def _compose(
        self, x: Tensor, cache: Tensor, own: Tensor | None, mix: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor]:
        """The kernel's result in PyTorch's operations, as a function of all its tensors."""
        w_q, b_q, w_k, b_k, w_v, b_v = weights
        parts = (dense(a, w, b) for a, w, b in ((x, w_q, b_q), (cache, w_k, b_k), (cache, w_v, b_v)))
        o_mem = self._attend(*(part.unflatten(-1, (self.num_heads, -1)) for part in parts))
        return (o_mem if own is None or mix is None else torch.lerp(own, o_mem, torch.sigmoid(mix)[:, None]),)

    def _split(self, role: str, cache: Tensor) -> Tensor:
        projection = self.map(role)
        return projection(cache.to(projection.weight.dtype)).unflatten(-1, (self.num_heads, -1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        b, t = query.shape[:2]
        if key.shape[0] == 1 != b and self.num_heads == 1:  # torch parallelises the backward by rows and heads
            key, value = key.expand(b, -1, -1, -1), value.expand(b, -1, -1, -1)
        elif key.shape[0] == 1 != b:  # one cache for all rows: the queries of all rows as one long row
            return self._attend(query.flatten(0, 1)[None], key, value).unflatten(1, (b, t)).squeeze(0)
        return self.attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of queries [B, T, H, d] to all slots; programs have another form of it."""
        if self.grc.branch == "linear":
            return linear_attention(query, key, value, causal=False)[0]
        return attend(query, key, value, None, False)

    def train(self, mode: bool = True) -> Self:
        """Like `nn.Module.train`; also drops the projected keys and values of a frozen cache."""
        self._frozen = None
        return super().train(mode)

    def lifted(self, o_mem: Tensor) -> Tensor:
        """o_mem [B, T, H, M] at the width of the attention's heads, [B, T, H, D/H]."""
        if self.lift is None:
            return o_mem
        return F.pad(self.lift(o_mem.flatten(2)).unflatten(-1, (self.num_heads, -1)), (0, self.pad))

    def frozen(self, query: Tensor) -> Tensor:
        """o_mem from the stored cache, or the learned constant, as it is.

        In eval without gradient its keys and values are projected once, until a value changes. The values are compared
        with copies, which costs one pass over them: addresses and versions do not show writes through `.data`, by which
        libraries exchange weights for averaged ones. Devices other than the CPU would have to be waited for.
        """
        weights = [self.cache, *self.map("key").parameters(), *self.map("value").parameters()]

        def project() -> tuple[Tensor, Tensor]:
            return self._split("key", self.cache[None]), self._split("value", self.cache[None])

        if self.training or torch.is_grad_enabled() or self.cache.device.type != "cpu" or in_graph():
            keys_values = project()
        else:
            precision = torch.get_autocast_dtype("cpu") if autocasts("cpu") else None
            kept = self._frozen
            try:
                if (
                    kept is None
                    or kept[0] != precision
                    or not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(kept[1], weights, strict=True))
                ):
                    kept = precision, [w.detach().clone() for w in weights], project()
                self._frozen, keys_values = kept, kept[2]
            except RuntimeError:  # tensors inside a transform (vmap) and fake tensors have no values
                keys_values = project()
        o_mem = self._attend(query, *keys_values)
        return self.beside_gates(o_mem) if self.learned else o_mem

    def convolve(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """The positional term [B, T, D]: a grouped 3×3 convolution of the grid of tokens; zero for class tokens.

        grid: that of these tokens; None: the one that the layer was built for.
        """
        assert self.convolution is not None
        tokens, grid = x[:, self.prefix :], grid or self.grid
        if grid is None or tokens.shape[1] != grid[0] * grid[1]:
            raise InputError(
                f"expected tokens of the grid {grid}, which the layer was built for, found {tokens.shape[1]}; build "
                "it for this size (cache(): example=), or with convolution=False"
            )
        image = self.convolution(tokens.transpose(1, 2).unflatten(2, grid))
        return F.pad(image.flatten(2).transpose(1, 2), (0, 0, self.prefix, 0))


def is_plain_linear(module: Any) -> bool:
    """Whether calling the module is a product with its weight and a sum with its bias, and nothing else."""
    return type(module) in (nn.Linear, Linear, Projection) and module.bias is not None and is_plain(module)


@exportable
class GatedState(NamedTuple):
    """The inner attention's state and, where rows carry a cache, the state of its updates (else None)."""

    inner: State
    updates: CacheState | None


class GatedCacheAttention(GatedBranch):
    """An attention that also attends to a gated recurrent cache: `y, state = layer(x, state=None, mask=None)`.

        O^h = σ(λ_h)·o_mem^h + (1 − σ(λ_h))·o_self^h,   o_mem = softmax(q(X)·k(C)ᵀ/√(Dm/H))·v(C)

    x [B, T, D]; mask [B, T] bool, True = valid; y [B, T, D]. `inner` is any `HeadAttention` (None: softmax), `grc` has
    the switches (`mnemos.GRC`), `grid` is the (height, width) of an image's tokens, and `prefix` the number of class
    tokens before the tokens that are summarised (class tokens read the cache and are not written).
    Cost in addition to the inner attention: O(T·Tm·D) to read and O(Tm·Dm²) to update, at any length.

    scope="shared": one cache [Tm, Dm] for the batch, a saved buffer. A training forward reads C_t, computed from the
    stored cache and the forward's own tokens, and stores the mean of C_t over the batch (`StoredCache` says when).
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
        if not isinstance(inner, HeadAttention):
            raise InputError(
                f"inner: expected an attention with the methods and declarations of mnemos.types.HeadAttention, found "
                f"{type(inner).__name__}; add what it lacks, such as `heads` and `project`, or leave the cache out"
            )
        if (inner.dim, inner.num_heads, inner.causal) != (dim, num_heads, causal):
            raise InputError(
                f"inner: expected an attention of dim {dim}, {num_heads} heads, causal={causal}; found dim "
                f"{inner.dim}, {inner.num_heads} heads, causal={inner.causal}; build both alike"
            )
        if causal and (prefix or grid):
            raise InputError("causal=True: expected no grid and no class token, found one; use causal=False for images")
        super().__init__(dim, num_heads, grc or GRC(), inner, grid=grid, prefix=prefix)
        if self.grc.mix == "channels" and self.lift is None:
            raise InputError(
                'GRC.mix: a layer of mnemos with lift="project" mixes its "heads", found "channels"; leave mix out'
            )
        self.causal = causal

    # --- What the layer declares of itself ---

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
        """Reading the batch mean makes a row depend on all rows."""
        return (self.grc.constant or self.grc.read == "sample") and self.inner.rows_independent

    @property
    def state_gradient(self) -> bool:
        """Through the caches of rows, where these are carried."""
        carried = self.causal or self.grc.write
        return self.grc.scope == "stream" and carried and self.inner.state_gradient

    @property
    def future_free(self) -> bool:
        """As the inner attention: a block reads what earlier ones wrote."""
        return self.inner.causal and bool(getattr(self.inner, "future_free", True))

    @property
    def padding_free(self) -> bool:
        """As the inner attention: padding takes no part in a block or an update."""
        return is_padding_free(self.inner)

    @property
    def eval_as_trained(self) -> bool:
        """Whether eval mode reads the cache that training reads; frozen, it reads the stored one."""
        return self.grc.constant or self.grc.inference != "frozen"

    @property
    def block(self) -> int:
        """Causal: the number of tokens between two updates."""
        return self.grc.block or self.cache.shape[0]

    # --- The call ---

    def initial_state(
        self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> GatedState | None:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        inner = self.inner.initial_state(batch_size, device, dtype)
        if not self.causal and self.grc.scope == "shared":
            return None if inner is None else GatedState(inner, None)
        block = self.block if self.causal else 0
        return GatedState(inner, CacheState.fresh(batch_size, block, self.cache, device))

    def pad_to_capacity(self, state: GatedState) -> GatedState:
        return GatedState(padded_state(self.inner, state.inner), state.updates)

    def heads(
        self, x: Tensor, state: GatedState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, GatedState | None]:
        """The mixed heads [B, T, H, D/H], before `project`, and the new state."""
        if state is not None:
            check_stateful(self.state_kind, state)
            wanted, shape = [x.shape[0], *self.cache.shape], None
            if isinstance(state, GatedState):
                shape = wanted if state.updates is None else list(state.updates.cache.shape)
            if shape != wanted:
                raise InputError(
                    f"expected a state with caches {wanted}, found {shape or type(state).__name__}; use the layer's "
                    "own initial_state, and select or reset to change its rows"
                )

        # --- the attention itself, and what the cache summarises ---
        inner_state, updates = (None, None) if state is None else state
        o_self, inner_state = self.inner.heads(x, inner_state, mask)  # checks x and mask
        x, projected = zero_invalid(x, mask), None
        if self.grc.source == "output" or self.lift is not None:
            projected = self.inner.project(o_self)
        x = x[..., : self.cache_dim]
        source = x if projected is None or self.grc.source == "input" else projected[..., : self.cache_dim]

        # --- the cache: its next contents, and what is read of it ---
        own = o_self if self.lift is None else None  # what is mixed where it is read
        if not self.moves:
            y = self.frozen(self.queries(x))
            y = y if own is None else self.mix_heads(own, y)
            if self.causal and updates is None:  # a state has the same structure with and without updates
                updates = CacheState.fresh(x.shape[0], self.block, self.cache, x.device)
        else:
            summary, valid = self.summarised(source, mask)
            if self.causal:
                y, updates = self.read_in_blocks(x, own, summary, updates, valid)
            elif self.grc.scope == "stream":  # all tokens of a row update its cache, and read it
                seen, before = None if updates is None else updates.seen, self.contents()
                before = before if updates is None else updates.started(before).cache
                new = self.update(summary, before, valid, self.grid)
                y = self.answer(x, new, own)
                after = new if self.grc.write else before.expand_as(new)
                updates = CacheState(after, new[:, :0], count_seen(summary, seen, valid))
            else:
                y = self.answer(x, self.current(summary, valid), own)

        if self.lift is not None:  # "pad": each branch has its own projection; groups of D/H channels are mixed
            assert projected is not None
            y = self.mix_heads(projected.unflatten(-1, (self.num_heads, -1)), self.lifted(y))
        return y, None if inner_state is None and updates is None else GatedState(inner_state, updates)

    def read_in_blocks(
        self, x: Tensor, own: Tensor | None, summary: Tensor, updates: CacheState | None, mask: Tensor | None
    ) -> tuple[Tensor, CacheState]:
        """Causal: `in_blocks`, of which programs have another form."""
        start = self.contents()
        state = None if updates is None else updates.started(start)
        return self.in_blocks(x, own, summary.to(start.dtype), state, mask, start)

    def project(self, heads: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]: the inner attention's projection, which both branches share."""
        return heads.flatten(2) if self.lift is not None else self.inner.project(heads)

    def forward(
        self, x: Tensor, state: GatedState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, GatedState | None]:
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


def gated(
    attention: HeadAttention, grc: GRC, length: int, grid: tuple[int, int] | None = None, prefix: int = 0
) -> GatedCacheAttention:
    """Put a gated cache around an attention; `length` is the number of slots that "auto" and "paper" stand for."""
    if isinstance(grc.length, str):
        grc = replace(grc, length=length)
    return GatedCacheAttention(attention.dim, attention.num_heads, attention, grc, attention.causal, grid, prefix)
