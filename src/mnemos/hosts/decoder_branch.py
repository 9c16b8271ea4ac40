"""The cached branch of a causal decoder, and its state, which follows the rows of the layer's keys and values.

A token reads the cache that earlier blocks of its row have built. The state is kept on a Hugging Face `Cache`.
transformers changes a layer's keys and values through methods of the layer: beams reorder its rows, assisted decoding
crops its tokens. The class of a layer that carries a state is therefore replaced by a subclass that does the same to
the state. No function or class of transformers is changed.
"""

from collections.abc import Callable
from functools import cache as once
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mnemos.memory.gated_cache import GRC
from mnemos.types import InputError

from .branch import HostBranch
from .grids import Grid
from .host import DecoderHost, reach
from .masks import own_tokens
from .row_blocks import BlockState, RowBlocks

KEEP = 64  # tokens that `crop` can remove at least; assisted decoding removes drafted tokens, 20 by default


class RowsState(Protocol):
    """The state of the rows of one gated cache in one call."""

    def current(self, repeat: Callable[[Tensor, Tensor | None, BlockState], RowBlocks]) -> BlockState | None:
        """The state before the call; None: the rows are new. repeat(source, valid, state) makes updates again."""
        ...

    def extend(self, source: Tensor, valid: Tensor | None, blocks: RowBlocks, gradient: bool) -> None:
        """Go on to the state after a call's tokens [B, T, Dm]; gradient: whether it flows through the state."""
        ...

    def project(self, cache: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(cache), which may be that of an earlier call with the same cache."""
        ...


class GivesRowsState(Protocol):
    """A host's cache that carries the state of gated caches itself, as that of `mnemos.functional` does."""

    valid: Tensor | None  # [B, T] bool, the valid tokens of the call; None: all

    def gated(self, grc: GRC) -> RowsState:
        """What the next gated cache reads and writes."""
        ...


class DecoderBranch(HostBranch):
    """Mixes a gated cache into a decoder's attention: `y = branch(x, y, mask=None, carried=None)`.

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

    @property
    def block(self) -> int:
        """The number of tokens between two updates."""
        return self.grc.block or self.cache.shape[0]

    def _read_cache(
        self,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        own: Tensor | None = None,
        grid: Grid | None = None,
        carried: RowsState | None = None,
    ) -> Tensor:
        """As `HostBranch` has it."""
        found = self._read_rows(x, y, mask, carried)
        return found if own is None else self.mix_heads(own, found)

    def _read_rows(self, x: Tensor, y: Tensor, mask: Tensor | None, carried: RowsState | None) -> Tensor:
        """o_mem [B, T, H, M]."""
        x = x[..., : self.cache_dim]
        if not self.moves:
            return self.frozen(self.queries(x))
        source = (x if self.grc.source == "input" else y[..., : self.cache_dim]).to(self.cache.dtype)
        stream = self.grc.scope == "stream"
        start = torch.zeros_like(self.cache) if stream else self.cache  # zeros, whatever the buffer holds

        def next_cache(tokens: Tensor, cache: Tensor) -> Tensor:
            return self.update(tokens, cache if self.grc.write else start)

        def blocks_of(source: Tensor, valid: Tensor | None, state: BlockState | None) -> RowBlocks:
            return RowBlocks(source, valid, state, start, self.block, next_cache)

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
                caches = [self._take_mean(cache, counted, start) for cache in caches]
        if carried is not None:
            carried.extend(source, mask, blocks, gradient=not shared)
        if carried is None or blocks.count > 1 or torch.is_grad_enabled() or self.training:
            found = blocks.read(x, self.answer, caches)
            return found if blocks.count > 1 else self.beside_gates(found)
        return self._attend(self.queries(x), *carried.project(caches[0], self._keys_and_values))

    def _keys_and_values(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        return self._split("key", cache), self._split("value", cache)

    def _take_mean(self, cache: Tensor, counted: Tensor | None, start: Tensor) -> Tensor:
        """The mean [1, Tm, Dm] of the rows' caches; `start` if no row is counted."""
        mean, rows = self.read_mean(*self.batch_mean(cache, counted))
        return torch.where(rows > 0, mean, start)[None]


def mix_decoder(module: Any, args: tuple, kwargs: dict, output: Any) -> Any:
    """A forward hook that mixes the branch into a decoder's attention and keeps its state on the host's cache."""
    branch: DecoderBranch = module.grc
    x, mask, past = branch.host.read(module, args, kwargs)
    y = output[0] if isinstance(output, tuple) else output
    carried: RowsState | None = None
    valid = None
    if branch.moves and hasattr(past, "gated"):  # a `GivesRowsState`
        carried, valid = past.gated(branch.grc), past.valid
    elif branch.moves:
        found = None if past is None else find_carried(past, reach(module, branch.host.layer), *x.shape[:2])
        carried, valid = found, own_tokens(mask, x, 0 if found is None else found.length)
    mixed = branch(x, y, valid, carried=carried)
    return (mixed, *output[1:]) if isinstance(output, tuple) else mixed


class _Stretch(NamedTuple):
    """Tokens [B, t, Dm] that `crop` may remove, with their masks [B, t] or None, and the state before them."""

    before: BlockState
    tokens: tuple[tuple[Tensor, Tensor | None], ...]

    @property
    def size(self) -> int:
        return sum(source.shape[1] for source, _ in self.tokens)

    def merge(self) -> tuple[Tensor, Tensor | None]:
        """The tokens and masks as one."""
        sources = [source for source, _ in self.tokens]
        if all(valid is None for _, valid in self.tokens):
            return torch.cat(sources, 1), None
        masks = [s.new_ones(s.shape[:2], dtype=torch.bool) if v is None else v for s, v in self.tokens]
        return torch.cat(sources, 1), torch.cat(masks, 1)

    def first(self, count: int) -> "_Stretch":
        """Its first `count` tokens alone."""
        if not count:
            return self._replace(tokens=())
        source, valid = self.merge()
        return self._replace(tokens=((source[:, :count], None if valid is None else valid[:, :count]),))

    def map(self, fn: Callable[[Tensor], Tensor]) -> "_Stretch":
        """The same with `fn` of each tensor."""
        if not self.tokens:
            return self._replace(before=self.before.map(fn))
        source, valid = self.merge()
        return _Stretch(self.before.map(fn), ((fn(source), None if valid is None else fn(valid)),))


class Carried:
    """What a layer of a host's cache carries for one gated cache, and what `crop` needs to remove its last tokens.

    length: the tokens that the gated cache has read, with padding. The last KEEP to 2·KEEP of them (or all, if there
    are fewer) are kept with the state before them. After a crop the updates are repeated from that state.
    """

    def __init__(self) -> None:
        self.length = 0
        self.state: BlockState | None = None  # None: new rows, or the tokens of the last stretch are to be repeated
        self.stretches: tuple[_Stretch, ...] = ()
        self._projected: tuple[Tensor, ...] = ()  # a cache, and what was computed of it

    @property
    def removable(self) -> int:
        """How many tokens `remove` can take."""
        return sum(stretch.size for stretch in self.stretches)

    @property
    def rows(self) -> int | None:
        """The number of rows; None before the first token."""
        return len(self.stretches[0].before.seen) if self.stretches else None

    def current(self, repeat: Callable[[Tensor, Tensor | None, BlockState], RowBlocks]) -> BlockState | None:
        """The state; None: the rows are new. repeat(source, valid, state) makes the updates of these tokens."""
        if self.state is None and self.stretches:
            last = self.stretches[-1]
            self.state = repeat(*last.merge(), last.before).after() if last.size else last.before
        return self.state

    def extend(self, source: Tensor, valid: Tensor | None, blocks: RowBlocks, gradient: bool) -> None:
        """Go on to the state after a call's tokens [B, T, Dm]; gradient: whether it flows through the state."""
        t, before, after = source.shape[1], blocks.state, blocks.after()
        if t > KEEP:
            before = blocks.after(t - KEEP)
            source = source[:, t - KEEP :].clone()  # a view would hold all T tokens
            valid = None if valid is None else valid[:, t - KEEP :].clone()
            self.stretches = ()
        if not gradient:
            before, source, after = before.map(_detach), _detach(source), after.map(_detach)
        *older, last = self.stretches or (_Stretch(before, ()),)
        last = last._replace(tokens=(*last.tokens, (source, valid)))
        self.state = after
        self.stretches = (last, _Stretch(after, ())) if last.size >= KEEP else (*older, last)
        self.length += t

    def project(self, cache: Tensor, compute: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """compute(cache), kept until another cache is given: keys and values change once per block."""
        if not self._projected or self._projected[0] is not cache:
            self._projected = cache, *compute(cache)
        return self._projected[1:]

    def remove(self, count: int) -> None:
        """Remove the last `count` tokens; at most `removable`."""
        if not count:
            return
        self.length -= count
        *older, last = self.stretches
        while count > last.size:
            count -= last.size
            *older, last = older
        self.stretches = (*older, last.first(last.size - count))
        self.state = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to each tensor, as to select rows; once to a tensor that is in several places."""
        done: dict[int, tuple[Tensor, Tensor]] = {}

        def memoised(tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = tensor, fn(tensor)  # the tensor too, so that its id stays its own
            return done[id(tensor)][1]

        self.state = None if self.state is None else self.state.map(memoised)
        self.stretches = tuple(stretch.map(memoised) for stretch in self.stretches)
        self._projected = tuple(memoised(tensor) for tensor in self._projected)


def _detach(tensor: Tensor) -> Tensor:
    """Without gradient; the same tensor if it has none."""
    return tensor.detach() if tensor.requires_grad else tensor


@once
def _make_carrying(layer: type) -> Any:
    """The subclass of a class of cache layers that carries the state of a gated cache."""

    class Carrying(layer):
        _layer_type = None  # transformers registers each subclass that has one, in place of its parent
        mnemos_gated: Carried | None = None

        def reorder_cache(self, beam_idx: Tensor) -> None:
            """Take the rows `beam_idx`."""
            super().reorder_cache(beam_idx)
            self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

        def batch_repeat_interleave(self, repeats: int) -> None:
            """Repeat each row."""
            super().batch_repeat_interleave(repeats)
            self._map(lambda x: x.repeat_interleave(repeats, 0))

        def batch_select_indices(self, indices: Any) -> None:
            """Take the rows `indices`."""
            super().batch_select_indices(indices)
            self._map(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices])

        def crop(self, tokens_to_remove: int) -> None:
            """Remove the last tokens. Raises InputError, and changes nothing, if the state cannot do it."""
            carried = self.mnemos_gated
            if carried is not None and -tokens_to_remove > carried.removable:
                raise InputError(
                    f"crop: expected to remove at most {carried.removable} tokens, the last that the gated caches "
                    f"kept, found {-tokens_to_remove}; make a copy.deepcopy of the cache before those tokens"
                )
            before = int(self.get_seq_length())
            super().crop(tokens_to_remove)
            if carried is not None:
                carried.remove(before - int(self.get_seq_length()))

        def reset(self) -> None:
            """Start new rows."""
            super().reset()
            self.mnemos_gated = None

        def _map(self, fn: Callable[[Tensor], Tensor]) -> None:
            if self.mnemos_gated is not None:
                self.mnemos_gated.map(fn)

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Pickle finds a class by its name, and this class is made when it is needed.
            return _make_empty, (layer,), self.__dict__

    Carrying.__name__, Carrying.__qualname__ = layer.__name__, layer.__qualname__
    return Carrying


def _make_empty(layer: type) -> Any:
    kind = _make_carrying(layer)
    return kind.__new__(kind)


def list_layers(past: Any) -> tuple[Any, list[Any]]:
    """The decoder's own cache and its layers. Raises InputError for what is no cache with layers."""
    past = getattr(past, "self_attention_cache", past)  # of an encoder and a decoder
    layers = getattr(past, "layers", None)
    if not isinstance(layers, list):
        raise InputError(
            f"expected a cache with a layer for each attention, found a {type(past).__name__}; "
            "give a transformers.DynamicCache, or none"
        )
    return past, layers


def find_carried(past: Any, number: int, batch: int, t: int) -> Carried:
    """What layer `number` of a host's cache carries, in the call that has just added t tokens of `batch` rows to it.

    Raises InputError if `past` is no cache with layers, or if its tokens are not those that the gated cache has read.
    """
    _, layers = list_layers(past)
    if len(layers) <= number:
        raise InputError(
            f"expected a cache with a layer for each attention, found {len(layers)} layers; give a "
            "transformers.DynamicCache, or none"
        )
    layer = layers[number]
    if not hasattr(layer, "mnemos_gated"):
        kind: Any = type(layer)
        layer.__class__ = _make_carrying(kind)
    carried = layer.mnemos_gated or Carried()
    before = int(layer.get_seq_length()) - t
    if carried.length != before or carried.rows not in (None, batch):
        raise InputError(
            f"expected a cache whose {before} tokens this model's gated caches have read, found "
            f"{carried.length} read tokens{'' if carried.rows in (None, batch) else f' of {carried.rows} rows'}; "
            "start with an empty cache"
        )
    layer.mnemos_gated = carried
    return carried
