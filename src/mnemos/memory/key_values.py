"""The memory of softmax attention: every key and value so far."""

from typing import Any

import torch
from torch import Tensor

from mnemos._compat import pytree


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
        self, k: Tensor, v: Tensor, valid: Tensor, seen: Tensor, _buffer: "Buffer | None" = None, _end: int = 0
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
        seen = self.seen + k.shape[1]
        if self.k.shape[1] == 0:
            return KeyValues(k, v, valid, seen)
        (k, v, valid), buffer, end = appended((self.k, self.v, self.valid), (k, v, valid), self._buffer, self._end)
        return KeyValues(k, v, valid, seen, buffer, end)

    def __repr__(self) -> str:
        return f"KeyValues(k={tuple(self.k.shape)}, v={tuple(self.v.shape)}, seen={tuple(self.seen.shape)})"


class Buffer:
    """Room for `capacity` tokens, of which the first `used` belong to some state and are never written again."""

    def __init__(self, kept: tuple[Tensor, ...], capacity: int) -> None:
        def room(x: Tensor) -> Tensor:
            b, n, *rest = x.shape
            if len(rest) < 2:
                space = x.new_zeros(b, capacity, *rest)
            else:  # heads before tokens in memory: attention reads each head's keys as one run
                h, d = rest
                space = torch.empty(b, h, capacity, d, device=x.device, dtype=x.dtype).transpose(1, 2)
            space[:, :n] = x
            return space

        self.tensors = tuple(room(x) for x in kept)
        self.capacity, self.used = capacity, kept[0].shape[1]


def appended(
    kept: tuple[Tensor, ...], new: tuple[Tensor, ...], buffer: Buffer | None, end: int
) -> tuple[tuple[Tensor, ...], Buffer | None, int]:
    """`kept` [B, N, ..], N > 0, with `new` [B, T, ..] behind it, the buffer they lie in, if any, and where they end.

    `buffer` and `end` are those that `kept` came with (None, 0: none). Nothing that was given changes.
    """
    before, more = kept[0].shape[1], new[0].shape[1]
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*kept, *new)):
        return tuple(torch.cat(pair, 1) for pair in zip(kept, new, strict=True)), None, 0
    if buffer is not None and buffer.tensors[0].is_inference() and not torch.is_inference_mode_enabled():
        buffer = None  # such a tensor may be written in inference mode alone
    if buffer is None or buffer.used != end or buffer.capacity < end + more:
        buffer, end = Buffer(kept, 2 * (before + more)), before
    start, at, end = end - before, end, end + more
    for room, x in zip(buffer.tensors, new, strict=True):
        room[:, at:end] = x
    buffer.used = end
    return tuple(room[:, start:end] for room in buffer.tensors), buffer, end


# torch's own tree functions see through it; a rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    KeyValues,
    lambda s: ([s.k, s.v, s.valid, s.seen], None),
    lambda children, _: KeyValues(*children),
    serialized_type_name="mnemos.KeyValues",
)
