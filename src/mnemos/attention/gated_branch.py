"""The cached branch of GRC attention (Cached Transformers, eq. 3): a gated cache that queries from X attend to."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos._compat import write_count
from mnemos.memory.gated_cache import GatedCache
from mnemos.memory.grc import GRC
from mnemos.ops.gated_cache.resample import grid_shape
from mnemos.ops.linear import linear_attention
from mnemos.ops.precision import autocasts
from mnemos.types import InputError

from .softmax import attend


class GatedBranch(GatedCache):
    """Base of what mixes a gated cache into an attention: `query`, `key`, `value` over Dm channels, and `lift`.

        o_mem = softmax(q(X)·k(C)ᵀ/√(Dm/H))·v(C)

    Beside an attention of ours, `inner`, whose projection follows, values are D/H a head. Beside one that is already
    projected, to `out_dim` channels, they are Dm/H a head and `lift` brings them there. lift="pad" (the release)
    projects Dm to Dm in both, and pads each head with zeros. `grid` is the (height, width) of an image's tokens,
    `prefix` how many class tokens stand before those that are summarised (they read the cache, and are not written).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grc: GRC,
        inner: nn.Module | None = None,
        out_dim: int | None = None,
        grid: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> None:
        super().__init__(dim, num_heads, grc)
        self.dim, self.num_heads, self.grid, self.prefix = dim, num_heads, grid, prefix
        _check_grid(self)
        if inner is not None:
            self.inner: Any = inner
        d = self.cache_dim
        self.query, self.key = nn.Linear(d, d), nn.Linear(d, d)
        pads = self.grc.lift == "pad"
        self.value = nn.Linear(d, d if pads or out_dim else dim)
        self.lift = nn.Linear(d, d) if pads else nn.Linear(d, out_dim) if out_dim else None
        self.pad = ((out_dim or dim) - d) // num_heads if pads else 0
        on = self.grc.convolution if self.grc.convolution is not None else grid is not None
        self.convolution = nn.Conv2d(dim, dim, 3, padding=1, groups=d) if on else None
        self._remembered: dict[str, tuple[tuple, tuple[Tensor, ...]]] = {}
        self.register_load_state_dict_pre_hook(_forget)

    @property
    def moves(self) -> bool:
        """Whether the cache that is read changes with the tokens of this call."""
        return self.training or self.grc.scope == "stream" or self.grc.inference == "transient"

    def queries(self, x: Tensor) -> Tensor:
        """q(X) [B, T, H, Dm/H] of the first Dm channels of the layer's input, x [B, T, Dm]."""
        # As a matrix, whose rows may stand apart, it is multiplied without a copy.
        return self.query(x.flatten(0, 1)).view(*x.shape[:2], self.num_heads, -1)

    def summarised(self, source: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is summarised, [B, T, Dm], and its mask, without class tokens."""
        if not self.prefix:
            return source, mask
        return source[:, self.prefix :], None if mask is None else mask[:, self.prefix :]

    def current(self, source: Tensor, mask: Tensor | None) -> Tensor:
        """The shared cache that these tokens make and read: C_t [B, Tm, Dm], or its mean [1, Tm, Dm].

        In training its batch mean is left as the stored cache's successor.
        """
        # A copy: the buffer is written at the next forward, perhaps before this one's backward.
        before = self.cache.clone()
        new = self.update(source, before, mask, self.grid)
        if self.training:
            mean, rows = self.batch_mean(new, None if mask is None else mask.any(1))
            self.stage(mean, rows)
            if self.grc.read == "mean":
                mean, rows = self.read_mean(mean, rows)
                new = torch.where(rows > 0, mean, before)[None]
        return new

    def read(self, query: Tensor, cache: Tensor) -> Tensor:
        """o_mem [B, T, H, M] of queries [B, T, H, Dm/H] over a cache [B or 1, Tm, Dm]."""
        return self._attend(query, self._split(self.key, cache), self._split(self.value, cache))

    def _split(self, projection: nn.Linear, cache: Tensor) -> Tensor:
        return projection(cache.to(projection.weight.dtype)).unflatten(-1, (self.num_heads, -1))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        b, t = query.shape[:2]
        if key.shape[0] == 1 < b and self.num_heads == 1:  # torch shares the backward out by rows and heads
            key, value = key.expand(b, -1, -1, -1), value.expand(b, -1, -1, -1)
        elif key.shape[0] == 1 < b:  # one cache for all rows: one long row of queries reads it
            return self._attend(query.flatten(0, 1)[None], key, value).unflatten(1, (b, t)).squeeze(0)
        if self.grc.branch == "linear":
            return linear_attention(query, key, value, causal=False)[0]
        return attend(query, key, value, None, False)

    def train(self, mode: bool = True) -> Any:
        """As of any module; forgets what a frozen cache was projected to."""
        self._remembered.clear()
        return super().train(mode)

    # Moved or loaded weights may stand at the address, and say the version, of those before.
    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move what is pending; forget what a frozen cache was projected to."""
        self._remembered.clear()
        super().moved(fn)

    def lifted(self, o_mem: Tensor) -> Tensor:
        """o_mem [B, T, H, M] as wide as what it is mixed with, [B, T, H, D/H]."""
        if self.lift is None:
            return o_mem
        return F.pad(self.lift(o_mem.flatten(2)).unflatten(-1, (self.num_heads, -1)), (0, self.pad))

    def frozen(self, query: Tensor) -> Tensor:
        """The stored cache, read as it is: its keys and values are projected once."""
        projected = self.remembered(
            "projected",
            (self.cache, *self.key.parameters(), *self.value.parameters()),
            lambda: (self._split(self.key, self.cache[None]), self._split(self.value, self.cache[None])),
        )
        return self._attend(query, *projected)

    def remembered(
        self, name: str, tensors: Sequence[Tensor], compute: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """What `compute` makes of `tensors`, kept in eval without gradient until one of them changes.

        Versions tell of most changes. Fused optimisers keep theirs secret, but need a forward with gradient, after
        which nothing is kept. Whoever writes through `.data` calls eval() again.
        """
        changing = self.training or torch.is_grad_enabled()
        if changing or torch.compiler.is_compiling() or any(t.is_inference() for t in tensors):
            if self._remembered:  # to clear nothing is a side effect to a compiler, too
                self._remembered.clear()
            return compute()
        device = tensors[0].device.type
        precision = torch.get_autocast_dtype(device) if autocasts(device) else None
        try:
            stamp = (precision, *((t.data_ptr(), write_count(t)) for t in tensors))
        except RuntimeError:  # of a transformation (vmap), or fake: they stand nowhere
            return compute()
        kept = self._remembered.get(name)
        if kept is None or kept[0] != stamp:
            kept = self._remembered[name] = (stamp, compute())
        return kept[1]

    def convolve(self, x: Tensor) -> Tensor:
        """The positional term [B, T, D]: a grouped 3×3 convolution of the grid of tokens; class tokens get none."""
        assert self.convolution is not None
        tokens = x[:, self.prefix :]
        if self.grid is None or tokens.shape[1] != self.grid[0] * self.grid[1]:
            raise InputError(
                f"expected the {self.grid} grid of tokens that the layer was built for, found {tokens.shape[1]}; build "
                "it for this size (cache(): example=), or with convolution=False"
            )
        image = self.convolution(tokens.transpose(1, 2).unflatten(2, self.grid))
        return F.pad(image.flatten(2).transpose(1, 2), (0, 0, self.prefix, 0))


def _forget(branch: nn.Module, *_: Any) -> None:
    assert isinstance(branch, GatedBranch)
    branch._remembered.clear()


def _check_grid(branch: GatedBranch) -> None:
    grc, grid = branch.grc, branch.grid
    if grc.resample == "grid":
        grid_shape(grid, branch.cache.shape[0])
    if grc.convolution and (grid is None or branch.dim % branch.cache_dim):
        raise InputError(
            f"convolution=True needs a grid and width % cache width = 0, found grid={grid}, "
            f"{branch.dim} % {branch.cache_dim}; give a grid, or ratio 1/n"
        )
    if grc.convolution is None and grid is not None and branch.dim % branch.cache_dim:
        raise InputError(
            f"the official preset's convolution needs width % cache width = 0, found "
            f"{branch.dim} % {branch.cache_dim}; use ratio 1/n or convolution=False"
        )
