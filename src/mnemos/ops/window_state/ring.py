"""One token at a time without gradients: `Ring` keeps a state in buffers that it changes in place.

In decoding, the time of such a layer is mostly the overhead of some fifty operations of PyTorch on a few numbers: on a
CPU one call of a kernel (native/window/window.cpp) computes them. Elsewhere a token is a block (`read_blocks`).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mnemos.ops.kernel_call import Kernel, can_skip_dispatcher, why_no_kernels
from mnemos.ops.linear.feature_maps import Hedgehog, elu
from mnemos.ops.precision import full_precision

from .chunked import Far, Sizes, Tokens, WindowState, read_blocks

KERNEL = Kernel(
    "window_attention",
    "window",
    "WindowToken",
    "B heads G D M F window sinks place threads features q met k v from_q from_k query_map key_map gamma beta "
    "keys values from s z sink_k y",
)
NO_STATE, EXPONENTIAL, HEDGEHOG = range(3)


class Ring:
    """The state of rows that have read w + s tokens or more, for single tokens: the oldest gives its place to the new.

    sink_k: the sinks' keys as the queries that `step` gets for them meet them; None: those of the state.
    `state()` is the state as `window_attention` has it. Cost of a step: O(w + s + F·M) per head, one call of a kernel
    and no copies; without the kernel, copies of the buffers.
    """

    def __init__(self, state: WindowState, sizes: Sizes, sink_k: Tensor | None = None) -> None:
        self.sizes, self._sinks, self._types = sizes, state.sink_k, (state.k.dtype, state.v.dtype)
        self._fill(state, state.sink_k if sink_k is None else sink_k)

    def _fill(self, state: WindowState, sink_k: Tensor) -> None:
        wide = state.s.dtype
        # As large as its state and no view of what a longer call kept.
        self.keys, self.raw = (_own(x.to(wide)) for x in (state.k, state.raw))
        self.values = torch.cat([state.sink_v.to(wide), state.v.to(wide)], -2).contiguous()  # cat keeps channels_last
        self.sink_k = _own(sink_k.to(wide))
        self.s, self.z, self.seen = _own(state.s), _own(state.z), state.seen.clone()
        self.oldest = self.steps = 0

    def state(self) -> WindowState:
        """The state after the tokens read."""
        keys, values = self._types
        k, v, raw = (x.roll(-self.oldest, -2) for x in (self.keys, self.values[..., self.sizes.sinks :, :], self.raw))
        sinks = self.values[..., : self.sizes.sinks, :].to(values, copy=True)
        seen = self.seen + self.steps
        return WindowState(
            k.to(keys), v.to(values), raw.to(keys), self._sinks, sinks, self.s.clone(), self.z.clone(), seen
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` to every tensor, as to select rows."""
        for name in ("keys", "raw", "values", "sink_k", "s", "z", "seen", "_sinks"):
            setattr(self, name, fn(getattr(self, name)).contiguous())

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, far: Far | None, sink_q: Tensor | None, raw: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """y [B, H, 1, M] of one token: q [B, H, 1, D], k [B, Hk, 1, D], v [B, Hk, 1, M], sink_q as q, raw q and k."""
        y = kernel_step(self, q, k, v, far, q if sink_q is None else sink_q, raw)
        if y is not None:
            self.oldest, self.steps = (self.oldest + 1) % self.sizes.window, self.steps + 1
            return y.to(v.dtype)
        group = k.shape[1], q.shape[1] // k.shape[1]
        raw_q, raw_k = (None, None) if raw is None else raw
        q, sink_q, raw_q = (x if x is None else x.unflatten(1, group) for x in (q, sink_q, raw_q))  # type: ignore[assignment]
        with full_precision(q.device.type):
            state = self.state()._replace(sink_k=self.sink_k)
            y, after = read_blocks(Tokens(q, k, v, sink_q, raw_q, raw_k), self.sizes, far, state, None)
        self._fill(after, self.sink_k)
        return y.flatten(1, 2)


def _own(x: Tensor) -> Tensor:
    """A copy without gaps, as the kernel reads buffers."""
    return x.clone(memory_format=torch.contiguous_format)


def kernel_step(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, far: Far | None, sink_q: Tensor, raw: tuple[Tensor, Tensor] | None
) -> Tensor | None:
    """y [B, H, 1, M] of a token, the ring's buffers are changed; None: PyTorch has to compute it, nothing is changed.

    q, sink_q and raw[0] [B, H, 1, D], k and raw[1] [B, Hk, 1, D], v [B, Hk, 1, M]. None where the kernels were not
    built, for float64, other devices than a CPU, other feature maps than `Hedgehog` and `elu`, gradients, shapes that
    PyTorch may broadcast or refuse, and where a compiler or tracer has to see the operations.
    """
    if ring.s.dtype is not torch.float32 or why_no_kernels():
        return None
    features: int = NO_STATE
    maps: tuple[Tensor | None, Tensor | None] = (None, None)
    if far is not None:
        if isinstance(far.query, Hedgehog) and isinstance(far.key, Hedgehog):
            features, maps = HEDGEHOG, (far.query.weight, far.key.weight)
        elif far.query is elu and far.key is elu:
            features = EXPONENTIAL
        else:
            return None
    (b, heads, _, d), (kv_heads, _, m), sinks, window = q.shape, v.shape[1:], ring.sizes.sinks, ring.sizes.window
    width, f = 0 if raw is None else d, 0 if far is None else ring.s.shape[2]
    gamma, beta = (None, None) if far is None else (far.gamma, far.beta)
    from_q, from_k = (q, k) if raw is None else raw
    few, many, value = (b, kv_heads, 1, d), (b, heads, 1, d), (b, kv_heads, 1, m)
    shaped = (
        (q, many), (sink_q, many), (k, few), (v, value), (from_q, many), (from_k, few), (maps[0], (heads, f // 2, d)),
        (maps[1], (kv_heads, f // 2, d)), (gamma, (heads,)), (beta, (kv_heads,)),
    )  # fmt: skip
    buffers = (
        (ring.keys, (b, kv_heads, window, d)), (ring.values, (b, kv_heads, sinks + window, m)),
        (ring.raw, (b, kv_heads, window, width)), (ring.s, (b, kv_heads, f, m)),
    )  # fmt: skip
    if any([x is not None and (x.shape != shape or not x.is_cpu) for x, shape in (*shaped, *buffers)]):
        return None
    differentiated = torch.is_grad_enabled() and any([x is not None and x.requires_grad for x, _ in shaped])
    if differentiated or torch.jit.is_tracing() or not can_skip_dispatcher(q, sink_q, k, v):
        return None
    floats = [x if x is None else x.to(torch.float32) for x, _ in shaped]
    y = q.new_empty(b, heads, 1, m, dtype=torch.float32)
    sizes = b, kv_heads, heads // kv_heads, d, m, f, window, sinks, ring.oldest, torch.get_num_threads(), features
    contents = ring.keys, ring.values, None if raw is None else ring.raw, ring.s, ring.z, ring.sink_k
    decay = 1.0 if far is None else math.exp(far.decay)
    KERNEL((), (*sizes, *floats, *contents, y), ring.sizes.scale, ring.sizes.softcap or 0.0, decay)
    return y
