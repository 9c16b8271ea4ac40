"""Resample the tokens of a row to the slots of a cache, and the tokens of Swin's windows to one grid."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.errors import InputError
from mnemos.ops.padding import take, valid_first


def resample(
    tokens: Tensor,
    length: int,
    mask: Tensor | None = None,
    method: str = "nearest",
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """Resample the valid tokens of each row, [B, T, C] -> [B, length, C]; without a mask, T = length is the identity.

    mask [B, T] bool, True = valid; the result of a row without valid tokens is undefined.
    nearest: slot i takes token floor(i·n/length) of the n valid ones. linear: between the two nearest centres.
    grid: bilinear over the (height, width) that the T tokens form. Cost O(B·length·C).
    Raises InputError for an unknown method, and for method="grid" if T is not height·width, or if `length` slots cannot
    form a grid of that shape.
    """
    b, t, c = tokens.shape
    if t == 0:
        return tokens.new_zeros(b, length, c)
    if method == "grid":
        return _resample_grid(tokens, length, mask, grid)
    if mask is None:
        if same_number(t, length):
            return tokens
        if method == "nearest":
            return tokens.index_select(1, nearest_tokens(t, length, tokens.device))
        count, order = torch.full((1, 1), t, device=tokens.device), None
    else:
        count, order = mask.sum(1, keepdim=True), valid_first(mask)
    slot = torch.arange(length, device=tokens.device)[None]
    last = (count - 1).clamp(min=0)
    if method == "nearest":
        return _take(tokens, torch.minimum(slot * count // length, last), order)
    if method != "linear":
        raise InputError(f"expected resample nearest, linear or grid, found {method!r}; choose one of them")
    exact = torch.promote_types(tokens.dtype, torch.float32)
    centre = ((slot.to(exact) + 0.5) * count / length - 0.5).clamp(min=0)
    low = torch.minimum(centre.floor().long(), last)
    high = torch.minimum(low + 1, last)
    share = (centre - low).clamp(max=1)[..., None].to(tokens.dtype)
    return torch.lerp(_take(tokens, low, order), _take(tokens, high, order), share)


def same_number(tokens: int, length: int) -> bool:
    """Whether there are as many tokens as slots; False for a program of any number of tokens, which has no number."""
    return isinstance(tokens, int) and tokens == length


def nearest_tokens(tokens: int, length: int, device: torch.device | None = None) -> Tensor:
    """The tokens of method="nearest" without a mask: slot i takes token floor(i·T/length). [length] int64."""
    return torch.arange(length, device=device) * tokens // length


def _take(tokens: Tensor, index: Tensor, order: Tensor | None) -> Tensor:
    """tokens[b, order[b, index[b, i]]]; without `order` all rows have the same index [1, length]."""
    return tokens.index_select(1, index[0]) if order is None else take(tokens, order.gather(1, index))


def _resample_grid(tokens: Tensor, length: int, mask: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
    t = tokens.shape[1]
    if grid is not None and t == length != grid[0] * grid[1]:  # these are the slots of a call with another grid
        return tokens
    if grid is None or grid[0] * grid[1] != t:
        raise InputError(f'resample="grid": expected the (height, width) of {t} tokens, found {grid}; give grid=')
    if mask is None and t == length:
        return tokens
    return onto_grid(tokens, grid, grid_shape(grid, length), mask)


def pool_grid(tokens: Tensor, grid: tuple[int, int], side: int) -> Tensor:
    """Average the tokens of each square of a grid, [B, H·W, C] -> [B, ⌈H/side⌉·⌈W/side⌉, C].

    The squares have side × side tokens; those at the lower and the right edge have what is left. Cost O(B·H·W·C).
    Raises InputError unless the tokens form the grid.
    """
    if tokens.shape[1] != grid[0] * grid[1]:
        raise InputError(
            f'GRC(length="paper"): expected tokens of the grid {grid} that the cache was built for, found '
            f"{tokens.shape[1]}; call cache() with an example= of this size"
        )
    image = tokens.transpose(1, 2).unflatten(2, grid)
    return F.avg_pool2d(image, side, ceil_mode=True, count_include_pad=False).flatten(2).transpose(1, 2)


def onto_grid(
    tokens: Tensor, grid: tuple[int, int], shape: tuple[int, int], mask: Tensor | None = None, average: bool = False
) -> Tensor:
    """Tokens of a grid on a grid of another shape, [B, H·W, C] -> [B, H'·W', C]: bilinear, or averages of areas.

    mask [B, H·W] bool, True = valid: bilinear alone, with the weights of the valid tokens; where these are 0, the mean
    of the row's valid tokens. Cost O(B·(H·W + H'·W')·C).
    """
    image = tokens.transpose(1, 2).unflatten(2, grid)
    if average:
        return F.adaptive_avg_pool2d(image, shape).flatten(2).transpose(1, 2)
    if mask is None:
        small = F.interpolate(image, shape, mode="bilinear", align_corners=False)
        return small.flatten(2).transpose(1, 2)
    valid = mask[:, None].to(tokens.dtype)
    both = torch.cat([torch.where(mask[..., None], tokens, 0).transpose(1, 2), valid], 1).unflatten(2, grid)
    small = F.interpolate(both, shape, mode="bilinear", align_corners=False).flatten(2).transpose(1, 2)
    values, weights = small[..., :-1], small[..., -1:]
    mean = torch.where(mask[..., None], tokens, 0).sum(1, keepdim=True) / valid.sum(2, keepdim=True).clamp(min=1)
    return torch.where(weights > 0, values / weights.clamp(min=1e-6), mean)


def grid_shape(grid: tuple[int, int] | None, length: int) -> tuple[int, int]:
    """The (height, width) of `length` slots in the proportions of a grid. Raises InputError if there is none."""
    if grid is None:
        raise InputError('resample="grid": expected the (height, width) of the tokens, found none; give grid=')
    height = max(1, round(grid[0] * math.sqrt(length / (grid[0] * grid[1]))))
    width = length // height
    if height * width != length:
        raise InputError(
            f"expected slots in the shape of a {grid[0]} x {grid[1]} grid, found {length}; use {height * width}"
        )
    return height, width


class Windows(NamedTuple):
    """How a Swin block divides a grid of tokens into windows, which are rows of the batch: tokens [B·n, A, C].

    grid: (height, width) of one sample's tokens. window: (height, width) of a window. shift: the places by which the
    grid is rolled back before it is divided; (0, 0) for none. pads_first: the grid is padded to whole windows before
    it is rolled (Hugging Face), not after (timm). fixed_shift: the shift stays on a grid of one window (Swin v2 of
    Hugging Face).
    """

    grid: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    pads_first: bool = False
    fixed_shift: bool = False

    @property
    def divided(self) -> tuple[int, int]:
        """The number of windows down and across."""
        return -(-self.grid[0] // self.window[0]), -(-self.grid[1] // self.window[1])

    @property
    def tokens(self) -> int:
        """The number of tokens of one sample in all windows, with padding."""
        down, across = self.divided
        return down * across * self.window[0] * self.window[1]

    def check(self, x: Tensor) -> None:
        """Raise InputError unless x [B·n, A, C] holds whole samples."""
        (down, across), (height, width) = self.divided, self.window
        if x.shape[1] != height * width or x.shape[0] % (down * across):
            raise InputError(
                f"expected {down * across} windows of {height} x {width} tokens for each sample's grid {self.grid}, "
                f"found tokens of shape {tuple(x.shape[:2])}; call cache() with an example= of this size"
            )

    def to_grid(self, x: Tensor) -> Tensor:
        """[B·n, A, C] -> [B, H·W, C]: the tokens in the grid's order, without padding. Cost: copies of x."""
        self.check(x)
        (down, across), (height, width) = self.divided, self.window
        cut = x.reshape(-1, down, across, height, width, x.shape[-1]).transpose(2, 3)
        image = cut.reshape(-1, down * height, across * width, x.shape[-1])
        if not self.pads_first:
            image = self._crop(image)
        if any(self.shift):
            image = image.roll(self.shift, (1, 2))
        return self._crop(image).flatten(1, 2)

    def valid(self, rows: int, device: torch.device) -> Tensor | None:
        """Which tokens of `rows` windows are no padding, [rows, A] bool; None: all, or these are no whole samples."""
        (down, across), (height, width) = self.divided, self.window
        if self.grid == (down * height, across * width) or rows % (down * across):
            return None
        whole = self.to_windows(torch.ones(1, self.grid[0] * self.grid[1], 1, dtype=torch.bool, device=device))
        return whole[..., 0].repeat(rows // (down * across), 1)

    def at(self, grid: tuple[int, int] | None) -> "Windows":
        """The same windows on another grid. A grid of one window is not shifted by Hugging Face's Swin."""
        if grid is None or grid == self.grid:
            return self
        alone = self.pads_first and not self.fixed_shift and min(grid) <= min(self.window)
        return self._replace(grid=grid, shift=(0, 0) if alone else self.shift)

    def to_windows(self, x: Tensor) -> Tensor:
        """[B, H·W, C] -> [B·n, A, C]: the inverse of `to_grid`, with zeros as padding."""
        (down, across), (height, width) = self.divided, self.window
        image = x.unflatten(1, self.grid)
        fill = 0, 0, 0, across * width - self.grid[1], 0, down * height - self.grid[0]
        back = -self.shift[0], -self.shift[1]
        image = F.pad(image, fill).roll(back, (1, 2)) if self.pads_first else F.pad(image.roll(back, (1, 2)), fill)
        cut = image.reshape(-1, down, height, across, width, x.shape[-1]).transpose(2, 3)
        return cut.reshape(-1, height * width, x.shape[-1])

    def _crop(self, image: Tensor) -> Tensor:
        return image[:, : self.grid[0], : self.grid[1]]
