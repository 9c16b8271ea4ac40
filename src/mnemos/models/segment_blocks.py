"""Attention within a segment that has memory tokens in front and behind: who attends to whom, and what is cached."""

from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import exportable
from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.attention.softmax import attend, projected
from mnemos.memory.exported import padded
from mnemos.memory.key_values import KeyValues
from mnemos.types import Device, InputError


class Layout(NamedTuple):
    """The tokens of a pass, in this order: memory tokens in front, the segment's tokens, memory tokens behind."""

    front: int
    tokens: int
    back: int

    def sees(self, causal: bool, device: Device) -> Tensor:
        """[n, n] bool, True = the token of the row attends to the token of the column.

        Front: the front only. A token: the front, and tokens not after it. Back: everything. Within the front and
        within the back: all, or with `causal` those not after.
        """
        place = torch.arange(sum(self), device=device)
        group = (place >= self.front).int() + (place >= self.front + self.tokens).int()
        not_after = place <= place[:, None]
        within = not_after if causal else not_after | (group != 1)
        return (group < group[:, None]) | ((group == group[:, None]) & within)

    def is_causal(self, causal: bool) -> bool:
        """Whether `sees` is the plain causal mask."""
        return causal or max(self.front, self.back) < 2


class Context(NamedTuple):
    """What the tokens of a pass attend to: keys and values [B, N, H, d] before them, themselves, and no others.

    visible [B or 1, 1, T, N + T] bool; None: the one token to everything, or T tokens causally, without keys before.
    turn: the rotations of the T tokens, or None without rotary positions. As the result of an attention, k and v are
    those of the T tokens.
    """

    k: Tensor
    v: Tensor
    visible: Tensor | None = None
    turn: Tensor | None = None


class SegmentAttention(MultiHeadAttention[Context]):
    """Softmax attention whose caller says what is visible: `y, Context(k, v) = layer(x, Context(...))`.

    x [B, T, D]. It has the weights of `SoftmaxAttention` under the same names. The state that it takes is what the
    tokens attend to, and the one that it returns holds their own keys and values, for the caller to store.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0, rotary: bool = False) -> None:
        super().__init__(dim, num_heads, True, dropout, splits="segments", state_kind="constant")
        if rotary and dim // num_heads % 2:
            raise InputError(
                f"rotary positions: expected an even width per head, found {dim // num_heads}; change dim or "
                'num_heads, or use position="learned"'
            )
        self.qkv = torch.nn.Linear(dim, 3 * dim)
        self.output = torch.nn.Linear(dim, dim)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> Context:
        """No keys."""
        nothing = torch.zeros(batch_size, 0, self.num_heads, self.dim // self.num_heads, device=device, dtype=dtype)
        return Context(nothing, nothing)

    def check_state(self, state: Context, batch_size: int) -> None:
        """Nothing: the model checks its state."""

    def attended(self, x: Tensor, state: Context | None, mask: Tensor | None) -> tuple[Tensor, Context | None]:
        """The heads before projection, [B, T, H, D/H], and the keys and values of x."""
        t = x.shape[1]
        q, k, v = projected(self.qkv(x), self.num_heads, None if state is None else state.turn)
        state = Context(k[:, :0], v[:, :0]) if state is None else state
        p = self.dropout if self.training else 0.0
        keys, values = k, v
        if state.k.shape[1]:
            keys, values = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
        heads = attend(q, keys, values, state.visible, state.visible is None and t > 1, p)
        return heads, Context(k, v)


@exportable
class SegmentCache(NamedTuple):
    """A block's keys and values within an unfinished segment: of the memory tokens in front, and of its tokens so far.

    front_k, front_v [B, f, H, D/H], own: a `KeyValues` of at most L tokens. Rows may be at different places; the tokens
    of a row are the last columns, and the other columns are not valid. If all rows are at the start of a segment, all
    tensors are empty: [B, 0, ..].
    """

    front_k: Tensor
    front_v: Tensor
    own: KeyValues

    @property
    def memory_name(self) -> None:
        """None: the cache belongs to a place within the segment, which the state counts elsewhere."""
        return None

    @staticmethod
    def empty(
        batch: int, heads: int, width: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> "SegmentCache":
        """The cache at the start of a segment."""
        own = KeyValues.empty(batch, heads, width, device, dtype)
        return SegmentCache(own.k, own.v.clone(), own)

    def before(self) -> tuple[Tensor, Tensor]:
        """All keys and all values, [B, f + n, H, D/H]."""
        if not self.front_k.shape[1]:
            return self.own.k, self.own.v
        return torch.cat([self.front_k, self.own.k], 1), torch.cat([self.front_v, self.own.v], 1)

    def valid(self) -> Tensor | None:
        """Which of them may be attended to, [B, f + n] bool; None: there are none."""
        f, n = self.front_k.shape[1], self.own.k.shape[1]
        if not f:
            return self.own.valid if n else None
        return torch.cat([self.own.valid.new_ones(self.own.valid.shape[0], f), self.own.valid], 1)

    def with_front(self, k: Tensor, v: Tensor, rows: Tensor) -> "SegmentCache":
        """With the keys and values of the memory tokens in front of the rows (indices)."""
        pairs = (self.front_k, k), (self.front_v, v)
        front_k, front_v = (old.index_copy(0, rows, x.to(old.dtype)) for old, x in pairs)
        return self._replace(front_k=front_k, front_v=front_v)

    def closed(self, place: list[int], done: list[bool]) -> "SegmentCache":
        """Without the tokens of the rows that are `done`, not all; `place`: how many tokens each row then has."""
        rows, own = torch.tensor(done, device=self.own.k.device), self.own.last(max(place))
        # Without the buffer, in which these tokens are valid.
        own = KeyValues(own.k, own.v, own.valid & ~rows[:, None], own.seen.masked_fill(rows, 0))
        return self._replace(own=own)

    def widened(self, front: int, length: int) -> "SegmentCache":
        """The same cache with space for `front` memory tokens and `length` tokens, which are not valid where new."""
        front_k, front_v = (padded(x, front) for x in (self.front_k, self.front_v))
        return SegmentCache(front_k, front_v, self.own.widened(length))

    def after(self, ends: Tensor) -> "SegmentCache":
        """The cache, with one token more than it may keep, without the oldest; empty in the rows [B] that are True."""
        own = self.own
        valid, seen = own.valid[:, 1:] & ~ends[:, None], own.seen.masked_fill(ends, 0)
        return self._replace(own=KeyValues(own.k[:, 1:], own.v[:, 1:], valid, seen))


def visible(layout: Layout, causal: bool, kept: Tensor | None, valid: Tensor | None, device: Device) -> Tensor | None:
    """`Context.visible` of a pass after keys that are valid as `kept` [B, N] says (None: there are none).

    valid [B, tokens] bool: which of the pass's tokens are no padding; None: all. Every token attends to itself.
    """
    n = sum(layout)
    if kept is None and valid is None and layout.is_causal(causal):
        return None
    if n == 1 and kept is not None:
        # One token attends to every valid key. On the CPU, checking that all are valid does not wait for a device.
        if kept.device.type == "cpu" and not torch.compiler.is_compiling() and bool(kept.all()):
            return None
        return torch.cat([kept, kept.new_ones(kept.shape[0], 1)], 1)[:, None, None]
    own = layout.sees(causal, device)[None]
    if valid is not None:
        ends = [valid.new_ones(valid.shape[0], count) for count in (layout.front, layout.back)]
        itself = torch.eye(n, dtype=torch.bool, device=device)
        own = (own & torch.cat([ends[0], valid, ends[1]], 1)[:, None]) | itself
    if kept is not None:
        own = torch.cat([kept[:, None].expand(-1, n, -1), own.expand(kept.shape[0], -1, -1)], 2)
    return own[:, None]
