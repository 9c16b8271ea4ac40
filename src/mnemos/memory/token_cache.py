"""A cache of earlier inputs for attention to look back at, first in, first out: what the gated cache is compared to."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mnemos.config import check_fields
from mnemos.types import InputError

from .stored import StoredCache, begin_forward, end_forward, several_processes


@dataclass(frozen=True)
class AttentionCache:
    """Transformer-XL's memory in an image model (Cached Transformers, Table 2): keys and values of earlier batches.

    Every attention also attends to the tokens that it was given for `images` images of the training batch before,
    kept as they were (width D, no gradient) and projected to keys and values by its own weights of today.
    """

    images: int = 1

    def __post_init__(self) -> None:
        check_fields(self, "AttentionCache")
        if self.images < 1:
            raise InputError(f"AttentionCache: images must be at least 1, found {self.images}")


class TokenCache(StoredCache):
    """`longer = cache(x)`: tokens x [B, T, D], and behind them those kept of the first images of the batch before.

    [B, T + images·T, D]; the kept ones are the same for every row, and carry no gradient. In training it keeps the
    first rows of x for the next batch (of several processes, the first one's; of several micro-batches, the first
    one's); in eval() it stays as it is. While it is empty (all zeros) the row's own tokens stand in: attention to
    [x; x] is attention to x. Memory: images·T·D floats. Raises InputError where T is another, or a batch is too small.
    """

    def __init__(self, images: int, tokens: int, dim: int) -> None:
        super().__init__(images * tokens, dim)
        self.images, self.tokens = images, tokens

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        dim = self.cache.shape[1]
        if x.dim() != 3 or x.shape[1:] != (self.tokens, dim):
            raise InputError(
                f"an attention cache of {self.images} images takes tokens [B, {self.tokens}, {dim}], found "
                f"{tuple(x.shape)}; build it for this size"
            )
        began = self.training and self.complete and begin_forward([self])
        # A copy: the buffer is written at the next forward, perhaps before this one's backward.
        kept = torch.where((self.cache != 0).any(), self.cache.to(x.dtype), x.repeat(1, self.images, 1))
        if self.training:
            self._keep(x)
        if began:
            end_forward([self])
        return torch.cat([x, kept], 1)

    def _keep(self, x: Tensor) -> None:
        if x.shape[0] < self.images:
            raise InputError(
                f"AttentionCache(images={self.images}) keeps as many images of a batch, found a batch of {x.shape[0]}; "
                "use fewer images or larger batches"
            )
        first = not several_processes() or dist.get_rank() == 0
        rows = torch.full((1,), float(first), dtype=self.cache.dtype, device=x.device)
        self.stage(x[: self.images].flatten(0, 1), rows)

    def joined(self, successor: Tensor, rows: Tensor) -> Tensor:
        """The first micro-batch has the first rows of the whole batch."""
        return self.pending

    def extra_repr(self) -> str:
        """Images, tokens and width."""
        return f"images={self.images}, tokens={self.tokens}, dim={self.cache.shape[1]}"
