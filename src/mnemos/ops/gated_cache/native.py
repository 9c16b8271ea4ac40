"""The gated cache's update and read on the CPU, in C++ (mnemos/native): one call each, forward and backward.

At small sizes the time of a cached attention is that of starting some hundred operations and of passing their results
through memory. The kernels take each row through all of them at once. They take float32; everything else (other
devices and types, autocast, torch.compile, function transforms, tensor subclasses, derivatives of derivatives) goes
through the composition of PyTorch's operations that each caller passes along, which is also what tests compare with.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos import native as kernels
from mnemos._compat import dispatch_mode_active, transformed
from mnemos.modes import in_graph
from mnemos.native import library, why_not

__all__ = ["Kernel", "Reading", "Update", "fused", "takes"]

Composition = Callable[..., tuple[Tensor | None, ...]]
UPDATE, UPDATE_BACKWARD, READ, READ_BACKWARD = range(4)  # `mnemos_cache` of native/library.cpp
_LANES = 16  # native/product.h
_BLOCK = 64  # native/read.h
_FEW = 1 << 18  # numbers of an intermediate that are kept for the backward, because memory of a megabyte is no concern


def takes(*tensors: Tensor | None) -> bool:
    """Whether there are kernels, and all tensors are plain ones of float32 on the CPU that no tracer observes."""
    if in_graph() or dispatch_mode_active() or library() is None:
        return False
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.dtype not in _TYPES or not x.is_cpu):
            return False
    return not transformed(*(x for x in tensors if x is not None))


_PLAIN = (Tensor, torch.nn.Parameter)
_TYPES = (torch.float32, torch.bool)  # bool: masks


class Kernel(ABC):
    """One call of a kernel. composition: the same function of the same tensors in PyTorch's operations."""

    composition: Composition
    differentiable: int  # results, before those that are not

    @abstractmethod
    def fits(self, *tensors: Any) -> bool:
        """Whether the tensors have the shapes that the kernel reads without a check of its own."""

    @abstractmethod
    def forward(self, keeps: bool, *tensors: Any) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """The results, and what the backward needs beside the tensors (if it `keeps` anything)."""

    @abstractmethod
    def backward(self, needs: Sequence[bool], grads: Sequence[Tensor | None], *tensors: Any) -> tuple[Any, ...]:
        """The gradients of the tensors, from those of the results; `tensors` are followed by what was kept."""


def fused(kernel: Kernel, *tensors: Tensor | None) -> Any:
    """The kernel's results, differentiable any number of times, if it `takes` the tensors and they fit."""
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _Fused.apply(kernel, keeps, *tensors)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, keeps: bool, *tensors: Tensor | None) -> Any:
        results, kept = kernel.forward(keeps, *tensors)
        ctx.kernel, ctx.count = kernel, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in results[kernel.differentiable :] if y is not None))
        ctx.save_for_backward(*tensors, *kept)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # read once: activation checkpointing gives them out once
        tensors, kept = saved[: ctx.count], saved[ctx.count :]
        needs = ctx.needs_input_grad[2:]
        if all(g is None for g in grads):
            return None, None, *[None] * ctx.count
        if not torch.is_grad_enabled() and takes(*grads):
            return None, None, *ctx.kernel.backward(needs, grads, *tensors, *kept)
        with torch.enable_grad():
            # Views: the gradient must stop at these inputs, although one input may be computed from another.
            given = [x if x is None or not n else x.view_as(x) for x, n in zip(tensors, needs, strict=True)]
            results = ctx.kernel.composition(*given)
        pairs = [(y, g) for y, g in zip(results, grads, strict=True) if y is not None and g is not None]
        wanted = [x for x, n in zip(given, needs, strict=True) if n]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs],
                wanted,
                [g for _, g in pairs],
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )
        return None, None, *(next(found) if n else None for n in needs)


class Update(Kernel):
    """`struct Update` of native/cache.h for tensors (source, cache, mask, update, reset, candidate, norm).

    The last four are pairs of weight and bias, eight tensors; the norm's may be None. Results: C_t [B, Tm, Dm], and if
    `mean`, its mean [Tm, Dm] over the rows with a valid token and their number []. resampled: token i is slot i.
    """

    def __init__(self, composition: Composition, resampled: bool, mean: bool) -> None:
        self.composition, self.resampled, self.mean, self.differentiable = composition, resampled, mean, 2

    def fits(self, *tensors: Any) -> bool:
        """See `Kernel`."""
        source, cache, mask, *weights = tensors
        rows, tokens, width = source.shape
        shapes = [None if w is None else tuple(w.shape) for w in weights]
        norm = [(width,)] * 2 if weights[6] is not None else [None] * 2
        return (
            source.numel() > 0
            and cache.shape[-1] == width
            and cache.numel() > 0
            and (cache.dim() == 2 or (cache.dim() == 3 and len(cache) == rows))
            and (not self.resampled or cache.shape[-2] == tokens)
            and (mask is None or (mask.dtype == torch.bool and mask.shape == (rows, tokens)))
            and shapes == [(width, 2 * width), (width,)] * 3 + norm
        )

    def forward(self, keeps: bool, *tensors: Any) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """See `Kernel`."""
        source, cache, mask, *weights = tensors
        new = cache.new_empty(source.shape[0], *cache.shape[-2:])
        mean = cache.new_empty(cache.shape[-2:]) if self.mean else None
        rows = cache.new_empty(()) if self.mean else None
        row = 3 * cache.shape[-2] * _whole(cache.shape[-1])
        kept = cache.new_empty(source.shape[0] * row) if keeps and source.shape[0] * row <= _FEW else None
        source, cache, weights = _pack(source), cache.contiguous(), _contiguous(weights)
        _call(UPDATE, [*self._prepare(source, cache, mask, weights), *_addresses(new, mean, rows, kept)])
        return (new, mean, rows), [rows, kept]

    def backward(self, needs: Sequence[bool], grads: Sequence[Tensor | None], *tensors: Any) -> tuple[Any, ...]:
        """See `Kernel`."""
        source, cache, mask, *weights = tensors[:11]
        rows, kept = tensors[11:]
        g_new, g_mean = (None if g is None else g.contiguous() for g in grads[:2])
        d_source = _like(source) if needs[0] else None
        d_cache = _like(cache) if needs[1] else None
        wanted = any(needs[3:])
        d_weights = [_like(w) if wanted and w is not None else None for w in weights]
        source, cache, weights = _pack(source), cache.contiguous(), _contiguous(weights)
        given = self._prepare(source, cache, mask, weights)
        outgoing = _addresses(None, None, rows, kept, g_new, g_mean, d_source, d_cache, *d_weights)
        _call(UPDATE_BACKWARD, [*given, *outgoing])
        return d_source, d_cache, None, *d_weights

    def _prepare(self, source: Tensor, cache: Tensor, mask: Tensor | None, weights: list[Tensor | None]) -> list[int]:
        slots, width = cache.shape[-2:]
        sizes = [*source.shape[:2], slots, width, torch.get_num_threads(), int(self.resampled)]
        where = [source.data_ptr(), *source.stride()[:2], 0]
        masked = [0, 0, 0] if mask is None else [mask.data_ptr(), *mask.stride()]
        old = [cache.data_ptr(), 0 if cache.dim() == 2 else slots * width]
        return [*sizes, *where, *masked, *old, *_addresses(*weights)]


class Reading(Kernel):
    """`struct Reading` of native/cache.h for tensors (x, cache, own, mix, query, key, value).

    The last three are pairs of weight and bias, six tensors. Without `own` (and then without `mix`) the result is o_mem
    [B, T, H, M]; with it, both mixed.
    """

    def __init__(self, composition: Composition, heads: int) -> None:
        self.composition, self.heads, self.differentiable = composition, heads, 1

    def fits(self, *tensors: Any) -> bool:
        """See `Kernel`."""
        x, cache, own, mix, *weights = tensors
        rows, tokens, width = x.shape
        values = weights[4].shape[0]
        heads = (rows, tokens, self.heads, values // self.heads)
        linear = [(width, width), (width,)]
        return (
            x.numel() > 0
            and cache.numel() > 0
            and len(cache) in (1, rows)
            and cache.shape[2:] == (width,)
            and not (width % self.heads or values % self.heads)
            and [tuple(w.shape) for w in weights] == [*linear, *linear, (values, width), (values,)]
            and (own is None or (own.shape == heads and mix.shape == (self.heads,)))
        )

    def forward(self, keeps: bool, *tensors: Any) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """See `Kernel`."""
        x, cache, own, mix, *weights = tensors
        b, t, width = x.shape
        caches, slots, _ = cache.shape
        values = weights[4].shape[0]
        y = x.new_empty(b, t, self.heads, values // self.heads)
        kept = shares = None
        if keeps:
            row, value_row = _whole(width), _whole(values)
            kept = x.new_empty(b * t * row + caches * slots * (row + value_row) + _LANES)
            count = b * self.heads * slots * _whole(t)
            shares = x.new_empty(count) if t <= _BLOCK and count <= _FEW else None
        x, cache, own, mix, weights = _pack(x), cache.contiguous(), _pack(own), _one(mix), _contiguous(weights)
        _call(READ, [*self._prepare(x, cache, own, mix, weights), *_addresses(y, kept, shares)])
        return (y,), [kept, shares]

    def backward(self, needs: Sequence[bool], grads: Sequence[Tensor | None], *tensors: Any) -> tuple[Any, ...]:
        """See `Kernel`."""
        x, cache, own, mix, *weights = tensors[:10]
        g = _pack(grads[0])
        d_x, d_weights = _like(x), [_like(w) for w in weights]
        d_cache = _like(cache) if needs[1] else None
        d_own, d_mix = (None, None) if own is None else (_like(own), _like(mix))
        x, cache, own, mix, weights = _pack(x), cache.contiguous(), _pack(own), _one(mix), _contiguous(weights)
        given = [*self._prepare(x, cache, own, mix, weights), *_addresses(None, *tensors[10:])]
        incoming = [g.data_ptr(), *g.stride()[:3]]
        _call(READ_BACKWARD, [*given, *incoming, *_addresses(d_x, d_cache, *d_weights, d_own, d_mix)])
        return d_x, d_cache, d_own, d_mix, *d_weights

    def _prepare(
        self, x: Tensor, cache: Tensor, own: Tensor | None, mix: Tensor | None, weights: list[Tensor]
    ) -> list[int]:
        heads, values = self.heads, weights[4].shape[0] // self.heads
        sizes = [x.shape[0], cache.shape[0], x.shape[1], *cache.shape[1:], heads, values, torch.get_num_threads()]
        beside = [0, 0, 0, 0] if own is None else [own.data_ptr(), *own.stride()[:3]]
        where = [x.data_ptr(), *x.stride()[:2], 0, cache.data_ptr()]
        return [*sizes, *where, *_addresses(*weights), *beside, *_addresses(mix)]


def _call(what: int, words: list[int]) -> None:
    loaded = library()
    if loaded is None:
        raise RuntimeError(why_not())
    call = (ctypes.c_int64 * _WORDS)(*words)  # what is not given is 0
    if loaded.mnemos_cache(kernels.variant(loaded), what, call):
        raise MemoryError("gated cache: not enough memory for the kernel; use smaller batches")


_WORDS = 48  # at least those of either struct


def _whole(n: int) -> int:
    return -(-n // _LANES) * _LANES


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if x is None else x.data_ptr() for x in tensors]


def _pack(x: Any) -> Any:
    """x with stride 1 in the last axis; the kernels take any other strides."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _one(x: Any) -> Any:
    return None if x is None else x.contiguous()


def _contiguous(tensors: Sequence[Any]) -> list[Any]:
    return [_one(x) for x in tensors]


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
