"""The gated cache's update and read on the CPU, in C++ (mnemos/native): one call each, forward and backward.

At small sizes the time of a cached attention is that of starting some hundred operations and of passing their results
through memory. The kernels take each row through all of them at once. They take float32; everything else (other
devices and types, autocast, torch.compile, function transforms, tensor subclasses, derivatives of derivatives) goes
through the composition of PyTorch's operations that each caller passes along, which is also what tests compare with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mnemos.modes import in_graph
from mnemos.ops.backward import differentiate_again
from mnemos.ops.kernel_call import Kernel, can_skip_dispatcher, why_no_kernels

Composition = Callable[..., tuple[Tensor | None, ...]]
_LANES = 16  # native/simd/product.h
_BLOCK = 64  # native/gated_cache/read.h
_FEW = 1 << 18  # numbers of an intermediate that are kept for the backward, because memory of a megabyte is no concern
UPDATE_FORWARD, UPDATE_BACKWARD, READ_FORWARD, READ_BACKWARD = range(4)  # `mnemos_cache` of native/library.cpp
UPDATE = Kernel(
    "gated cache",
    "cache",
    "Update",
    "B T slots width threads resampled source:4 mask mask_b mask_t cache cache_b update:2 reset:2 candidate:2 norm:2 "
    "next mean rows kept g_next g_mean d_source d_cache d_update:2 d_reset:2 d_candidate:2 d_norm:2",
)
READ = Kernel(
    "gated cache",
    "cache",
    "Reading",
    "B caches T slots width heads values threads x:4 cache query:2 key:2 value:2 own:4 mix y kept weights "
    "g:4 d_x d_cache d_query:2 d_key:2 d_value:2 d_own d_mix",
)
_TYPES = (torch.float32, torch.bool)  # bool: masks


def takes(*tensors: Tensor | None) -> bool:
    """Whether there are kernels, and all tensors are plain ones of float32 on the CPU that no tracer observes."""
    if in_graph() or why_no_kernels() or any([x is not None and x.dtype not in _TYPES for x in tensors]):
        return False
    return all([x is None or x.is_cpu for x in tensors]) and can_skip_dispatcher(*tensors)


def fused(kernel: "Update | Reading", *tensors: Tensor | None) -> Any:
    """The kernel's results, differentiable any number of times, if it `takes` the tensors and they fit."""
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _Fused.apply(kernel, keeps, *tensors)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Any, keeps: bool, *tensors: Tensor | None) -> Any:
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
        return None, None, *differentiate_again(ctx.kernel.composition, tensors, needs, grads)


class Update:
    """`struct Update` of native/gated_cache/cache.h for tensors (source, cache, mask, update, reset, candidate, norm).

    The last four are pairs of weight and bias, eight tensors; the norm's may be None. Results: C_t [B, Tm, Dm], and if
    `mean`, its mean [Tm, Dm] over the rows with a valid token and their number []. resampled: token i is slot i.
    composition: the same function of the same tensors in PyTorch's operations.
    """

    differentiable = 2  # results, before those that are not

    def __init__(self, composition: Composition, resampled: bool, mean: bool) -> None:
        self.composition, self.resampled, self.mean = composition, resampled, mean

    def fits(self, *tensors: Any) -> bool:
        """Whether the tensors have the shapes that the kernel reads without a check of its own."""
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
        """The results, and what the backward needs beside the tensors (if it `keeps` anything)."""
        source, cache, *_ = tensors
        new = cache.new_empty(len(source), *cache.shape[-2:])
        mean, rows = (cache.new_empty(cache.shape[-2:]), cache.new_empty(())) if self.mean else (None, None)
        count = len(source) * 3 * cache.shape[-2] * _whole(cache.shape[-1])
        kept = cache.new_empty(count) if keeps and count <= _FEW else None
        UPDATE((UPDATE_FORWARD,), (*self._read(*tensors), new, mean, rows, kept))
        return (new, mean, rows), [rows, kept]

    def backward(self, needs: Sequence[bool], grads: Sequence[Tensor | None], *tensors: Any) -> tuple[Any, ...]:
        """The gradients of the tensors, from those of the results; `tensors` are followed by what was kept."""
        source, cache, _, *weights = tensors[:11]
        d_source, d_cache = _like(source) if needs[0] else None, _like(cache) if needs[1] else None
        d_weights = [_like(w) if any(needs[3:]) else None for w in weights]
        values = None, None, *tensors[11:], *grads[:2], d_source, d_cache, *d_weights
        UPDATE((UPDATE_BACKWARD,), (*self._read(*tensors[:11]), *values))
        return d_source, d_cache, None, *d_weights

    def _read(self, source: Tensor, cache: Tensor, mask: Tensor | None, *weights: Tensor | None) -> tuple[Any, ...]:
        slots, width = cache.shape[-2:]
        sizes = *source.shape[:2], slots, width, torch.get_num_threads(), self.resampled
        return *sizes, source, mask, cache, 0 if cache.dim() == 2 else slots * width, *weights


class Reading:
    """`struct Reading` of native/gated_cache/cache.h for tensors (x, cache, own, mix, query, key, value).

    The last three are pairs of weight and bias, six tensors. Without `own` (and then without `mix`) the result is o_mem
    [B, T, H, M]; with it, both mixed. composition: as in `Update`.
    """

    differentiable = 1

    def __init__(self, composition: Composition, heads: int) -> None:
        self.composition, self.heads = composition, heads

    def fits(self, *tensors: Any) -> bool:
        """Whether the tensors have the shapes that the kernel reads without a check of its own."""
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
        """The results, and what the backward needs beside the tensors (if it `keeps` anything)."""
        x, cache, *_ = tensors
        (b, t, width), (caches, slots, _), values = x.shape, cache.shape, tensors[8].shape[0]
        y = x.new_empty(b, t, self.heads, values // self.heads)
        kept = shares = None
        if keeps:
            row, value_row = _whole(width), _whole(values)
            kept = x.new_empty(b * t * row + caches * slots * (row + value_row) + _LANES)
            count = b * self.heads * slots * _whole(t)
            shares = x.new_empty(count) if t <= _BLOCK and count <= _FEW else None
        READ((READ_FORWARD,), (*self._read(*tensors), y, kept, shares))
        return (y,), [kept, shares]

    def backward(self, needs: Sequence[bool], grads: Sequence[Any], *tensors: Any) -> tuple[Any, ...]:
        """The gradients of the tensors, from those of the results; `tensors` are followed by what was kept."""
        x, cache, own, mix, *weights = tensors[:10]
        d_x, d_weights = _like(x), [_like(w) for w in weights]
        d_cache = _like(cache) if needs[1] else None
        d_own, d_mix = _like(own), _like(mix)
        values = None, *tensors[10:], grads[0], d_x, d_cache, *d_weights, d_own, d_mix
        READ((READ_BACKWARD,), (*self._read(*tensors[:10]), *values))
        return d_x, d_cache, d_own, d_mix, *d_weights

    def _read(
        self, x: Tensor, cache: Tensor, own: Tensor | None, mix: Tensor | None, *weights: Tensor
    ) -> tuple[Any, ...]:
        heads, values = self.heads, weights[4].shape[0] // self.heads
        sizes = x.shape[0], cache.shape[0], x.shape[1], *cache.shape[1:], heads, values, torch.get_num_threads()
        return *sizes, x, cache, *weights, own, mix


def _whole(n: int) -> int:
    return -(-n // _LANES) * _LANES


def _like(x: Any) -> Any:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
