"""The gated recurrent cache of Cached Transformers: what a training forward writes, the next one reads.

Three ideas, in this order. `GRC`, the switches. `StoredCache`, a buffer that outlives the forward and is updated in two
phases: a training forward reads `cache` and writes its successor to `pending`; the next training forward of the whole
model, `eval()` or a save promotes `pending` to `cache`. A forward that fails therefore changes nothing, and no tensor
that autograd saved is written. A forward that activation checkpointing repeats reads what it read the first time, also
if other forwards have promoted since (`Reads`), and writes nothing. `GatedCache`, the gates that compute the successor.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

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
from mnemos.config import check_fields
from mnemos.libraries import loaded_weights
from mnemos.ops.dense_layer import Linear, dense
from mnemos.ops.gated_cache import GateValues, Written, write
from mnemos.types import InputError, check_heads

# --- The switches ---


@dataclass(frozen=True)
class GRC:
    """The settings of a gated recurrent cache. A switch left at None takes the preset's value.

    The presets: "paper": source input, candidate linear, gate_init 0, read mean, inference frozen, lift project, no
    convolution. "official", the paper's released module: source output, candidate layernorm_gelu, gate_init −1, read
    sample, inference transient, lift pad, a convolution where a grid is known. "mnemos", the default: source input,
    candidate layernorm_gelu, gate_init −2, read sample, inference transient, lift project, no convolution.

    The default has the paper's source and the release's bounded candidate: with the linear candidate the cache is an
    unbounded linear recurrence. Each row reads its own cache, because reading the batch mean makes a row depend on the
    other rows. The gate starts nearly closed, σ(−2) = 0.12: on short ListOps one run with a gate that started half
    open had 4 points of accuracy less (one seed: log/2026-11-21-first-gate.md).

    Attributes:
        length: slots Tm: one number, one per stage of the model, "auto", the host's length, or "paper": one slot per
            token, but in PVT and Swin the tokens of the first stage are averaged in squares of 4 × 4 and those of the
            second in squares of 2 × 2 (224²: 196, 196, 196 and 49 slots), and in Swin a cache spans the whole grid of
            its stage instead of one window.
        ratio: Dm/D, the width of a slot as a share of the model's; Dm is rounded down to a multiple of the heads.
        preset: the values of the switches that are None.
        gate_init: the initial λ; σ(λ) is the share of the cached branch.
        scope: "shared": one cache for all rows, a buffer. "stream": one cache per row, carried as a state.
        source: what the cache summarises: the layer's input X, or the attention's projected output.
        candidate: what a token writes: a linear map, or one with layer norm and GELU, which is bounded.
        read: keys and values come from the batch mean of C_t, or from each row's own C_t.
        inference: in eval mode, read the stored cache as it is ("frozen"), or C_t of the row's own tokens.
        lift: how the branch's output goes from Dm/H to D/H channels per head: a projection, or zeros.
        mix: where the branch is mixed in. "heads", eq. 2: head by head, before the one projection of both. "channels":
            after the host's projection, by groups of D/H channels. No preset sets it. None: "channels" in a host
            (`mnemos.cache`), and in a layer of this library the only way that its lift has, which is "heads" for
            "project" and "channels" for "pad".
        convolution: add a grouped 3×3 convolution of X, which needs a grid of patches and D % Dm = 0. It is the
            positional term of the release; the paper adds "positional encodings" to image models without saying how.
        resample: how tokens become slots. "grid" is 2-D and needs a grid of patches.
        branch: the attention over the slots.
        block: with causal attention, the tokens between two updates of the cache; None: Tm.
        write: False: the cache is never written (see `unwritten`), and each row reads its own update, with any preset.
            With inference="frozen" given too, it is a constant: a learned parameter [Tm, Dm], which every row reads as
            it is, in training and at inference.
    """

    length: int | tuple[int, ...] | Literal["auto", "paper"] = "auto"
    ratio: float = 0.5
    preset: Literal["paper", "official", "mnemos"] = "mnemos"
    gate_init: float | None = None
    scope: Literal["shared", "stream"] = "shared"
    source: Literal["input", "output"] | None = None
    candidate: Literal["linear", "layernorm_gelu"] | None = None
    read: Literal["mean", "sample"] | None = None
    inference: Literal["frozen", "transient"] | None = None
    lift: Literal["project", "pad"] | None = None
    mix: Literal["heads", "channels"] | None = None
    convolution: bool | None = None
    resample: Literal["nearest", "linear", "grid"] = "nearest"
    branch: Literal["softmax", "linear"] = "softmax"
    block: int | None = None
    write: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.length, list):
            object.__setattr__(self, "length", tuple(self.length))
        check_fields(self, "GRC")
        if not 0 < self.ratio <= 1:
            raise InputError(f"GRC.ratio: expected above 0 and at most 1, found {self.ratio}; change it")
        lengths = self.length if isinstance(self.length, tuple) else (self.length,)
        if not lengths or any(not isinstance(length, str) and length < 1 for length in lengths):
            raise InputError(
                f'GRC.length: expected "auto", "paper" or at least 1 slot, found {self.length!r}; change it'
            )
        after = {name: getattr(self, name) or PRESETS[self.preset][name] for name in ("source", "lift")}
        if self.mix == "heads" and after != {"source": "input", "lift": "project"}:
            raise InputError(
                f'GRC.mix: "heads" is before the projection and expects source="input" and lift="project", found '
                f'{after["source"]!r} and {after["lift"]!r}, which follow it; use mix="channels"'
            )
        if self.block is not None and self.block < 1:
            raise InputError(f"GRC.block: expected at least 1 token, found {self.block}; use None for as many as slots")
        if self.scope == "stream" and self.read == "mean":
            raise InputError(
                'GRC.read: scope="stream" has a cache per row and expects "sample", found "mean"; leave it out'
            )
        if self.scope == "stream" and self.inference == "frozen":
            raise InputError(
                'GRC.inference: scope="stream" updates every row and expects "transient", found "frozen"; leave it out'
            )

    @property
    def constant(self) -> bool:
        """Whether the cache is a learned constant: never written, and read as it is."""
        return not self.write and self.inference == "frozen"

    def resolved(self) -> "GRC":
        """The same with every switch set: the given value, else the preset's."""
        switches = dict(PRESETS[self.preset])
        # A row reads its own cache, at inference as in training: it carries it (stream), or has no other (write=False).
        if self.scope == "stream" or (not self.write and not self.constant):
            switches.update(read="sample", inference="transient")
        for name in switches:
            if (value := getattr(self, name)) is not None:
                switches[name] = value
        return replace(self, **switches)

    def unwritten(self) -> "GRC":
        """The never-written baseline of this cache, with which the gain from the memory is measured.

        Where a row reads C_t of its own tokens at inference (inference="transient": the presets "official" and
        "mnemos"), every update starts from the stored cache, which keeps its initial zeros. All reads and parameters
        are those of the written cache. Not causal: the tokens of a call read C_t = update(their own tokens, 0). Causal:
        a block must not read itself, so it reads update(the block before it, 0), across calls too. Nothing older
        reaches an output. A loaded checkpoint may bring a cache that is not zero; it is read as it is, and stays as it
        is. With zeros the reset gate has no effect: that part of the parameters is counted, and cannot help.
        At inference the written cache starts from what is stored, which is fixed, so a gain may be that of a constant.

        Where the stored cache is read as it is at inference (inference="frozen": the preset "paper"), the baseline has
        a constant in its place: a parameter [Tm, Dm], learned with the others, which all rows read at inference as they
        read the written one, and in training too, where the written one holds the batch. These are Tm·Dm parameters
        more, and the gates have no effect. To compare the preset "paper" with a cache that starts from zeros instead,
        let both read per row: GRC(preset="paper", read="sample", inference="transient") and its `unwritten()`.
        """
        resolved = self.resolved()
        if resolved.inference == "frozen":
            return replace(self, write=False, inference="frozen")
        return replace(self, write=False, read=resolved.read, inference="transient")


_PAPER: dict[str, Any] = {
    "source": "input",
    "candidate": "linear",
    "gate_init": 0.0,
    "read": "mean",
    "inference": "frozen",
    "lift": "project",
    "convolution": False,
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    # convolution None: on where the layer knows an image's grid, off for sequences (see GatedCacheAttention).
    "official": {
        "source": "output",
        "candidate": "layernorm_gelu",
        "gate_init": -1.0,
        "read": "sample",
        "inference": "transient",
        "lift": "pad",
        "convolution": None,
    },
    "mnemos": {**_PAPER, "candidate": "layernorm_gelu", "gate_init": -2.0, "read": "sample", "inference": "transient"},
}


# --- Linear maps whose weights are read directly ---


class Projection(nn.Module):
    """y = x Wᵀ + b, x [..., in_features], with the weights and the initial values of `torch.nn.Linear`.

    It is no subclass of it. Tools that replace every Linear of a model (adapters as in LoRA, dynamic quantisation) make
    modules with other attributes, and the gates and the lift multiply by parts of their weights without calling the
    module: an adapter around them would get no gradient.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        linear = nn.Linear(in_features, out_features)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return dense(x, self.weight, self.bias)

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def own_weight(module: nn.Linear | nn.LayerNorm | Projection) -> Tensor:
    """The weight of a linear map or a norm, for code that multiplies by it without calling the module.

    Raises InputError for an adapter around it (LoRA and others of PEFT), which would have no effect there, and for a
    quantised map, whose weight is no tensor.
    """
    if type(module) in (nn.Linear, Linear, Projection):
        return module.weight
    weight = module.weight
    if hasattr(module, "base_layer") or not isinstance(weight, Tensor):
        raise InputError(
            "expected a module whose weight is read directly, found an adapter or a quantised one "
            f"({type(module).__name__}), which would have no effect; leave it out of target_modules, and name the "
            "whole memory in modules_to_save"
        )
    return weight


# --- A stored cache, updated in two phases ---


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
        self.register_load_state_dict_post_hook(_drop_pending)
        self.register_state_dict_pre_hook(_promote_before_save)

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


def begin_forward(group: Sequence[StoredCache]) -> bool:
    """Start a training forward of the whole model: promote `pending`, if the forward that wrote it ended.

    True if the caller must call `end_forward`: not in a recomputed forward, and not inside `hold_caches`.
    """
    if recomputing() or not any(cache.writes for cache in group):
        return False
    if not group[0].accumulates:
        promote(group)
    elif not group[0].complete:
        return False  # one of `accumulate_caches` failed: the update stays incomplete, which drops it at the end
    with outside_transforms():
        for cache in group:
            cache.complete = False
            if cache.accumulates:
                cache.before = cache.pending.clone(), cache.pending_rows.clone()
    return True


def end_forward(group: Sequence[StoredCache]) -> None:
    """The forward ended without an error: its `pending` may be promoted."""
    if not group[0].accumulates:
        _reduce(group)
    for cache in group:
        cache.complete = True


@torch.no_grad()
def promote(group: Sequence[StoredCache]) -> None:
    """Copy the `pending` of complete forwards to the stored caches; a second call changes nothing.

    An entry that is not finite is not copied. An overflow then affects its own batch only; in the cache, every later
    batch would read it.
    """
    if any(cache.accumulates for cache in group):
        return  # `pending` is part of an unfinished update
    if not all(cache.complete for cache in group):
        _discard(group)
    with outside_transforms():
        for cache in (one for one in group if not one.learned):
            content = _plain(cache.cache)
            finite = (cache.pending_rows > 0) & cache.pending.isfinite()
            content.copy_(torch.where(finite, cache.pending, content))
            cache.pending_rows.zero_()


def _discard(group: Sequence[StoredCache]) -> None:
    with outside_transforms():
        for cache in group:
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
def _reduce(group: Sequence[StoredCache], failed: bool | None = None) -> None:
    """Replace `pending` by its mean over all processes, weighted by rows, in one reduction for the whole model.

    failed: whether this process drops the update, which drops that of all; None: no process asks.

    This runs at the end of a forward, which every process reaches, and not at the promotion: `eval()` and a save
    promote too, and often only the first process calls them.
    """
    group = [cache for cache in group if cache.writes]
    if not group or not several_processes():
        if failed:
            _discard(group)
        return
    with outside_transforms():
        sums = [cache.pending * cache.pending_rows for cache in group]
        flat = torch.cat([*(cache.pending_rows for cache in group), *(s.flatten() for s in sums)])
        if failed is not None:
            flat = torch.cat([flat, flat.new_tensor([float(failed)])])
        dist.all_reduce(flat)
        if failed is not None:
            if flat[-1] > 0:
                _discard(group)
                return
            flat = flat[:-1]
        rows, rest = flat[: len(group)], flat[len(group) :]
        for cache, count, total in zip(group, rows, rest.split([s.numel() for s in sums]), strict=True):
            # Of no rows in any process it is 0: NaN would stay in later sums.
            cache.pending.copy_(total.view_as(cache.pending) / count.clamp(min=1))
            cache.pending_rows.copy_(count)


def _promote_before_save(module: nn.Module, *_: object) -> None:  # a lambda could not be pickled with the model
    assert isinstance(module, StoredCache)
    promote([module])


def _drop_pending(module: nn.Module, _: object) -> None:
    # After a load, which makes `pending` obsolete; load_state_dict(assign=True) may also have changed the device.
    assert isinstance(module, StoredCache)
    module.pending = torch.zeros_like(module.cache)
    module.pending_rows = module.pending.new_zeros(1)


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
    group = stored(model)
    promote(group)
    try:
        with _switch(group, "accumulates", True):
            yield
    except BaseException:
        _discard(group)  # a partial update must not be promoted
        raise
    finally:
        for cache in group:
            cache.before = None
    _reduce(group, failed=not all(cache.complete for cache in group))


@contextlib.contextmanager
def _switch(group: Sequence[StoredCache], name: str, value: bool) -> Iterator[None]:
    before = [getattr(cache, name) for cache in group]
    try:
        for cache in group:
            setattr(cache, name, value)
        yield
    finally:
        for cache, old in zip(group, before, strict=True):
            setattr(cache, name, old)


# --- What a forward reads that is repeated in a backward pass ---

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
            # Inference mode, which has no backward, counts no writes.
            self._append(content, None if cache.is_inference() else write_count(cache))

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
        first = None
        if number is not None and len({read.thread for read in kept}) == 1:
            if repeats_saved_tensors():
                first = next((read for read in reversed(kept) if read.first <= number), None)
            elif number >= self._forgotten:
                first = next((read for read in kept if read.last > number), None)
        elif len(contents) == 1:
            first = kept[0]
        if first is None:
            raise InputError(
                "a stored cache: expected to know what the forward read that activation checkpointing repeats, found "
                f"{len(contents)} contents; run the backward after each forward, or all forwards inside "
                "accumulate_caches(model)"
            )
        return first

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


# --- The gates ---


class GatedCache(StoredCache):
    """Base of every gated-cache layer: update_gate, reset_gate, candidate, mix (λ, [H]) and cache [Tm, Dm].

    Dm = ratio·D, rounded down to a multiple of H. Raises InputError unless `grc.length` is one number and Dm ≥ H.
    """

    linear: type[nn.Linear] | type[Projection] = Linear  # the class of its linear maps

    def __init__(self, dim: int, num_heads: int, grc: GRC) -> None:
        check_heads(dim, num_heads)
        if not isinstance(grc.length, int):
            raise InputError(
                f"GRC.length: expected a number of slots for a single layer, found {grc.length!r}; give GRC(length=…)"
            )
        d = int(grc.ratio * dim + 1e-6) // num_heads * num_heads  # .29 · 200 is a little less than 58 in float64
        if d == 0:
            raise InputError(
                f"GRC.ratio: expected at least one channel for each of {num_heads} heads, found {grc.ratio} of dim "
                f"{dim}; raise it"
            )
        resolved = grc.resolved()
        super().__init__(grc.length, d, learned=resolved.constant)
        self.grc = grc = resolved
        self.writes = grc.write
        self.cache_dim = d
        self.update_gate, self.reset_gate, self.candidate = (self.linear(2 * d, d) for _ in range(3))
        self.candidate_norm = nn.LayerNorm(d) if grc.candidate == "layernorm_gelu" else None
        self.mix = nn.Parameter(torch.full((num_heads,), float(grc.gate_init or 0.0)))
        self.observer_of_gates: Callable[[GateValues], None] | None = None  # called with those of every update

    def update(
        self, source: Tensor, cache: Tensor, mask: Tensor | None = None, grid: tuple[int, int] | None = None
    ) -> Tensor:
        """C_t [B, Tm, Dm] of tokens `source` [B, T, Dm] (valid where mask [B, T]) and cache [Tm, Dm] or [B, Tm, Dm].

        Computed in float32 under any autocast. A row without a valid token keeps its cache.
        """
        return self.written(source, cache, mask, grid, mean=False).new

    def written(
        self,
        source: Tensor,
        cache: Tensor,
        mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        mean: bool = True,
    ) -> Written:
        """C_t as `update` computes it, with its mean over the rows that have a valid token, and their number."""
        modules, norm = self._gates(), self.candidate_norm
        with loaded_weights(*modules):
            weights: list[Tensor | None] = [w for one in modules for w in (own_weight(one), one.bias)]
        weights += [None, None] if norm is None else []
        # Sharding with mixed precision gathers weights in half precision; the cache keeps its dtype.
        weights = [w if w is None or w.dtype == cache.dtype else w.to(cache.dtype) for w in weights]
        return write(source, cache, weights, mask, self.grc.resample, grid, mean, self.observer_of_gates)

    def _gates(self) -> list[Any]:
        """The modules whose weights an update reads without calling them."""
        modules = self.update_gate, self.reset_gate, self.candidate, self.candidate_norm
        return [module for module in modules if module is not None]

    def beside_gates(self, y: Tensor) -> Tensor:
        """y, which no update took part in, with a gradient of zero for the gates.

        Without it they would have none, and DistributedDataParallel would wait for it. No value of a parameter is read.
        """
        if not torch.is_grad_enabled():
            return y
        modules = self._gates()
        with loaded_weights(*modules):
            parameters = [p for one in modules for p in one.parameters() if p.requires_grad]
        return y + torch.stack([p[:0].sum() for p in parameters]).sum().to(y.dtype) if parameters else y

    def read_mean(self, mean: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The mean that `read="mean"` attends to, over all processes and with gradient, and its number of rows."""
        if not several_processes():
            return mean, rows
        from torch.distributed.nn.functional import all_reduce  # absent from a torch built without it

        total = all_reduce(mean * rows)
        dist.all_reduce(count := rows.clone())
        return total / count.clamp(min=1), count

    def extra_repr(self) -> str:
        written = "" if self.grc.write else ", constant" if self.grc.constant else ", write=False"
        return f"slots={self.cache.shape[0]}, cache_dim={self.cache_dim}, preset={self.grc.preset!r}{written}"


def caches(model: nn.Module) -> list[GatedCache]:
    """Every gated cache in a model, in the order of its modules."""
    return [m for m in model.modules() if isinstance(m, GatedCache)]


@contextlib.contextmanager
def traced(model: nn.Module) -> Iterator[dict[str, dict[str, list[Tensor]]]]:
    """Forwards inside record the gates of each cache, one value per update: {module name: {"update_mean": […], …}}."""
    observed = {name: m for name, m in model.named_modules() if isinstance(m, GatedCache)}
    records: dict[str, dict[str, list[Tensor]]] = {name: {} for name in observed}

    def record(name: str, gates: GateValues) -> None:
        for gate, values in gates._asdict().items():
            values = values.detach()
            saturated = ((values < 0.05) | (values > 0.95)).to(values.dtype)
            records[name].setdefault(f"{gate}_mean", []).append(values.mean())
            records[name].setdefault(f"{gate}_saturated", []).append(saturated.mean())

    try:
        for name, cache in observed.items():
            cache.observer_of_gates = partial(record, name)
        yield records
    finally:
        for cache in observed.values():
            cache.observer_of_gates = None
