"""A first-in, first-out cache of earlier inputs for attention: the baseline of the gated cache."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mnemos.config import check_fields
from mnemos.types import InputError

from .stored import StoredCache, begin_forward, end_forward, several_processes


@dataclass(frozen=True)
class AttentionCache:
    """Transformer-XL's memory in an image model (Cached Transformers, Table 2): keys and values of earlier batches.

    Every attention also attends to its input tokens for `images` images of the previous training batch. They are
    stored as they were (width D, no gradient) and projected to keys and values with the present weights.
    """

    images: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "AttentionCache")
        if self.images < 1:
            raise InputError(
                f"AttentionCache.images: expected at least 1, found {self.images}; use cache=None for none"
            )


class TokenCache(StoredCache):
    """`longer = cache(x)`: tokens x [B, T, D], followed by the tokens of the first images of the previous batch.

    The result is [B, T + images·T, D]; the stored tokens are the same for every row and carry no gradient. In training
    the cache stores the first rows of x for the next batch (those of the first process and the first micro-batch); in
    eval() it does not change. While it is empty (all zeros), the row's own tokens take its place, because attention to
    [x; x] equals attention to x. Memory: images·T·D floats. Raises InputError for another T, or a batch below `images`.
    """

    def __init__(self, images: int, tokens: int, dim: int) -> None:
        super().__init__(images * tokens, dim)
        self.images, self.tokens = images, tokens

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        dim = self.cache.shape[1]
        if x.dim() != 3 or x.shape[1:] != (self.tokens, dim):
            raise InputError(
                f"attention cache of {self.images} image(s): expected tokens [B, {self.tokens}, {dim}], found "
                f"{tuple(x.shape)}; build it for this size"
            )
        began = self.training and self.complete and begin_forward([self])
        before = self.contents()
        kept = torch.where((before != 0).any(), before.to(x.dtype), x.repeat(1, self.images, 1))
        if self.training:
            self._keep(x)
        if began:
            end_forward([self])
        return torch.cat([x, kept], 1)

    if TYPE_CHECKING:
        __call__ = forward

    def _keep(self, x: Tensor) -> None:
        if x.shape[0] < self.images:
            raise InputError(
                f"AttentionCache(images={self.images}): expected a batch of at least as many images, found "
                f"{x.shape[0]}; use fewer images or larger batches"
            )
        first = not several_processes() or dist.get_rank() == 0
        rows = torch.full((1,), float(first), dtype=self.cache.dtype, device=x.device)
        self.stage(x[: self.images].flatten(0, 1), rows)

    def joined(self, before: Tensor, count: Tensor, successor: Tensor, rows: Tensor) -> Tensor:
        """`before` unchanged: the first micro-batch holds the first rows of the whole batch."""
        return before

    def extra_repr(self) -> str:
        """Images, tokens and width."""
        return f"images={self.images}, tokens={self.tokens}, dim={self.cache.shape[1]}"
