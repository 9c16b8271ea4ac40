"""The cached branch of a causal decoder: a token reads the cache that earlier blocks of its row have built."""

from typing import Any

import torch
from torch import Tensor

from .branch import HostBranch
from .carried import Carried, carried_by
from .decoder_host import DecoderHost, own_tokens
from .grids import Grid
from .host import reach
from .row_blocks import BlockState, RowBlocks


class DecoderBranch(HostBranch):
    """Mixes a gated cache into the output of a decoder's attention: `y = branch(x, y, mask=None, carried=None)`.

    The equation is that of `HostBranch`, and the causal form that of `GatedCacheAttention`: a row's valid tokens form
    blocks of `grc.block` tokens, else Tm, and each block reads the cache that the blocks before it built. So an output
    depends on no later token, and the gates get a gradient in rows of more than one block, else one of zero. carried:
    the state of the rows, which the call advances; None: all rows are new.

    scope="stream": a cache per row, which starts at zeros, with gradient through the carried state. scope="shared": new
    rows start from the stored cache; a training forward stores the mean of the caches of the rows that completed a
    block, and the carried state has no gradient. inference="frozen": in eval mode all tokens read the stored cache.

    Cost of a forward: as `HostBranch`, with one update, one projection of keys and values per block and row.
    """

    host: DecoderHost
    carries = True

    @property
    def block(self) -> int:
        """The number of tokens between two updates."""
        return self.grc.block or self.cache.shape[0]

    def _memory(
        self, x: Tensor, y: Tensor, mask: Tensor | None, grid: Grid | None = None, carried: Carried | None = None
    ) -> Tensor:
        """o_mem [B, T, H, Dm/H]."""
        x = x[..., : self.cache_dim]
        if not self.moves:
            return self.frozen(self.queries(x))
        source = (x if self.grc.source == "input" else y[..., : self.cache_dim]).to(self.cache.dtype)
        stream = self.grc.scope == "stream"
        start = torch.zeros_like(self.cache) if stream else self.cache  # zeros, whatever the buffer holds

        def advance(tokens: Tensor, cache: Tensor) -> Tensor:
            return self.update(tokens, cache if self.grc.write else start)

        def blocks_of(source: Tensor, valid: Tensor | None, state: BlockState | None) -> RowBlocks:
            return RowBlocks(source, valid, state, start, self.block, advance)

        state = None if carried is None else carried.current(blocks_of)
        if not stream and (state is None or not self.grc.write):
            start = self.contents()
        blocks = blocks_of(source, mask, state)
        shared = self.grc.scope == "shared"
        caches = blocks.caches
        if shared and self.training:
            self.stage(*self.batch_mean(caches[-1], blocks.written))
            if self.grc.read == "mean":
                counted = None if mask is None else mask.any(1)
                caches = [self._mean(cache, counted, start) for cache in caches]
        if carried is not None:
            carried.extend(source, mask, blocks, gradient=not shared)
        if carried is None or blocks.count > 1 or torch.is_grad_enabled() or self.training:
            found = blocks.read(x, self.answer, caches)
            return found if blocks.count > 1 else self.beside_gates(found)
        return self._attend(self.queries(x), *carried.projected(caches[0], self._keys_and_values))

    def _keys_and_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self._split("key", cache), self._split("value", cache)

    def _mean(self, cache: Tensor, counted: Tensor | None, start: Tensor) -> Tensor:
        """The mean [1, Tm, Dm] of the rows' caches; `start` if no row is counted."""
        mean, rows = self.read_mean(*self.batch_mean(cache, counted))
        return torch.where(rows > 0, mean, start)[None]


def mix_decoder(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    """A forward hook that mixes the branch into a decoder's attention and keeps its state on the host's cache."""
    branch: DecoderBranch = module.grc
    x, mask, past = branch.host.read(module, args, kwargs)
    y = output[0] if isinstance(output, tuple) else output
    carried = valid = None
    if branch.moves and hasattr(past, "gated"):  # the call of `mnemos.functional`, whose state is a value
        carried, valid = past.gated(branch.grc), past.valid
    elif branch.moves:
        if past is not None:
            carried = carried_by(past, reach(module, branch.host.layer), *x.shape[:2])
        valid = own_tokens(mask, x, 0 if carried is None else carried.length)
    mixed = branch(x, y, valid, carried=carried)
    return (mixed, *output[1:]) if isinstance(output, tuple) else mixed
