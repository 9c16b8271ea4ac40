"""A decoder with memory tokens on an absolute grid of segments, so that calls may cut a sequence anywhere."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from mnemos.memory.memory_tokens import TokenState
from mnemos.types import Device, InputError, Splits, StateKind, join, select

from .remembering import Remembering


class SegmentedState(NamedTuple):
    """memory: after the last whole segment. tokens [B, L − 1] and begun [B] int64: the tokens since then."""

    memory: TokenState
    tokens: Tensor
    begun: Tensor


class Segmented(nn.Module):
    """`logits, state = segmented(x, state=None, mask=None)`: `mnemos.remember` over segments of L tokens.

    A row's tokens are divided into segments of L, wherever calls are cut: [M_{t−1} ; s_t ; M_{t−1}] → M_t is computed
    when a segment is whole, and tokens of an unfinished one read M_{t−1}. x [B, T] int64; logits [B, T, V] predict the
    token after x[:, i]. mask [B, T] bool, in new rows only: padding on the right, in segments of columns.
    The state is a `SegmentedState` of constant size. Rows may have read different numbers of tokens.
    Cost: that of `Remembering` for every segment. A call reads the unfinished segment again, so a token that is
    generated costs up to L + m tokens of the decoder.
    Raises InputError for a segment that is not at least 1, and as `Remembering` does.
    """

    splits: Splits = "anywhere"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    autoregressive = True

    def __init__(self, remembering: Remembering, segment: int) -> None:
        super().__init__()
        if not isinstance(segment, int) or segment < 1:
            raise InputError(f"segment: expected at least 1 token, found {segment!r}; change it")
        self.remembering, self.segment = remembering, segment
        self.training = remembering.training  # of the wrapper alone: the decoder keeps its mode

    @property
    def embedding(self) -> nn.Module:
        """The decoder's embedding."""
        return self.remembering.parts[0]

    @property
    def head(self) -> nn.Module:
        """The decoder's head, which is called once for all tokens of a call; see `Remembering.logits`."""
        return self.remembering.parts[2]

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> SegmentedState:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        memory = self.remembering.initial_state(batch_size, device, dtype)
        count = torch.zeros_like(memory.writes)
        return SegmentedState(memory, count.new_zeros(batch_size, self.segment - 1), count)

    def forward(
        self, x: Tensor, state: SegmentedState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, SegmentedState]:
        """See the class."""
        fresh = state is None
        if state is None:
            state = self.initial_state(len(x))
        if not isinstance(state, SegmentedState) or state.tokens.shape != (len(x), self.segment - 1):
            found = tuple(state.tokens.shape) if isinstance(state, SegmentedState) else type(state).__name__
            raise InputError(
                f"expected the state that this model returned, of rows and tokens {(len(x), self.segment - 1)}, found "
                f"{found}; start with None"
            )
        if mask is not None:
            if not fresh:
                raise InputError("mask: expected none where rows go on, found one; read rows without their padding")
            return self._padded(x, state, mask)
        counts = state.begun.unique().tolist()
        if len(counts) == 1:
            hidden, state = self._segments(x, state, counts[0])
            return self.remembering.logits(hidden), state
        parts = []
        for count in counts:
            rows = (state.begun == count).nonzero()[:, 0]
            parts.append((rows, *self._segments(x[rows], select(state, rows), count)))
        back = torch.cat([rows for rows, _, _ in parts]).argsort()
        hidden = torch.cat([found for _, found, _ in parts])[back]
        return self.remembering.logits(hidden), select(join([after for _, _, after in parts]), back)

    if TYPE_CHECKING:
        __call__ = forward

    def _segments(self, x: Tensor, state: SegmentedState, count: int) -> tuple[Tensor, SegmentedState]:
        """Hidden states [B, T, D] of rows that all have `count` tokens of an unfinished segment."""
        memory, begun, found, i = state.memory, state.tokens[:, :count], [], 0
        while i < x.shape[1]:
            before = begun.shape[1]
            begun = torch.cat([begun, x[:, i : i + self.segment - before]], 1)
            i += begun.shape[1] - before
            if begun.shape[1] == self.segment:
                hidden, memory = self.remembering.hidden(begun, memory)
                begun = begun[:, :0]
            else:
                hidden, _ = self.remembering.hidden(begun, memory, writes=False)
            found.append(hidden[:, before:])
        n = begun.shape[1]
        kept = torch.zeros_like(state.tokens)
        kept[:, :n] = begun
        return torch.cat(found, 1), SegmentedState(memory, kept, torch.full_like(state.begun, n))

    def _padded(self, x: Tensor, state: SegmentedState, mask: Tensor) -> tuple[Tensor, SegmentedState]:
        memory, found = state.memory, []
        for tokens, valid in zip(x.split(self.segment, 1), mask.split(self.segment, 1), strict=True):
            hidden, memory = self.remembering.hidden(tokens, memory, valid)
            found.append(hidden)
        return self.remembering.logits(torch.cat(found, 1)), state._replace(memory=memory)
