"""Swin's windows as one grid: tokens [B·n, A, C] of n windows with A tokens each, and the grid that they cover."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.types import InputError


class Windows(NamedTuple):
    """How a Swin block divides a grid of tokens into windows, which are rows of the batch.

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
            image = self._cropped(image)
        if any(self.shift):
            image = image.roll(self.shift, (1, 2))
        return self._cropped(image).flatten(1, 2)

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

    def _cropped(self, image: Tensor) -> Tensor:
        return image[:, : self.grid[0], : self.grid[1]]
