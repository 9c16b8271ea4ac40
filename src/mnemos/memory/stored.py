"""A stored cache as a module: a buffer that outlives the forward and is updated in two phases.

A training forward reads `cache` and writes its successor to `pending`; the next training forward of the whole model,
`eval()` or a save promotes `pending` to `cache`. A forward that fails therefore changes nothing, and no tensor that
autograd saved is written. A forward that activation checkpointing repeats reads what it read the first time, also if
other forwards have promoted since (see `Reads`), and writes nothing.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mnemos._compat import (
    Moving,
    backward_node_number,
    in_backward,
    next_node_number,
    outside_transforms,
    repeats_saved_tensors,
    to_be_repeated,
    transformed,
    underlying,
    write_count,
)
from mnemos.types import InputError


class StoredCache(Moving):
    """Base of the caches that a model stores: `cache` [Tm, D], float32, zeros before the first update.

    The buffer stays float32 under autocast (moving the model to another dtype moves it too), is saved with the weights,
    and is always written in place.
    """

    cache: Tensor

    def __init__(self, slots: int, dim: int, learned: bool = False) -> None:
        super().__init__()
        self.learned = learned  # `cache` is a parameter, which the optimiser changes and no forward
        if learned:
            with torch.random.fork_rng(devices=[]):  # all other weights are those of a model with a written cache
                start = 0.02 * torch.randn(slots, dim)  # as ViT's learned tokens; slots that are equal would stay equal
            self.cache = nn.Parameter(start)
        else:
            self.register_buffer("cache", torch.zeros(slots, dim))
        # Not buffers: DistributedDataParallel would overwrite those of every rank with those of rank 0.
        self.pending = torch.zeros(slots, dim)
        # One dimension and not 0: torch 2.13 compiles a write to a 0-dimensional CPU tensor away.
        self.pending_rows = torch.zeros(1)
        self.owned = False  # a model above calls begin_forward and end_forward
        self.complete = True  # the forward that wrote `pending` ended without an error
        self.writes = True  # False: training forwards read the cache and leave nothing pending
        self.accumulates = False
        self.before: tuple[Tensor, Tensor] | None = None  # accumulating: `pending` and its rows before this forward
        self.reads = Reads()
        self.register_load_state_dict_post_hook(_after_load)
        self.register_state_dict_pre_hook(_before_save)

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move what is pending with the cache."""
        self.pending, self.pending_rows = fn(self.pending), fn(self.pending_rows)
        self.reads = Reads()

    def train(self, mode: bool = True) -> Self:
        """Like `nn.Module.train`; leaving training mode promotes `pending`."""
        if self.training and not mode:
            promote([self])
        return super().train(mode)

    def contents(self) -> Tensor:
        """A copy of the cache [Tm, D], which later forwards do not write; a repeated forward gets its first one's."""
        if not self.training or torch.compiler.is_compiling() or transformed(self.cache):
            return self.cache.clone()
        if recomputing():
            return self.reads.again(self.cache)
        content = self.cache.clone()
        self.reads.add(self.cache, content)
        return content

    def stage(self, successor: Tensor, rows: Tensor) -> None:
        """Write `successor` [Tm, D], the result of `rows` rows, to `pending`; a recomputed forward writes nothing."""
        if not self.writes or recomputing():
            return
        successor, rows = _plain(successor.detach()), _plain(rows.detach())
        with torch.no_grad(), outside_transforms():
            if self.accumulates:
                # Of several successors in one forward, as where layers share a cache, the last one counts.
                before, count = self.before or (self.pending, self.pending_rows)
                # The first successor is taken unchanged: joining it with a meaningless `pending` would round it, and
                # differently after a load.
                successor = torch.where(count > 0, self.joined(before, count, successor, rows), successor)
                rows = count + rows
            self.pending.copy_(successor)
            self.pending_rows.copy_(rows)

    def joined(self, before: Tensor, count: Tensor, successor: Tensor, rows: Tensor) -> Tensor:
        """The new `pending` when a micro-batch gives `successor` after others gave `before`: the mean over all rows.

        This equals, to rounding, what the whole batch would give in one forward.
        """
        return before + (successor - before) * (rows / (count + rows).clamp(min=1))


def stored(model: nn.Module) -> list[StoredCache]:
    """Every stored cache in a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, StoredCache)]


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, as the recomputation of activation checkpointing does."""
    return not torch.compiler.is_compiling() and in_backward()


def begin_forward(found: Sequence[StoredCache]) -> bool:
    """Start a training forward of the whole model: promote `pending`, if the forward that wrote it ended.

    True if the caller must call `end_forward`: not in a recomputed forward, and not inside `hold_caches`.
    """
    if recomputing() or not any(cache.writes for cache in found):
        return False
    if not found[0].accumulates:
        promote(found)
    elif not found[0].complete:
        _discard(found)
    with outside_transforms():
        for cache in found:
            cache.complete = False
            if cache.accumulates:
                cache.before = cache.pending.clone(), cache.pending_rows.clone()
    return True


def end_forward(found: Sequence[StoredCache]) -> None:
    """The forward ended without an error: its `pending` may be promoted."""
    if not found[0].accumulates:
        _reduce(found)
    for cache in found:
        cache.complete = True


@torch.no_grad()
def promote(found: Sequence[StoredCache]) -> None:
    """Copy the `pending` of complete forwards to the stored caches; a second call changes nothing.

    An entry that is not finite is not copied. An overflow then affects its own batch only; in the cache, every later
    batch would read it.
    """
    if any(cache.accumulates for cache in found):
        return  # `pending` is part of an unfinished update
    if not all(cache.complete for cache in found):
        _discard(found)
    with outside_transforms():
        for cache in (one for one in found if not one.learned):
            content = _plain(cache.cache)
            taken = (cache.pending_rows > 0) & cache.pending.isfinite()
            content.copy_(torch.where(taken, cache.pending, content))
            cache.pending_rows.zero_()


def _discard(found: Sequence[StoredCache]) -> None:
    with outside_transforms():
        for cache in found:
            cache.pending_rows.zero_()
            cache.complete = True


def _plain(tensor: Tensor) -> Tensor:
    """The values of a tensor of a function transform, which are stored. Raises InputError where vmap made several."""
    plain = underlying(tensor)
    if plain is None:
        raise InputError(
            "a stored cache in training mode: expected one batch, found one sample or model at a time (torch.vmap), "
            "which would store several; call it inside mnemos.memory.hold_caches(model), or in eval mode"
        )
    return plain


def several_processes() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@torch.no_grad()
def _reduce(found: Sequence[StoredCache]) -> None:
    """Replace `pending` by its mean over all processes, weighted by rows, in one reduction for the whole model.

    This runs at the end of a forward, which every process reaches, and not at the promotion: `eval()` and a save
    promote too, and often only the first process calls them.
    """
    found = [cache for cache in found if cache.writes]
    if not found or not several_processes():
        return
    with outside_transforms():
        sums = [cache.pending * cache.pending_rows for cache in found]
        flat = torch.cat([*(cache.pending_rows for cache in found), *(s.flatten() for s in sums)])
        dist.all_reduce(flat)
        rows, rest = flat[: len(found)], flat[len(found) :]
        for cache, count, total in zip(found, rows, rest.split([s.numel() for s in sums]), strict=True):
            cache.pending.copy_(total.view_as(cache.pending) / count.clamp(min=1))
            cache.pending_rows.copy_(count)


def _after_load(module: nn.Module, _: object) -> None:
    # A loaded cache makes `pending` obsolete; load_state_dict(assign=True) may also have changed the device.
    assert isinstance(module, StoredCache)
    module.pending = torch.zeros_like(module.cache)
    module.pending_rows = module.pending.new_zeros(1)


def _before_save(module: nn.Module, *_: object) -> None:
    assert isinstance(module, StoredCache)
    promote([module])


def clear_caches(model: nn.Module) -> None:
    """Set every stored cache to zero and drop what is pending: the state before the first update (Appendix B).

    A learned constant (`GRC.unwritten`) is a parameter and stays.
    """
    with torch.no_grad():
        for cache in (one for one in stored(model) if not one.learned):
            cache.cache.zero_()
            cache.pending_rows.zero_()


@contextlib.contextmanager
def hold_caches(model: nn.Module) -> Iterator[None]:
    """Training forwards inside read the caches and do not write them."""
    with _switch(stored(model), "writes", False):
        yield


@contextlib.contextmanager
def accumulate_caches(model: nn.Module) -> Iterator[None]:
    """Training forwards inside read the same caches and make one update together, from all their rows.

    If one of them fails, the update of all is dropped, even if the error is caught inside.
    """
    found = stored(model)
    promote(found)
    try:
        with _switch(found, "accumulates", True):
            yield
    except BaseException:
        _discard(found)  # a partial update must not be promoted
        raise
    finally:
        for cache in found:
            cache.before = None
    _reduce(found)


@contextlib.contextmanager
def _switch(found: Sequence[StoredCache], name: str, value: bool) -> Iterator[None]:
    before = [getattr(cache, name) for cache in found]
    try:
        for cache in found:
            setattr(cache, name, value)
        yield
    finally:
        for cache, old in zip(found, before, strict=True):
            setattr(cache, name, old)


_CONTENTS = 8  # that are kept: the forwards before one backward


@dataclass
class _Read:
    """Reads of one content: the number of autograd's next node at the first and at the last of them."""

    content: Tensor
    writes: int | None  # to the cache before
    thread: int
    first: int
    last: int
    repeated: bool = False


class Reads:
    """The contents of one cache that forwards read which may be repeated in a backward pass.

    A repeated forward finds its first one by the numbers of autograd's nodes, which count in the order of the forward:
    non-reentrant checkpointing repeats for a node that was added after the read, reentrant checkpointing for a node
    that was added before it. Memory: a copy of the cache for every forward under checkpointing before its backward, 8
    at most; none without checkpointing. Copies and pickles of a model start without reads.
    """

    def __init__(self) -> None:
        self._kept: list[_Read] = []
        self._forgotten = -1  # the last read of the contents that were dropped

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()

    def add(self, cache: Tensor, content: Tensor) -> None:
        """Keep `content`, a copy of `cache`, if this forward may be repeated. Drops what was repeated since."""
        if any(read.repeated for read in self._kept):
            self._drop([read for read in self._kept if read.repeated])
        if to_be_repeated():
            self._append(content, _writes(cache))

    def again(self, cache: Tensor) -> Tensor:
        """The content that the forward read which is being repeated; a copy of `cache` if no forward was kept.

        Raises InputError if it is not known which.
        """
        if not self._kept and self._forgotten < 0:
            return cache.clone()
        read = self._first_time()
        read.repeated = True
        if to_be_repeated():  # checkpointing inside checkpointing
            self._append(read.content, None)
            self._kept[-1].repeated = True
        return read.content

    def _first_time(self) -> _Read:
        kept, number = self._kept, backward_node_number()
        contents = {id(read.content) for read in kept}
        found = None
        if number is not None and len({read.thread for read in kept}) == 1:
            if repeats_saved_tensors():
                found = next((read for read in reversed(kept) if read.first <= number), None)
            elif number >= self._forgotten:
                found = next((read for read in kept if read.last > number), None)
        elif len(contents) == 1:
            found = kept[0]
        if found is None:
            raise InputError(
                "a stored cache: expected to know what the forward read that activation checkpointing repeats, found "
                f"{len(contents)} contents; run the backward after each forward, or all forwards inside "
                "accumulate_caches(model)"
            )
        return found

    def _append(self, content: Tensor, writes: int | None) -> None:
        now, thread = next_node_number(), threading.get_ident()
        last = self._kept[-1] if self._kept else None
        if last is not None and (last.writes, last.thread) == (writes, thread) and writes is not None:
            last.last = now
            return
        self._kept.append(_Read(content, writes, thread, now, now))
        if len({id(read.content) for read in self._kept}) > _CONTENTS:
            self._drop(self._kept[:1])

    def _drop(self, reads: list[_Read]) -> None:
        self._forgotten = max(self._forgotten, *(read.last for read in reads))
        self._kept = [read for read in self._kept if not any(read is one for one in reads)]


def _writes(cache: Tensor) -> int | None:
    """The number of writes to a cache; None in inference mode, which has no backward."""
    try:
        return write_count(cache)
    except RuntimeError:
        return None
