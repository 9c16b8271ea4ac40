"""What a forward writes to a gated cache: its tokens resampled to slots, the gates, and the mean over the batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import native
from .resampling import places, resample
from .update import GateWeights, gated_update

Pair = tuple[Tensor, Tensor]
Weights = Sequence[Tensor | None]


class Written(NamedTuple):
    """new: C_t [B, Tm, Dm]. mean: its mean [Tm, Dm] over the rows with a valid token; rows: their number, []."""

    new: Tensor
    mean: Tensor | None
    rows: Tensor | None


def write(
    source: Tensor,
    cache: Tensor,
    weights: Weights,
    mask: Tensor | None = None,
    method: str = "nearest",
    grid: tuple[int, int] | None = None,
    mean: bool = False,
    observe: Callable[[GateWeights], None] | None = None,
) -> Written:
    """C_t of tokens `source` [B, T, Dm], valid where mask [B, T] bool, and `cache` [Tm, Dm] or [B, Tm, Dm].

    The tokens of each row are resampled to the slots (`resample`: method, grid); `gated_update` then computes C_t. A
    row without a valid token keeps its cache and is not counted in the mean, which is computed if `mean`. weights:
    weight [Dm, 2·Dm] and bias [Dm] of update gate, reset gate and candidate, and gain and shift of its layer norm or
    None, None. observe: is called with the gates.

    Cost: that of `gated_update`. On the CPU in float32 one kernel computes all of it (native.py), unless the gates are
    observed. Raises InputError as `resample` does.
    """
    tokens, slots = source.shape[1], cache.shape[-2]
    exporting = torch.compiler.is_exporting()  # an exported program has one form for all T
    resampled = method != "nearest" or (not exporting and tokens == 0)
    if resampled:
        source = resample(source.to(cache.dtype), slots, mask, method, grid)
        if mask is not None and tokens != slots:  # a slot has no padding of its own: only whole rows do
            mask = mask.any(1, keepdim=True).expand(-1, slots)
    composed: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = partial(_composed, resampled, mean, observe)
    given = (source, cache, mask, *weights)
    kernel = native.Update(composed, resampled, mean)
    if observe is None and native.takes(*given) and kernel.fits(*given):
        return Written(*native.fused(kernel, *given))
    return Written(*composed(*given))


def _composed(
    resampled: bool,
    mean: bool,
    observe: Callable[[GateWeights], None] | None,
    source: Tensor,
    cache: Tensor,
    mask: Tensor | None,
    *weights: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`write` in PyTorch's operations."""
    slots, takes = cache.shape[-2], None
    if not resampled:
        if mask is not None:
            source = resample(source.to(cache.dtype), slots, mask)
        elif (
            torch.compiler.is_exporting() or source.shape[1] != slots
        ):  # the backward resamples again, which saves keeping the result
            takes = places(source.shape[1], slots, source.device)
        else:
            source = source.to(cache.dtype)
    rows = None if mask is None else mask.any(1)
    if rows is not None:
        source = torch.where(rows[:, None, None], source, 0)  # padding may hold anything, also NaN in the backward
    w_u, b_u, w_r, b_r, w_c, b_c, *norm = cast(Sequence[Tensor], weights)
    affine = None if norm[0] is None else (norm[0], norm[1])
    new, gates = gated_update(source, cache, (w_u, b_u), (w_r, b_r), (w_c, b_c), affine, takes)
    if rows is not None:
        new = torch.where(rows[:, None, None], new, cache)
    if observe is not None:
        observe(gates)
    return (new, *batch_mean(new, rows)) if mean else (new, None, None)


def batch_mean(new: Tensor, rows: Tensor | None) -> Pair:
    """The mean [Tm, Dm] of C_t [B, Tm, Dm] over `rows` ([B] bool, None: all), and the number of rows."""
    if rows is None:
        mean = new.mean(0) if new.shape[0] else new.sum(0)  # of no row: zeros, not NaN, which a sum would keep
        return mean, torch.full((), new.shape[0], dtype=new.dtype, device=new.device)
    share = rows.to(new.dtype)
    count = share.sum()
    return torch.einsum("b,btd->td", share, new) / count.clamp(min=1), count
