"""Positions of a cached layer's tokens in the picture: a grid after class tokens, or the windows of a Swin."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos.attention.gated_branch import GatedBranch
from mnemos.ops.gated_cache import pool_grid, resample


@dataclass(frozen=True)
class Places:
    """The positions of one picture's tokens in one layer: R rows, each with `prefix` class tokens and T other tokens.

    A row is a window; layers without windows have R = 1. grid: (height, width); index [R, T] int64: the position
    y·width + x of each token, −1 for padding.
    """

    grid: tuple[int, int]
    prefix: int
    index: Tensor

    def unfolded(self, values: Tensor) -> Tensor:
        """Arrange one value per token [B·R, prefix + T] by position: [B, height, width]."""
        rows, tokens = self.index.shape
        found = values[:, self.prefix :].reshape(-1, rows * tokens)
        height, width = self.grid
        place = self.index.flatten()
        picture = found.new_zeros(found.shape[0], height * width)
        picture[:, place[place >= 0]] = found[:, place >= 0]
        return picture.unflatten(1, self.grid)

    def centres(self, length: int, method: str, pool: int = 1) -> Tensor:
        """The centre (y, x) in [0, 1] of the tokens that each of `length` slots is written from: [R, length, 2].

        The coordinates are resampled like the tokens: a slot that takes several tokens has their mean position.
        The centre is NaN if one of the tokens is padding. pool: the side of the squares of tokens that are averaged.
        """
        height, width = self.grid
        y, x = (self.index // width + 0.5) / height, (self.index % width + 0.5) / width
        both = torch.stack([y, x], -1).masked_fill((self.index < 0)[..., None], torch.nan)
        if pool > 1:
            both = pool_grid(both, self.grid, pool)
        return resample(both, length, None, method, self.grid)


def places(model: nn.Module, name: str, layer: GatedBranch, rows: int, tokens: int, picture: tuple[int, int]) -> Any:
    """The `Places` of a layer called with `rows` rows of `tokens` tokens per picture; a str says why they are unknown.

    picture: (height, width) in pixels, which is the grid of a layer whose tokens are pixels.
    """
    found = _windows(model, name, rows, tokens)
    if found is not None:
        return found
    if rows != 1:
        return f"its {rows} rows per picture are windows with unknown positions"
    tokens -= layer.prefix
    for grid in (layer.grid, picture):
        if grid is not None and grid[0] * grid[1] == tokens:
            return Places(grid, layer.prefix, torch.arange(tokens)[None])
    return f"its {tokens} tokens form no known grid"


def _windows(model: nn.Module, name: str, rows: int, tokens: int) -> Places | None:
    """The windows of the Swin block that contains the layer, as timm and Hugging Face divide the grid."""
    block = _enclosing_swin_block(model, name)
    if block is None:
        return None
    grid, window, shift = (_pair(getattr(block, part)) for part in ("input_resolution", "window_size", "shift_size"))
    padded = [-(-n // w) * w for n, w in zip(grid, window, strict=True)]
    if rows * tokens != padded[0] * padded[1] or tokens != window[0] * window[1]:
        return None
    image = torch.arange(grid[0] * grid[1]).view(grid)
    back = (-shift[0], -shift[1])
    fill = (0, padded[1] - grid[1], 0, padded[0] - grid[0])
    # Hugging Face pads before it shifts; timm shifts before it pads.
    if hasattr(block, "maybe_pad"):
        image = F.pad(image, fill, value=-1).roll(back, (0, 1))
    else:
        image = F.pad(image.roll(back, (0, 1)), fill, value=-1)
    cut = image.view(padded[0] // window[0], window[0], padded[1] // window[1], window[1]).transpose(1, 2)
    return Places(grid, 0, cut.reshape(rows, tokens))


def _enclosing_swin_block(model: nn.Module, name: str) -> Any:
    modules = dict(model.named_modules())
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        block = modules.get(".".join(parts[:end]))
        if all(hasattr(block, part) for part in ("input_resolution", "window_size", "shift_size")):
            return block
    return None


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[1])) if isinstance(value, (tuple, list)) else (int(value), int(value))
