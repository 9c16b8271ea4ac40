"""Going back within a call of a recurrent operator, to the state after any of its tokens, without the model.

A state S₀ and the inputs of the tokens after it determine all states since, each row's by itself:

    S_h = e^{G_h} S₀ + Σ_{j ≤ h} e^{G_h − G_j} k_j u_jᵀ        G_h = Σ_{j ≤ h} g_j

So nothing is copied while tokens are read: the inputs are kept as they are, and the operator runs once more over those
of the tokens that remain. In place of u its v and β are kept, as the operator computes u from the state as it goes.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mnemos._compat import pytree
from mnemos.types import InputError, S

Recompute = Callable[[int, Tensor | None], Sequence[Tensor]]


class _Call(NamedTuple):
    ends: Sequence[Tensor]  # held, so that their ids are not used again
    tokens: int
    recompute: Recompute


class Calls:
    """The calls of operators inside a `rewindable` context, by the states that they returned."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[_Call, int]] = {}

    def add(self, ends: Sequence[Tensor], tokens: int, recompute: Recompute) -> None:
        """Keep a call of so many tokens that returned the states `ends`. recompute: see `record_call`."""
        call = _Call(ends, tokens, recompute)
        self._of.update({id(end): (call, i) for i, end in enumerate(ends)})

    def clear(self) -> None:
        """Forget all calls."""
        self._of.clear()

    def add_view(self, view: Tensor, end: Tensor, of: Callable[[Tensor], Tensor]) -> None:
        """See `record_view`."""
        if id(end) in self._of:
            call, i = self._of[id(end)]
            self.add((view,), call.tokens, lambda n, valid: (of(call.recompute(n, valid)[i]),))

    def knows(self, end: object, tokens: int) -> bool:
        """Whether the tensor is itself the state that one of the calls returned, and the call had so many tokens."""
        entry = self._of.get(id(end))
        return entry is not None and entry[0].tokens == tokens

    def rewind(self, state: S, kept: Sequence[int]) -> S:
        """The state after the first `kept[r]` tokens, 0 to T, of each row r, in place of all T tokens of the call.

        state: a pytree of tensors, all returned by operators inside the context; None in it stays None. A count of
        tokens that a layer keeps beside them is not an operator's: set it yourself.
        Gradients flow as through the call.
        Cost: one call of each operator, of max(kept) tokens. Equal to a call of the kept tokens alone; bit for bit
        where the operator computes both numbers of tokens in the same order.
        Raises InputError for tensors that no operator returned, and for a number that is not whole, below 0 or above T.
        """
        if not isinstance(kept, Sequence) or not all(isinstance(n, int) for n in kept):
            raise InputError(
                f"rewind: expected a whole number of tokens to keep for each row, found {kept}; use [n] * rows"
            )
        parts, structure = pytree.tree_flatten(state)
        ends = [x for x in parts if x is not None]
        lacking = [x for x in ends if id(x) not in self._of]
        if lacking:
            what = f"another tensor {tuple(lacking[0].shape)}" if isinstance(lacking[0], Tensor) else repr(lacking[0])
            raise InputError(
                f"rewind: expected states that operators returned inside the context, found {what}; read the kept "
                "tokens again"
            )
        most, earlier = max(kept, default=0), []
        computed: dict[int, Sequence[Tensor]] = {}
        for end in ends:
            call, number = self._of[id(end)]
            if len(end) != len(kept) or not 0 <= min(kept, default=0) <= most <= call.tokens:
                raise InputError(
                    f"rewind: expected for each of {len(end)} rows 0 to {call.tokens} tokens to keep, found {kept}; "
                    "change them"
                )
            if id(call) not in computed:
                valid = None  # all
                if min(kept, default=most) != most:
                    counts = torch.tensor(kept, device=end.device)
                    valid = torch.arange(most, device=end.device) < counts[:, None]
                computed[id(call)] = call.recompute(most, valid)
            earlier.append(computed[id(call)][number])
        rest = iter(earlier)
        result: S = pytree.tree_unflatten([None if x is None else next(rest) for x in parts], structure)
        return result


class _Innermost(threading.local):
    calls: Calls | None = None


_innermost = _Innermost()


@contextlib.contextmanager
def rewindable() -> Iterator[Calls]:
    """Inside, the recurrent operators keep their inputs.

    They are `delta_rule`, `decayed_attention`, causal `linear_attention`, `selective_scan` and `short_convolution`.

    Then their states can go back:

        with mnemos.ops.rewindable() as calls:
            y, end = mnemos.ops.delta_rule(q, k, v, beta, decay, start)      # T tokens
        earlier = calls.rewind(end, [3, 0])       # as if row 0 had read its first 3 tokens only, and row 1 none

    This works through any number of layers: `calls` knows the state of each by the tensor itself. The inputs are kept
    as long as `calls`, not copied: do not write into them before `rewind`. The innermost context of a thread counts.
    Calls in a compiled graph are not kept.
    """
    outer, calls = _innermost.calls, Calls()
    _innermost.calls = calls
    try:
        yield calls
    finally:
        _innermost.calls = outer


def record_call(ends: Sequence[Tensor], tokens: int, recompute: Recompute) -> None:
    """An operator says here that a call of so many tokens [B, tokens, ..] returned the states `ends`.

    recompute(n, valid): the states after the first n tokens instead; valid [B, n] bool: those that count, None: all.
    """
    if not torch.compiler.is_compiling() and (calls := _innermost.calls) is not None:
        calls.add(ends, tokens, recompute)


def record_view(view: Tensor, end: Tensor, of: Callable[[Tensor], Tensor]) -> None:
    """A caller of an operator says here that it goes on with view = of(end) in place of the state `end`."""
    if not torch.compiler.is_compiling() and (calls := _innermost.calls) is not None:
        calls.add_view(view, end, of)


def first_tokens(
    n: int, valid: Tensor | None, mask: Tensor | None, resets: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mask and the resets of the first n tokens, of which `valid` [B, n] count, for `recompute`."""
    mask = valid if mask is None else mask[:, :n] if valid is None else mask[:, :n] & valid
    if resets is not None:
        resets = resets[:, :n] if valid is None else resets[:, :n] & valid  # one before an invalid token counts too
    return mask, resets
