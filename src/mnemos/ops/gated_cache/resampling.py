"""Tokens to slots: resampling along time, over each row's valid tokens alone."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.types import InputError


def resample(
    tokens: Tensor,
    length: int,
    mask: Tensor | None = None,
    method: str = "nearest",
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """[B, T, C] -> [B, length, C] over each row's valid tokens; the identity where nothing has to be done.

    mask [B, T] bool, True = valid; a row without a valid token gives values that mean nothing.
    nearest: slot i takes valid token floor(i·n/length), n of them. linear: between the two nearest centres.
    grid: bilinear over the (height, width) that T tokens form. Cost O(B·length·C).
    Raises InputError where a grid is wanted and T is not height·width, or `length` has no such shape.
    """
    b, t, c = tokens.shape
    if t == 0:
        return tokens.new_zeros(b, length, c)
    if method == "grid":
        return _resample_grid(tokens, length, mask, grid)
    if mask is None:
        if t == length:
            return tokens
        if method == "nearest":
            return tokens.index_select(1, places(t, length, tokens.device))
        count = torch.full((b, 1), t, device=tokens.device)
        where = None
    else:
        count = mask.sum(1, keepdim=True)
        where = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)  # valid tokens first, in order
    slot = torch.arange(length, device=tokens.device)[None]
    last = (count - 1).clamp(min=0)
    if method == "nearest":
        return _take(tokens, torch.minimum(slot * count // length, last), where)
    if method != "linear":
        raise InputError(f"no resampling is called {method!r}; known: nearest, linear, grid")
    exact = torch.promote_types(tokens.dtype, torch.float32)
    place = ((slot.to(exact) + 0.5) * count / length - 0.5).clamp(min=0)
    low = torch.minimum(place.floor().long(), last)
    high = torch.minimum(low + 1, last)
    share = (place - low).clamp(max=1)[..., None].to(tokens.dtype)
    return torch.lerp(_take(tokens, low, where), _take(tokens, high, where), share)


def places(tokens: int, length: int, device: torch.device | None = None) -> Tensor:
    """Nearest neighbour without padding: slot i takes token floor(i·T/length), [length]."""
    return torch.arange(length, device=device) * tokens // length


def _take(tokens: Tensor, index: Tensor, where: Tensor | None) -> Tensor:
    """tokens[b, where[b, index[b, i]]]."""
    if where is None:  # all rows alike: one index for the batch
        return tokens.index_select(1, index[0])
    return tokens.gather(1, where.gather(1, index)[..., None].expand(-1, -1, tokens.shape[2]))


def _resample_grid(tokens: Tensor, length: int, mask: Tensor | None, grid: tuple[int, int] | None) -> Tensor:
    t = tokens.shape[1]
    if grid is None or grid[0] * grid[1] != t:
        raise InputError(f'resample="grid" needs the (height, width) of {t} tokens, found {grid}')
    if mask is not None:
        raise InputError('resample="grid" takes no padding mask; use "nearest" or "linear"')
    if t == length:
        return tokens
    height, width = grid_shape(grid, length)
    image = tokens.transpose(1, 2).unflatten(2, grid)
    small = F.interpolate(image, (height, width), mode="bilinear", align_corners=False)
    return small.flatten(2).transpose(1, 2)


def grid_shape(grid: tuple[int, int] | None, length: int) -> tuple[int, int]:
    """The (height, width) of `length` slots in the shape of a grid. Raises InputError where there is none."""
    if grid is None:
        raise InputError('resample="grid" needs the (height, width) of the tokens, found none; give grid=')
    height = max(1, round(grid[0] * math.sqrt(length / (grid[0] * grid[1]))))
    width = length // height
    if height * width != length:
        raise InputError(f"a grid of {grid[0]} x {grid[1]} cannot become {length} slots; use {height * width}")
    return height, width
