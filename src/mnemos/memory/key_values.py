"""What attentions keep of earlier tokens, appended in a buffer: keys and values, or a layer's inputs."""

import torch
from torch import Tensor

from mnemos._compat import forward_differentiated, pytree, transformed
from mnemos.ops.padding import count_seen, take, valid_last, zero_invalid
from mnemos.types import Device, InputError


class KeyValues:
    """Keys and values of the tokens a causal attention has read; a `State`, which no operation changes.

    k, v: [B, N, H, D/H], the last N tokens of every row: all tokens, or those of a window.
    valid [B, N] bool: the tokens that may be attended to (not padding, and not the past of a reset row).
    seen [B] int64: valid tokens since the row began, which is the position of the next token.

    `append` costs O(T) for T new tokens, amortised. Without gradient the tensors are slices of a buffer with spare
    capacity, and the newest state of a stream writes its tokens there, where no earlier state reads. A state that is
    not the newest (a fork), or that was rebuilt from its leaves, copies its tokens once.
    """

    __slots__ = ("_buffer", "_end", "k", "seen", "v", "valid")

    def __init__(
        self, k: Tensor, v: Tensor, valid: Tensor, seen: Tensor, _buffer: "Buffer | None" = None, _end: int = 0
    ) -> None:
        self.k, self.v, self.valid, self.seen = k, v, valid, seen
        self._buffer, self._end = _buffer, _end  # the buffer of the tokens, and where in it they end

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "keys and values"

    @staticmethod
    def empty(
        batch: int, heads: int, width: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> "KeyValues":
        """The state before the first token: B rows, H heads of `width` channels."""
        nothing = torch.zeros(batch, 0, heads, width, device=device, dtype=dtype)
        valid = torch.zeros(batch, 0, device=device, dtype=torch.bool)
        return KeyValues(nothing, nothing.clone(), valid, torch.zeros(batch, device=device, dtype=torch.int64))

    def last(self, n: int) -> "KeyValues":
        """The state with only the last n tokens, in the same buffer."""
        if n >= self.k.shape[1]:
            return self
        start = self.k.shape[1] - n
        return KeyValues(
            self.k[:, start:], self.v[:, start:], self.valid[:, start:], self.seen, self._buffer, self._end
        )

    def packed(self) -> "KeyValues":
        """The same state with the tokens that may be attended to behind the others, which become zeros."""
        order = valid_last(self.valid)
        valid = take(self.valid, order)
        k, v = (zero_invalid(take(x, order), valid) for x in (self.k, self.v))
        return KeyValues(k, v, valid, self.seen)

    def widened(self, n: int) -> "KeyValues":
        """The same state with at least n tokens: those that are new, in front, are not valid."""
        return KeyValues(pad_front(self.k, n), pad_front(self.v, n), pad_front(self.valid, n), self.seen)

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None = None) -> "KeyValues":
        """The state after T more tokens: k, v [B, T, H, D/H], mask [B, T] bool, True = valid."""
        seen = count_seen(k, self.seen, mask)
        valid = k.new_ones(k.shape[:2], dtype=torch.bool) if mask is None else mask.clone()  # the caller's to change
        if self.k.shape[1] == 0:
            return KeyValues(k, v, valid, seen)
        (k, v, valid), buffer, end = append((self.k, self.v, self.valid), (k, v, valid), self._buffer, self._end)
        return KeyValues(k, v, valid, seen, buffer, end)

    def with_room(self) -> "KeyValues":
        """The state after one more valid token, N > 0, whose key and value the caller writes into `k` and `v`."""
        (k, v, valid), buffer, end = with_room((self.k, self.v, self.valid), 1, self._buffer, self._end)
        valid[:, -1] = True
        return KeyValues(k, v, valid, self.seen + 1, buffer, end)

    def __repr__(self) -> str:
        return f"KeyValues(k={tuple(self.k.shape)}, v={tuple(self.v.shape)}, seen={tuple(self.seen.shape)})"


def check_key_values(state: object, batch: int, heads: int, width: int) -> None:
    """Raise InputError unless the state's keys are [batch, N, heads, width]."""
    found = tuple(state.k.shape) if isinstance(state, KeyValues) else type(state).__name__
    if not isinstance(state, KeyValues) or (found[0], *found[2:]) != (batch, heads, width):
        raise InputError(
            f"expected a state of keys [{batch}, N, {heads}, {width}], found {found}; use the layer's own initial_state"
        )


class Segments:
    """A layer's inputs at the last N tokens of every row; a `State`, which no operation changes.

    x [B, N, D]: the inputs, from which every call computes keys and values. valid [B, N] bool: the tokens that may be
    attended to (not padding, and not the past of a reset row); a row of zeros is therefore a new row.

    `append` costs O(T) for T new tokens, amortised, as for `KeyValues`.
    """

    __slots__ = ("_buffer", "_end", "valid", "x")

    def __init__(self, x: Tensor, valid: Tensor, _buffer: "Buffer | None" = None, _end: int = 0) -> None:
        self.x, self.valid = x, valid
        self._buffer, self._end = _buffer, _end

    @property
    def memory_name(self) -> str:
        """Its name in reports."""
        return "segments"

    @staticmethod
    def empty(batch: int, dim: int, device: Device = None, dtype: torch.dtype | None = None) -> "Segments":
        """The state before the first token: B rows of width D."""
        valid = torch.zeros(batch, 0, device=device, dtype=torch.bool)
        return Segments(torch.zeros(batch, 0, dim, device=device, dtype=dtype), valid)

    def append(self, x: Tensor, valid: Tensor) -> "Segments":
        """The state after T more tokens: x [B, T, D], valid [B, T] bool."""
        if self.x.shape[1] == 0:
            return Segments(x, valid)
        (x, valid), buffer, end = append((self.x, self.valid), (x, valid), self._buffer, self._end)
        return Segments(x, valid, buffer, end)

    def last(self, n: int) -> "Segments":
        """The state with only the last n tokens, in the same buffer."""
        if n >= self.x.shape[1]:
            return self
        start = self.x.shape[1] - n
        return Segments(self.x[:, start:], self.valid[:, start:], self._buffer, self._end)

    def widened(self, n: int) -> "Segments":
        """The same state with at least n tokens: those that are new, in front, are not valid."""
        return Segments(pad_front(self.x, n), pad_front(self.valid, n))

    def detach(self) -> "Segments":
        """The same values without the graph that computed them."""
        return Segments(self.x.detach(), self.valid, self._buffer, self._end)

    def __repr__(self) -> str:
        return f"Segments(x={tuple(self.x.shape)})"


class Buffer:
    """Storage for `capacity` tokens. The first `used` belong to some state and are not written again."""

    def __init__(self, kept: tuple[Tensor, ...], capacity: int) -> None:
        def room(x: Tensor) -> Tensor:
            b, n, *rest = x.shape
            if len(rest) < 2:
                space = x.new_zeros(b, capacity, *rest)
            else:  # heads before tokens in memory, so that attention reads the keys of a head contiguously
                h, d = rest
                space = torch.empty(b, h, capacity, d, device=x.device, dtype=x.dtype).transpose(1, 2)
            space[:, :n] = x
            return space

        self.tensors = tuple(room(x) for x in kept)
        self.capacity, self.used = capacity, kept[0].shape[1]


def append(
    kept: tuple[Tensor, ...], new: tuple[Tensor, ...], buffer: Buffer | None, end: int
) -> tuple[tuple[Tensor, ...], Buffer | None, int]:
    """`kept` [B, N, ..], N > 0, followed by `new` [B, T, ..]; the buffer that holds them, if any, and their end in it.

    `buffer` and `end` are those of `kept` (None, 0: no buffer). No given tensor changes.
    """
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (*kept, *new))
    tangents = not torch.compiler.is_compiling() and (forward_differentiated() or transformed(*kept, *new))
    if differentiates or tangents or torch.compiler.is_exporting():  # an exported program has no buffer to write into
        return tuple(torch.cat(pair, 1) for pair in zip(kept, new, strict=True)), None, 0
    more = new[0].shape[1]
    tensors, buffer, end = with_room(kept, more, buffer, end)
    for tensor, x in zip(tensors, new, strict=True):
        # By `data`, so that it does not count as a write to earlier states, which a graph or replay may have kept: they
        # share the buffer and read none of these places.
        tensor.data[:, -more:] = x
    return tensors, buffer, end


def with_room(
    kept: tuple[Tensor, ...], more: int, buffer: Buffer | None, end: int
) -> tuple[tuple[Tensor, ...], Buffer, int]:
    """`kept` [B, N, ..], N > 0, and room behind it for `more` tokens, which the caller writes; else as `append`."""
    before = kept[0].shape[1]
    if buffer is not None and buffer.tensors[0].is_inference() and not torch.is_inference_mode_enabled():
        buffer = None  # such a tensor may be written in inference mode only
    if buffer is None or buffer.used != end or buffer.capacity < end + more:
        buffer, end = Buffer(kept, 2 * (before + more)), before
    start, end = end - before, end + more
    buffer.used = end
    return tuple(room[:, start:end] for room in buffer.tensors), buffer, end


def pad_front(x: Tensor, length: int) -> Tensor:
    """x [B, N, ..] with zeros in front, up to `length` on axis 1; unchanged if it has as many."""
    missing = length - x.shape[1]
    return torch.cat([x.new_zeros(x.shape[0], missing, *x.shape[2:]), x], 1) if missing > 0 else x


# PyTorch's tree functions see the tensors. A rebuilt state has no buffer and copies at its next append.
pytree.register_pytree_node(
    KeyValues,
    lambda s: ([s.k, s.v, s.valid, s.seen], None),
    lambda children, _: KeyValues(*children),
    serialized_type_name="mnemos.KeyValues",
)
pytree.register_pytree_node(
    Segments,
    lambda s: ([s.x, s.valid], None),
    lambda children, _: Segments(*children),
    serialized_type_name="mnemos.Segments",
)
