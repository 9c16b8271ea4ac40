"""The memory of softmax attention: every key and value so far."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class KeyValues:
    """Keys and values of the tokens a causal attention has seen; a `State`, never changed once made.

    k, v: [B, N, H, D/H], the last N tokens of every row: all of them, or those of a window.
    valid [B, N] bool: which of them may be attended to (padding and the past of a reset row may not).
    seen [B] int64: tokens since the row was fresh: the position of the next one.

    `append` costs O(T) for T new tokens, amortised, though no state is ever changed: without gradient the
    tensors are stretches of a buffer with room behind them, and the newest state of a stream writes into that
    room. A state that is not the newest (a fork), or was rebuilt from its leaves, copies once and goes on.
    """

    __slots__ = ("_buffer", "_end", "k", "seen", "v", "valid")

    def __init__(
        self, k: Tensor, v: Tensor, valid: Tensor, seen: Tensor, _buffer: "_Buffer | None" = None, _end: int = 0
    ) -> None:
        self.k, self.v, self.valid, self.seen = k, v, valid, seen
        self._buffer, self._end = _buffer, _end  # where the tokens lie, and where in it they end

    @staticmethod
    def empty(batch: int, heads: int, width: int, device: Any = None, dtype: Any = None) -> "KeyValues":
        """No token seen: B rows, H heads of `width` channels."""
        nothing = torch.zeros(batch, 0, heads, width, device=device, dtype=dtype)
        valid = torch.zeros(batch, 0, device=device, dtype=torch.bool)
        return KeyValues(nothing, nothing.clone(), valid, torch.zeros(batch, device=device, dtype=torch.int64))

    def last(self, n: int) -> "KeyValues":
        """The state with only the last n tokens to attend to; it goes on in the same buffer."""
        if n >= self.k.shape[1]:
            return self
        start = self.k.shape[1] - n
        return KeyValues(
            self.k[:, start:], self.v[:, start:], self.valid[:, start:], self.seen, self._buffer, self._end
        )

    def append(self, k: Tensor, v: Tensor, valid: Tensor) -> "KeyValues":
        """The state after T more tokens: k, v [B, T, H, D/H], valid [B, T] bool."""
        before, new = self.k.shape[1], k.shape[1]
        seen = self.seen + new
        if before == 0:
            return KeyValues(k, v, valid, seen)
        if torch.is_grad_enabled() and (k.requires_grad or self.k.requires_grad):
            k, v, valid = (torch.cat(pair, 1) for pair in ((self.k, k), (self.v, v), (self.valid, valid)))
            return KeyValues(k, v, valid, seen)
        buffer, at = self._buffer, self._end
        if buffer is not None and buffer.k.is_inference() and not torch.is_inference_mode_enabled():
            buffer = None  # such a tensor may be written in inference mode alone
        if buffer is None or buffer.used != at or buffer.k.shape[1] < at + new:
            buffer, at = _Buffer(self, 2 * (before + new)), before
        start, end = at - before, at + new
        buffer.k[:, at:end], buffer.v[:, at:end], buffer.valid[:, at:end] = k, v, valid
        buffer.used = end
        return KeyValues(buffer.k[:, start:end], buffer.v[:, start:end], buffer.valid[:, start:end], seen, buffer, end)

    def __repr__(self) -> str:
        return f"KeyValues(k={tuple(self.k.shape)}, v={tuple(self.v.shape)}, seen={tuple(self.seen.shape)})"


class _Buffer:
    """Room for `capacity` tokens, of which the first `used` belong to some state and are never written again."""

    def __init__(self, state: KeyValues, capacity: int) -> None:
        def room(x: Tensor) -> Tensor:
            # Heads before tokens in memory: attention reads each head's keys as one run.
            b, n, h, d = x.shape
            space = torch.empty(b, h, capacity, d, device=x.device, dtype=x.dtype).transpose(1, 2)
            space[:, :n] = x
            return space

        self.k, self.v = room(state.k), room(state.v)
        self.valid = torch.zeros(state.valid.shape[0], capacity, device=state.valid.device, dtype=torch.bool)
        self.used = state.valid.shape[1]
        self.valid[:, : self.used] = state.valid


# torch's own tree functions see through it; a rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    KeyValues,
    lambda s: ([s.k, s.v, s.valid, s.seen], None),
    lambda children, _: KeyValues(*children),
    serialized_type_name="mnemos.KeyValues",
)
