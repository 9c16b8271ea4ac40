"""The cached branch of GRC attention (Cached Transformers, eq. 3): queries from X attend to a gated cache."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import is_plain
from mnemos.memory.gated_cache import GatedCache
from mnemos.memory.grc import GRC
from mnemos.memory.projection import Projection
from mnemos.modes import in_graph
from mnemos.ops.gated_cache import native
from mnemos.ops.gated_cache.resampling import grid_shape
from mnemos.ops.linear import linear_attention
from mnemos.ops.precision import autocasts
from mnemos.types import HeadAttention, InputError

from .softmax import attend


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
        _check_grid(self)
        if inner is not None:
            self.inner = inner
        d = self.cache_dim
        pads = self.grc.lift == "pad"
        for name, width in zip(self.maps, (d, d, d if pads or out_dim else heads_dim or dim), strict=True):
            self.add_module(name, self.linear(d, width))
        self.lift = self.linear(d, d) if pads else self.linear(d, out_dim) if out_dim else None
        self.pad = ((out_dim or dim) - d) // num_heads if pads else 0
        on = self.grc.convolution if self.grc.convolution is not None else grid is not None
        self.convolution = nn.Conv2d(dim, dim, 3, padding=1, groups=d) if on else None
        self._memo: dict[str, tuple[torch.dtype | None, tuple[Tensor, ...], tuple[Tensor, ...]]] = {}

    @property
    def moves(self) -> bool:
        """Whether the cache that is read depends on the tokens of this call."""
        return (self.training and not self.learned) or self.grc.scope == "stream" or self.grc.inference == "transient"

    def map(self, role: str) -> nn.Linear | Projection:
        """The map to queries, keys or values, by its role: "query", "key" or "value"."""
        found: nn.Linear | Projection = getattr(self, self.maps[GatedBranch.maps.index(role)])
        return found

    def queries(self, x: Tensor) -> Tensor:
        """q(X) [B, T, H, Dm/H] of the first Dm channels of the layer's input, x [B, T, Dm]."""
        if not isinstance(x.shape[1], int):  # flattening strided rows would limit a program to some lengths
            return self.map("query")(x).unflatten(-1, (self.num_heads, -1))
        # A matrix whose rows are strided is multiplied without a copy.
        found = self.map("query")(x.flatten(0, 1))
        return found.view(*x.shape[:2], self.num_heads, found.shape[1] // self.num_heads)

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
        if self._calls_kernel(x) and all(map(is_plain_linear, linears)):
            weights = [w for one in linears for w in (one.weight, one.bias)]
            given = (x, cache, own, None if own is None else self.mix, *weights)
            kernel = native.Reading(self._compose, self.num_heads)
            if native.takes(*given) and kernel.fits(*given):
                return native.fused(kernel, *given)
        o_mem = self.read(self.queries(x), cache)
        return o_mem if own is None else self.mix_heads(own, o_mem)

    def _calls_kernel(self, x: Tensor) -> bool:
        """Whether a kernel may read the cache for these inputs, as far as the branch's own modules allow it."""
        if torch.compiler.is_compiling() or self.grc.branch != "softmax":
            return False
        return not autocasts(x.device.type)

    def mix_heads(self, own: Tensor, o_mem: Tensor) -> Tensor:
        """(1 − σ(λ))·own + σ(λ)·o_mem, for each head."""
        return torch.lerp(own, o_mem.to(own.dtype), torch.sigmoid(self.mix).to(own.dtype)[:, None])

    def _compose(
        self, x: Tensor, cache: Tensor, own: Tensor | None, mix: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor]:
        """The kernel's result in PyTorch's operations, as a function of all its tensors."""
        w_q, b_q, w_k, b_k, w_v, b_v = weights
        parts = (F.linear(a, w, b) for a, w, b in ((x, w_q, b_q), (cache, w_k, b_k), (cache, w_v, b_v)))
        o_mem = self._attend(*(part.unflatten(-1, (self.num_heads, -1)) for part in parts))
        return (o_mem if own is None or mix is None else torch.lerp(own, o_mem, torch.sigmoid(mix)[:, None]),)

    def read(self, query: Tensor, cache: Tensor) -> Tensor:
        """o_mem [B, T, H, M] of queries [B, T, H, Dm/H] over a cache [B or 1, Tm, Dm]."""
        return self._attend(query, self._split("key", cache), self._split("value", cache))

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
        self._memo.clear()
        return super().train(mode)

    def lifted(self, o_mem: Tensor) -> Tensor:
        """o_mem [B, T, H, M] at the width of the attention's heads, [B, T, H, D/H]."""
        if self.lift is None:
            return o_mem
        return F.pad(self.lift(o_mem.flatten(2)).unflatten(-1, (self.num_heads, -1)), (0, self.pad))

    def frozen(self, query: Tensor) -> Tensor:
        """o_mem from the stored cache, or the learned constant, as it is; its keys and values are projected once."""
        projected = self.memoise(
            "projected",
            (self.cache, *self.map("key").parameters(), *self.map("value").parameters()),
            lambda: (self._split("key", self.cache[None]), self._split("value", self.cache[None])),
        )
        found = self._attend(query, *projected)
        return self.beside_gates(found) if self.learned else found

    def memoise(
        self, name: str, tensors: Sequence[Tensor], compute: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """The result of `compute`, a function of `tensors`, kept in eval without gradient until a value changes.

        The values are compared with copies, which costs one pass over them: addresses and versions do not show writes
        through `.data`, by which libraries exchange weights for averaged ones. On devices other than the CPU a
        comparison would wait for the device, so `compute` runs at every call.
        """
        changing = self.training or torch.is_grad_enabled() or tensors[0].device.type != "cpu"
        if changing or in_graph():
            if self._memo:  # torch.compile counts clearing an empty dict as a side effect, too
                self._memo.clear()
            return compute()
        precision = torch.get_autocast_dtype("cpu") if autocasts("cpu") else None
        kept = self._memo.get(name)
        try:
            if kept is None or kept[0] != precision or not all(map(_equal, kept[1], tensors)):
                kept = precision, tuple(t.detach().clone() for t in tensors), compute()
        except RuntimeError:  # tensors inside a transform (vmap) and fake tensors have no values
            return compute()
        self._memo[name] = kept
        return kept[2]

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


def _equal(kept: Tensor, present: Tensor) -> bool:
    return kept.dtype == present.dtype and torch.equal(kept, present)


def _check_grid(branch: GatedBranch) -> None:
    grc, grid = branch.grc, branch.grid
    if grc.resample == "grid":
        grid_shape(grid, branch.cache.shape[0])
    if grc.convolution and (grid is None or branch.dim % branch.cache_dim):
        raise InputError(
            f"convolution=True: expected a grid and a dim divisible by the cache's width, found grid={grid}, "
            f"dim {branch.dim} and cache width {branch.cache_dim}; give a grid, or ratio 1/n"
        )
    if grc.convolution is None and grid is not None and branch.dim % branch.cache_dim:
        raise InputError(
            f"the official preset's convolution: expected a dim divisible by the cache's width, found dim "
            f"{branch.dim} and cache width {branch.cache_dim}; use ratio 1/n or convolution=False"
        )


def is_plain_linear(module: Any) -> bool:
    """Whether calling the module is a product with its weight and a sum with its bias, and nothing else."""
    return type(module) in (nn.Linear, Projection) and module.bias is not None and is_plain(module)
