"""The gated recurrent cache as a module: gates, the stored cache, and its commit in two phases.

A training forward reads `cache` and leaves its successor in `pending`; the next training forward of the whole
model, `eval()` or a save promotes it. So a recomputed forward (activation checkpointing) reads what the first
one read, a forward that fails half-way commits nothing, and no tensor that autograd saved is written. The one limit:
of two checkpointed training forwards before the backward of the first, the second promotes, and the first's
recomputation reads the newer cache; put such forwards into one `accumulate(model)`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mnemos.ops.gated_cache import Gates, gated_update, resample
from mnemos.ops.precision import full_precision
from mnemos.types import InputError, check_heads

from .grc import GRC


class GatedCache(nn.Module):
    """What every gated-cache layer has: update_gate, reset_gate, candidate, mix (λ, [H]) and cache [Tm, Dm].

    Dm = ratio·D rounded down to a multiple of H. `grc.length` must be one number here.
    The cache is float32 under any autocast, is saved with the weights, and is only ever copied into.
    """

    cache: Tensor

    def __init__(self, dim: int, num_heads: int, grc: GRC) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        if not isinstance(grc.length, int):
            raise InputError(f"a single layer needs GRC(length=<number of slots>), found length={grc.length!r}")
        length = grc.length
        self.grc = grc = grc.resolved()
        self.cache_dim = int(grc.ratio * dim) // num_heads * num_heads
        if self.cache_dim == 0:
            raise InputError(
                f"ratio {grc.ratio} of width {dim} leaves no channel for each of {num_heads} heads; raise it"
            )
        d = self.cache_dim
        self.update_gate, self.reset_gate, self.candidate = (nn.Linear(2 * d, d) for _ in range(3))
        self.candidate_norm = nn.LayerNorm(d) if grc.candidate == "layernorm_gelu" else None
        self.mix = nn.Parameter(torch.full((num_heads,), float(grc.gate_init or 0.0)))
        self.register_buffer("cache", torch.zeros(length, d))
        # Not buffers: DistributedDataParallel would overwrite every rank's with the first one's.
        self.pending = torch.zeros(length, d)
        # One element and not none: torch 2.13 compiles a write of a 0-dimensional CPU tensor away.
        self.pending_rows = torch.zeros(1)
        self.owned = False  # a model above begins and ends the forward
        self.complete = True  # the forward that wrote `pending` came to its end
        self.writes = True
        self.accumulates = False
        self.trace: dict[str, list[Tensor]] | None = None
        self.register_load_state_dict_post_hook(_after_load)
        self.register_state_dict_pre_hook(_before_save)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.pending, self.pending_rows = fn(self.pending), fn(self.pending_rows)
        return self

    def train(self, mode: bool = True) -> Any:
        """As of any module; leaving training promotes what is pending."""
        if self.training and not mode:
            promote([self])
        return super().train(mode)

    def update(
        self, source: Tensor, cache: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None
    ) -> Tensor:
        """C_t [B, Tm, Dm] of tokens `source` [B, T, Dm] (valid where mask [B, T]) and cache [Tm, Dm] or [B, Tm, Dm].

        In float32, whatever autocast says. A row without a valid token keeps its cache.
        """
        with full_precision(source.device.type):
            slots = resample(source.to(cache.dtype), cache.shape[-2], mask, self.grc.resample, grid)
            norm = self.candidate_norm
            new, gates = gated_update(
                slots,
                cache,
                update=(self.update_gate.weight, self.update_gate.bias),
                reset=(self.reset_gate.weight, self.reset_gate.bias),
                candidate=(self.candidate.weight, self.candidate.bias),
                norm=None if norm is None else (norm.weight, norm.bias),
            )
            if mask is not None:
                new = torch.where(mask.any(1)[:, None, None], new, cache)
        if self.trace is not None:
            self._record(gates)
        return new

    def _record(self, gates: Gates) -> None:
        assert self.trace is not None
        for name, gate in gates._asdict().items():
            gate = gate.detach()
            self.trace.setdefault(f"{name}_mean", []).append(gate.mean())
            saturated = ((gate < 0.05) | (gate > 0.95)).to(gate.dtype).mean()
            self.trace.setdefault(f"{name}_saturated", []).append(saturated)

    def batch_mean(self, new: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """The mean [Tm, Dm] of C_t [B, Tm, Dm] over the rows that count ([B] bool, None: all), and how many."""
        if rows is None:
            return new.mean(0), torch.full((), new.shape[0], dtype=new.dtype, device=new.device)
        share = rows.to(new.dtype)
        count = share.sum()
        return torch.einsum("b,btd->td", share, new) / count.clamp(min=1), count

    def read_mean(self, mean: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The batch mean that `read="mean"` attends to, over all processes, differentiably, and its rows."""
        if not several_processes():
            return mean, rows
        from torch.distributed.nn.functional import all_reduce  # only where torch is built with it

        total = all_reduce(mean * rows)
        dist.all_reduce(count := rows.clone())
        return total / count.clamp(min=1), count

    def stage(self, mean: Tensor, rows: Tensor) -> None:
        """Leave `mean` [Tm, Dm] over `rows` rows as the cache's successor; nothing while it is recomputed."""
        if not self.writes or recomputing():
            return
        with torch.no_grad():
            mean, rows = mean.detach(), rows.detach()
            if self.accumulates:
                total = self.pending_rows + rows
                joined = self.pending + (mean - self.pending) * (rows / total.clamp(min=1))
                # The first is taken as it is: p + (m − p) rounds by a p that means nothing, and another after a load.
                mean = torch.where(self.pending_rows > 0, joined, mean)
                rows = total
            self.pending.copy_(mean)
            self.pending_rows.copy_(rows)

    def extra_repr(self) -> str:
        """Slots, width and preset."""
        return f"slots={self.cache.shape[0]}, cache_dim={self.cache_dim}, preset={self.grc.preset!r}"


def caches(model: nn.Module) -> list[GatedCache]:
    """Every gated cache in a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, GatedCache)]


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, as activation checkpointing's second forward does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def begin_forward(found: Sequence[GatedCache]) -> bool:
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


def end_forward(found: Sequence[GatedCache]) -> None:
    """The forward came to its end: what it left may be promoted."""
    if not found[0].accumulates:
        _reduce(found)
    for cache in found:
        cache.complete = True


@torch.no_grad()
def promote(found: Sequence[GatedCache]) -> None:
    """Make what complete forwards left pending the stored caches; a second call changes nothing."""
    if any(cache.accumulates for cache in found):
        return  # what is pending is part of an update
    if not all(cache.complete for cache in found):
        _discard(found)
    for cache in found:
        cache.cache.copy_(torch.where(cache.pending_rows > 0, cache.pending, cache.cache))
        cache.pending_rows.zero_()


def _discard(found: Sequence[GatedCache]) -> None:
    for cache in found:
        cache.pending_rows.zero_()
        cache.complete = True


def several_processes() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@torch.no_grad()
def _reduce(found: Sequence[GatedCache]) -> None:
    """Over all processes, the mean of what is pending, weighted by rows: one reduction for the whole model.

    At the end of a forward, which every process runs, and not at the promotion, because `eval()` and a save
    promote too and are often called by the first process alone.
    """
    if not several_processes():
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
    assert isinstance(module, GatedCache)
    module.pending = torch.zeros_like(module.cache)
    module.pending_rows = module.pending.new_zeros(1)


def _before_save(module: nn.Module, *_: Any) -> None:
    assert isinstance(module, GatedCache)
    promote([module])


def empty(model: nn.Module) -> None:
    """Zero every stored cache, and forget what is pending: a memory that has seen nothing (Appendix B)."""
    with torch.no_grad():
        for cache in caches(model):
            cache.cache.zero_()
            cache.pending_rows.zero_()


@contextlib.contextmanager
def hold(model: nn.Module) -> Iterator[None]:
    """Training forwards inside read the caches and write nothing: a probe."""
    with _switched(caches(model), "writes", False):
        yield


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Training forwards inside read one cache and make one update, the mean over all their rows."""
    found = caches(model)
    promote(found)
    try:
        with _switched(found, "accumulates", True):
            yield
    except BaseException:
        _discard(found)  # part of an update is none
        raise
    _reduce(found)


@contextlib.contextmanager
def traced(model: nn.Module) -> Iterator[dict[str, dict[str, list[Tensor]]]]:
    """Forwards inside record each cache's gate activity, a value an update: {module name: {"update_mean": […], …}}."""
    found = {name: m for name, m in model.named_modules() if isinstance(m, GatedCache)}
    records: dict[str, dict[str, list[Tensor]]] = {name: {} for name in found}
    try:
        for name, cache in found.items():
            cache.trace = records[name]
        yield records
    finally:
        for cache in found.values():
            cache.trace = None


@contextlib.contextmanager
def _switched(found: Sequence[GatedCache], name: str, value: bool) -> Iterator[None]:
    before = [getattr(cache, name) for cache in found]
    try:
        for cache in found:
            setattr(cache, name, value)
        yield
    finally:
        for cache, old in zip(found, before, strict=True):
            setattr(cache, name, old)
