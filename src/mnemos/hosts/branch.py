"""The cached branch in a model that `cache` was called on: the child `grc` of a host's attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.gated import GatedBranch, is_plain_linear
from mnemos.memory.gated_cache import GRC, Projection, begin_forward, end_forward, promote, recomputing
from mnemos.ops.gated_cache import grid_shape, onto_grid, pool_grid, resample
from mnemos.ops.precision import autocasts
from mnemos.types import InputError

from .grids import Grid, GridReader, Grids, ValidPart
from .host import AttentionInput, Host
from .masks import combine
from .row_caches import carrying, rows_before, rows_written


class HostBranch(GatedBranch):
    """Mixes a gated cache into a host's attention: `y = branch(x, y, mask=None)`.

        mix="heads":     O^h = σ(λ_h)·o_mem^h + (1 − σ(λ_h))·y^h              h: heads (eq. 2)
        mix="channels":  O^h = σ(λ_h)·(lift(o_mem))^h + (1 − σ(λ_h))·y^h      h: groups of D/H channels

    x [B, T, D_in] is the attention's input; mask [B, T] bool, True = valid. y [B, T, D] is its heads, which its
    projection is then applied to (mix="heads"), or its output, which in most hosts is projected already. With the gate
    closed (λ → −∞) the result is y, bit for bit. With `place.windows` (Swin, length="paper") x and y are rows of
    windows, and all windows of a sample write and read one cache. With scope="stream" each row has a cache of its own,
    which `carry` takes from call to call; in a call without it rows are new, and their caches zeros.

    Cost of a training forward per sample, in multiply-adds: update 4·Tm·Dm² (and 2·Tm·Dm² once per batch), keys and
    values 2·Tm·Dm², queries T·Dm², scores and values 2·T·Tm·Dm, lift T·Dm·D; mix="heads" has values of D channels and
    no lift. Frozen (`inference="frozen"`, eval()): only the last three. See mnemos/ops/gated_cache/cost.py.
    """

    linear = Projection
    # No name of an attention's own parts: adapters (LoRA) choose the modules that they wrap by the ends of names.
    maps = "to_query", "to_key", "to_value"

    def __init__(self, host: Host, place: AttentionInput, grc: GRC, dim: int, out_dim: int, num_heads: int) -> None:
        if grc.scope == "stream" and (place.rows != 1 or place.padded is not None or place.windows is not None):
            raise InputError(
                'expected GRC(scope="shared"), found scope="stream"; the windows of this attention are rows, and only '
                "the rows of a batch carry a cache"
            )
        grc = replace(grc, mix=grc.mix or "channels")
        projected = out_dim if grc.mix == "channels" else None
        super().__init__(dim, num_heads, grc, None, projected, place.grid, place.prefix, heads_dim=out_dim)
        self.host, self.out_dim, self.pool, self.windows = host, out_dim, place.pool, place.windows
        self.padded = place.padded
        self.own_grid: GridReader | None = None  # how the attention's calls show the grid of their tokens
        self.grids: Grids | None = None  # or where a module above notes it
        self.valid_part: ValidPart | None = None  # which part of each image of a padded batch is the image
        if self.convolution is not None:  # the initial model computes what the host computes
            nn.init.zeros_(self.convolution.weight)
            assert self.convolution.bias is not None
            nn.init.zeros_(self.convolution.bias)
        self.register_load_state_dict_pre_hook(_keep_own)
        self.kept: str | None = None  # the prefix under which the last loaded checkpoint had no entries
        # Called with the branch, y and lift(o_mem), or with the heads and o_mem.
        self.observer: Callable[[HostBranch, Tensor, Tensor], object] | None = None

    def forward(
        self, x: Tensor, y: Tensor, mask: Tensor | None = None, **context: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See the class. context: `grid`, that of the tokens, or `carried` (`DecoderBranch`).

        At the input of a projection, with `convolution`: the mixed heads, and the positional term, for its output.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim or y.shape != (*x.shape[:2], self.out_dim):
            raise InputError(
                f"the host's attention: expected to map [B, T, {self.dim}] to [B, T, {self.out_dim}], found "
                f"{tuple(x.shape)} to {tuple(y.shape)}; name others with where="
            )
        if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
            raise InputError(
                f"expected a mask of booleans {tuple(x.shape[:2])}, "
                f"found {mask.dtype} {tuple(mask.shape)}; True = valid"
            )
        # In the model's own forward, hooks begin and end it (see `hooks`). A part of a model called alone does it here.
        began = self.training and self.complete and begin_forward([self])
        try:
            mixed = self._mixed(x, y, mask, **context)
            position = None if self.convolution is None else self.convolve(x, context.get("grid"))
        except BaseException:
            if began:
                promote([self])  # discards what the failed forward left: the next one starts again
            raise
        if began:
            end_forward([self])
        if position is None:
            return mixed
        return (mixed, position) if self.before_projection else mixed + position.to(y.dtype)

    @property
    def before_projection(self) -> bool:
        """Whether the branch is mixed in at the input of the projection inside the attention."""
        return self.grc.mix == "heads" and bool(self.host.projection)

    def _mixed(self, x: Tensor, y: Tensor, mask: Tensor | None, **context: Any) -> Tensor:
        if self.grc.mix == "channels":
            return self._mix(y, self._read_cache(x, y, mask, **context))
        own = y.unflatten(-1, (self.num_heads, -1))
        if self.observer is None:
            return self._read_cache(x, y, mask, own=own, **context).flatten(2)
        o_mem = self._read_cache(x, y, mask, **context)
        self.observer(self, y, o_mem.flatten(2))
        return self.mix_heads(own, o_mem).flatten(2)

    def _read_cache(
        self, x: Tensor, y: Tensor, mask: Tensor | None, own: Tensor | None = None, grid: Grid | None = None
    ) -> Tensor:
        """o_mem [B, T, H, M]; with `own`, the attention's own heads of this shape, mixed with them (eq. 2)."""
        x = x[..., : self.cache_dim]
        windows = None if self.windows is None else self.windows.at(grid)
        asking = x
        if windows is not None:  # one cache for all windows of a sample: their queries are one row
            windows.check(x)
            asking = x.reshape(-1, windows.tokens, x.shape[2])
            own = None if own is None else own.reshape(*asking.shape[:2], *own.shape[2:])
        if self.moves:
            source = x if self.grc.source == "input" else y[..., : self.cache_dim]
            found = self.answer(asking, self.current(*self.summarised(source, mask, grid)), own)
        else:
            found = self.frozen(self.queries(asking))
            found = found if own is None else self.mix_heads(own, found)
        return found if windows is None else found.reshape(*x.shape[:2], *found.shape[2:])

    def current(self, source: Tensor, mask: Tensor | None) -> Tensor:
        """The cache that these tokens update and read; scope="stream": each row's own, [B, Tm, Dm]."""
        if self.grc.scope == "shared":
            return super().current(source, mask)
        if recomputing() and not carrying():  # what the first time read is not known here
            raise InputError(
                'GRC(scope="stream") in an encoder: expected activation checkpointing around mnemos.hosts.carry, found '
                "it inside; use it around, or mnemos.replay, which keeps the state of every segment"
            )
        zeros = torch.zeros_like(self.cache)
        before = rows_before(self, len(source), zeros)
        new = self.update(source, before if self.grc.write else zeros, mask, self.grid)
        rows_written(self, new if self.grc.write else before)
        return new

    def summarised(self, source: Tensor, mask: Tensor | None, grid: Grid | None = None) -> tuple[Tensor, Tensor | None]:
        """The tokens that the cache summarises: all but class tokens and padding, in the grid's order.

        For length="paper", squares are averaged. On another grid than the one that the cache was built for, the tokens
        are brought onto the slots' grid where the slots form one. Of images that padding makes equal in size, each
        one's own part is summarised, as if it were alone (`valid_part`).
        """
        source, mask = super().summarised(source, mask)
        sizes = None if self.valid_part is None or grid is None else self.valid_part.at(grid)
        if self.padded is not None:
            windows = self.padded.at(grid)
            mask = combine(mask, windows.valid(len(source), source.device))
            if sizes is not None and grid is not None:
                mask = combine(mask, windows.to_windows(ValidPart.mask(sizes, grid, source.device)[..., None])[..., 0])
        if self.windows is not None:
            source = self.windows.at(grid).to_grid(source)
        if sizes is not None and grid is not None and self.padded is None:
            if mask is not None:
                raise InputError("expected images padded by their sizes or by a mask, found both; use one of them")
            return torch.cat(
                [self._summarise_part(row, grid, size) for row, size in zip(source, sizes, strict=True)]
            ), None
        return self._bring_onto_slots(source, mask, grid)

    def _summarise_part(self, row: Tensor, grid: Grid, size: Grid) -> Tensor:
        """The slots' tokens [1, Tm, Dm] of the upper left part of a row's tokens [H·W, Dm], of `size`."""
        part = row.unflatten(0, grid)[: size[0], : size[1]].flatten(0, 1)[None]
        found = self._bring_onto_slots(part, None, size)[0].to(self.cache.dtype)
        return resample(found, self.cache.shape[0], None, self.grc.resample, size)

    def _bring_onto_slots(self, source: Tensor, mask: Tensor | None, grid: Grid | None) -> tuple[Tensor, Tensor | None]:
        """Tokens of a grid, on the slots' grid where the slots form one or squares are averaged, and their mask."""
        if self.pool > 1 and mask is not None:
            raise InputError(
                'GRC(length="paper"): expected no padding mask, because squares of tokens are averaged, found one; '
                "give GRC(length=) as numbers"
            )
        if self.grid is None or self.padded is not None:
            grid = None  # the grid is that of a window, the same in every call
        present, slots = grid or self.grid, self._slot_grid()
        if slots is not None and present is not None and present != self.grid:
            source = onto_grid(source.to(self.cache.dtype), present, slots, mask, self.grc.resample != "grid")
            mask = None if mask is None else mask.any(1, keepdim=True).expand(-1, source.shape[1])
        elif self.pool > 1:
            assert self.grid is not None  # checked where the slots were counted
            source = pool_grid(source.to(self.cache.dtype), self.grid, self.pool)
        return source, mask

    def _slot_grid(self) -> Grid | None:
        """The (height, width) of the slots, if they form a grid."""
        if self.grid is None:
            return None
        if self.grc.resample == "grid":
            return grid_shape(self.grid, self.cache.shape[0])
        if self.pool > 1 or self.windows is not None:
            return -(-self.grid[0] // self.pool), -(-self.grid[1] // self.pool)
        return None

    @property
    def needs_grid(self) -> bool:
        """Whether what the branch computes depends on the grid of the tokens."""
        placed = self.padded is not None or self.windows is not None or self.pool > 1
        placed = placed or self.valid_part is not None
        return placed or self.convolution is not None or self.grc.resample == "grid"

    def convolve(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """The positional term [B, T, D], over the whole grid also where it is divided into windows."""
        if self.windows is None:
            return super().convolve(x, None if self.padded is not None else grid)
        windows = self.windows.at(grid)
        return windows.to_windows(super().convolve(windows.to_grid(x), windows.grid))

    def _mix(self, y: Tensor, o_mem: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(self, y, self.lifted(o_mem).flatten(2))
        if self.grc.lift == "pad" or not is_plain_linear(self.lift):
            share = torch.sigmoid(self.mix)
            heads = y.unflatten(-1, (self.num_heads, -1))
            return torch.lerp(heads, self.lifted(o_mem).to(y.dtype), share.to(y.dtype)[:, None]).flatten(2)
        assert self.lift is not None
        weight, bias, rest = self._scale_lift()
        base = torch.addcmul(bias.to(y.dtype), y, rest.to(y.dtype))
        alike = o_mem.dtype == weight.dtype == base.dtype and not autocasts(y.device.type)
        if alike and not torch.compiler.is_exporting():  # one fused product and addition, of one row of all tokens
            rows = o_mem.flatten(2).flatten(0, 1)
            return base.flatten(0, 1).addmm_(rows, weight.t()).unflatten(0, y.shape[:2])
        return base + F.linear(o_mem.flatten(2), weight).to(y.dtype)

    def _scale_lift(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lift's weights and bias scaled by σ(λ) per channel (cheaper than scaling its outputs), and 1 − σ(λ)."""
        assert self.lift is not None
        share = torch.sigmoid(self.mix).repeat_interleave(self.out_dim // self.num_heads)
        return self.lift.weight * share[:, None], self.lift.bias * share, 1 - share

    def extra_repr(self) -> str:
        """Host, mixing, slots, width and preset."""
        return f"host={self.host.name!r}, mix={self.grc.mix!r}, {super().extra_repr()}"


def _keep_own(branch: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Keep the branch's values if a checkpoint has none, as one of the host alone; strict=True must accept it."""
    assert isinstance(branch, HostBranch)
    branch.kept = None if any(key.startswith(prefix) for key in state_dict) else prefix
    if branch.kept is not None:
        state_dict.update(branch.state_dict(prefix=prefix))
