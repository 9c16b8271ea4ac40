"""A stored cache as a module: a buffer that outlives the forward, and its commit in two phases.

A training forward reads `cache` and leaves its successor in `pending`; the next training forward of the whole
model, `eval()` or a save promotes it. So a recomputed forward (activation checkpointing) reads what the first
one read, a forward that fails half-way commits nothing, and no tensor that autograd saved is written. The one limit:
of two checkpointed training forwards before the backward of the first, the second promotes, and the first's
recomputation reads the newer cache; put such forwards into one `accumulate_caches(model)`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mnemos._compat import Moving, in_backward


class StoredCache(Moving):
    """Base of the caches that a model stores: `cache` [Tm, D], float32, zeros while it has seen nothing.

    It is float32 under any autocast (a model moved to another type moves it along), is saved with the weights, and is
    only ever copied into.
    """

    cache: Tensor

    def __init__(self, slots: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(slots, dim))
        # Not buffers: DistributedDataParallel would overwrite every rank's with the first one's.
        self.pending = torch.zeros(slots, dim)
        # One element and not none: torch 2.13 compiles a write of a 0-dimensional CPU tensor away.
        self.pending_rows = torch.zeros(1)
        self.owned = False  # a model above begins and ends the forward
        self.complete = True  # the forward that wrote `pending` came to its end
        self.writes = True  # False: training forwards read the cache and leave nothing
        self.accumulates = False
        self.register_load_state_dict_post_hook(_after_load)
        self.register_state_dict_pre_hook(_before_save)

    def moved(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move what is pending with the cache."""
        self.pending, self.pending_rows = fn(self.pending), fn(self.pending_rows)

    def train(self, mode: bool = True) -> Any:
        """As of any module; leaving training promotes what is pending."""
        if self.training and not mode:
            promote([self])
        return super().train(mode)

    def stage(self, successor: Tensor, rows: Tensor) -> None:
        """Leave `successor` [Tm, D], made of `rows` rows, as the cache's next value; nothing while it is recomputed."""
        if not self.writes or recomputing():
            return
        with torch.no_grad():
            successor, rows = successor.detach(), rows.detach()
            if self.accumulates:
                # The first is taken as it is: joining would round by a `pending` that means nothing, and another after
                # a load.
                successor = torch.where(self.pending_rows > 0, self.joined(successor, rows), successor)
                rows = self.pending_rows + rows
            self.pending.copy_(successor)
            self.pending_rows.copy_(rows)

    def joined(self, successor: Tensor, rows: Tensor) -> Tensor:
        """What `pending` becomes when a further micro-batch of the same update leaves `successor`: the mean over rows.

        It is to be what the whole batch would have left.
        """
        return self.pending + (successor - self.pending) * (rows / (self.pending_rows + rows).clamp(min=1))


def stored(model: nn.Module) -> list[StoredCache]:
    """Every stored cache in a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, StoredCache)]


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, as activation checkpointing's second forward does."""
    return not torch.compiler.is_compiling() and in_backward()


def begin_forward(found: Sequence[StoredCache]) -> bool:
    """A training forward of the whole model starts: promote what the last one left, if that one ended.

    True where the forward is to be ended by `end_forward`: not where it is only recomputed or only probes.
    """
    if not found or recomputing() or not found[0].writes:
        return False
    if not found[0].accumulates:
        promote(found)
    elif not found[0].complete:
        _discard(found)
    for cache in found:
        cache.complete = False
    return True


def end_forward(found: Sequence[StoredCache]) -> None:
    """The forward came to its end: what it left may be promoted."""
    if not found[0].accumulates:
        _reduce(found)
    for cache in found:
        cache.complete = True


@torch.no_grad()
def promote(found: Sequence[StoredCache]) -> None:
    """Make what complete forwards left pending the stored caches; a second call changes nothing.

    An entry that is not finite keeps what it was: an overflow spoils the batch it happened in, and not the cache, from
    which later batches would read it for ever.
    """
    if any(cache.accumulates for cache in found):
        return  # what is pending is part of an update
    if not all(cache.complete for cache in found):
        _discard(found)
    for cache in found:
        taken = (cache.pending_rows > 0) & cache.pending.isfinite()
        cache.cache.copy_(torch.where(taken, cache.pending, cache.cache))
        cache.pending_rows.zero_()


def _discard(found: Sequence[StoredCache]) -> None:
    for cache in found:
        cache.pending_rows.zero_()
        cache.complete = True


def several_processes() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@torch.no_grad()
def _reduce(found: Sequence[StoredCache]) -> None:
    """Over all processes, the mean of what is pending, weighted by rows: one reduction for the whole model.

    At the end of a forward, which every process runs, and not at the promotion, because `eval()` and a save
    promote too and are often called by the first process alone.
    """
    found = [cache for cache in found if cache.writes]
    if not found or not several_processes():
        return
    sums = [cache.pending * cache.pending_rows for cache in found]
    flat = torch.cat([*(cache.pending_rows for cache in found), *(s.flatten() for s in sums)])
    dist.all_reduce(flat)
    rows, rest = flat[: len(found)], flat[len(found) :]
    for cache, count, total in zip(found, rows, rest.split([s.numel() for s in sums]), strict=True):
        cache.pending.copy_(total.view_as(cache.pending) / count.clamp(min=1))
        cache.pending_rows.copy_(count)


def _after_load(module: nn.Module, _: Any) -> None:
    # A loaded cache replaces what was pending; load_state_dict(assign=True) may also have changed the device.
    assert isinstance(module, StoredCache)
    module.pending = torch.zeros_like(module.cache)
    module.pending_rows = module.pending.new_zeros(1)


def _before_save(module: nn.Module, *_: Any) -> None:
    assert isinstance(module, StoredCache)
    promote([module])


def clear_caches(model: nn.Module) -> None:
    """Zero every stored cache, and forget what is pending: a memory that has seen nothing (Appendix B)."""
    with torch.no_grad():
        for cache in stored(model):
            cache.cache.zero_()
            cache.pending_rows.zero_()


@contextlib.contextmanager
def hold_caches(model: nn.Module) -> Iterator[None]:
    """Training forwards inside read the caches and write nothing: a probe."""
    with _switched(stored(model), "writes", False):
        yield


@contextlib.contextmanager
def accumulate_caches(model: nn.Module) -> Iterator[None]:
    """Training forwards inside read one cache and make one update, that of all their rows together.

    One that fails, though its error be caught, takes with it those before it.
    """
    found = stored(model)
    promote(found)
    try:
        with _switched(found, "accumulates", True):
            yield
    except BaseException:
        _discard(found)  # part of an update is none
        raise
    _reduce(found)


@contextlib.contextmanager
def _switched(found: Sequence[StoredCache], name: str, value: bool) -> Iterator[None]:
    before = [getattr(cache, name) for cache in found]
    try:
        for cache in found:
            setattr(cache, name, value)
        yield
    finally:
        for cache, old in zip(found, before, strict=True):
            setattr(cache, name, old)
