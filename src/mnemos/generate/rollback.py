"""Going back within the tokens that a model has just read: the exact state of an accepted prefix, for any state."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import pytree
from mnemos.memory.key_values import KeyValues
from mnemos.ops import rewindable
from mnemos.ops.rewind import Calls
from mnemos.types import Advances, InputError, State, join, select

from .decoder_step import DecodeStep


def check_cuts(model: nn.Module, verb: str) -> None:
    """Raise InputError for a model whose outputs depend on which tokens a call reads together."""
    if (splits := getattr(model, "splits", "anywhere")) != "anywhere":
        raise InputError(
            f"{verb}: expected a model whose sequences may be cut at any token, found {type(model).__name__} with "
            f"splits={splits!r}, in which a token read alone has other outputs than one read among others; use "
            "another memory (relative attention: same_length=True)"
        )


class Rollback:
    """A model and the state of R rows, which can go back to any token of the last call, in each row to its own.

        reading = Rollback(stream.model, stream.step, stream.state, limit=8)
        outputs = reading.read(x)                 # x [R, T]: outputs [R, T, ·]
        reading.keep([3, 1])                      # as if row 0 had read x[0, :3] only, and row 1 x[1, :1]

    What `keep` does, the first that applies:

    1. all tokens are kept: the state that the call returned. No cost.
    2. every part of the memory can go back by itself. Keys and values: those of the kept tokens are cut out, in O(1) if
       all rows keep equally many and there is no window, else with a copy. The states of `delta_rule`,
       `decayed_attention` and `linear_attention`: these operators alone read the kept tokens again, from the inputs
       that the call had (`mnemos.ops.rewindable`).
    3. all rows keep equally many: the state before the call stays, and the next call begins with the kept tokens
       again, up to `limit` of them. No call more, but a longer one.
    4. rows keep different numbers, or there are more than `limit` tokens: they are read again from the state before, in
       a call for each number.

    limit: the most tokens that wait to be read again. calls, again: the calls of the model, and those of case 4.
    """

    def __init__(self, model: nn.Module, step: DecodeStep, state: State, limit: int) -> None:
        self.model, self.step, self.state, self.limit = model, step, state, limit
        self.calls = self.again = 0
        self._waiting: Tensor | None = None  # [R, p]: tokens after `state`
        # Of the last call: its tokens, the state after them, and its operators.
        self._last: tuple[Tensor, State, Calls] | None = None

    def read(self, x: Tensor) -> Tensor:
        """The outputs [R, T, ·] of the tokens x [R, T]."""
        tokens = x if self._waiting is None else torch.cat([self._waiting, x], 1)
        with rewindable() as operators:
            outputs, after = (self.step if tokens.shape[1] == 1 else self.model)(tokens, self.state)
        self.calls += 1
        self._last = tokens, after, operators
        return outputs[:, tokens.shape[1] - x.shape[1] :]

    def keep(self, kept: Sequence[int]) -> None:
        """Go back to the state after the first `kept[r]` tokens, 0 to T, of the last call's x in every row r."""
        assert self._last is not None
        (tokens, after, operators), waited = self._last, 0 if self._waiting is None else self._waiting.shape[1]
        self._last = self._waiting = None
        read, counts = tokens.shape[1], [waited + n for n in kept]
        if all(n == read for n in counts):
            self.state = after
        elif (cut := without_last(self.state, after, counts, read, operators)) is not None:
            self.state = cut
        elif len(set(counts)) == 1 and counts[0] <= self.limit:
            self._waiting = tokens[:, : counts[0]] if counts[0] else None
        else:
            self.state = self._read_again(tokens, after, counts)

    def finish(self) -> State:
        """The state after all tokens that were kept. Cost: a call if some wait to be read again."""
        if self._waiting is not None:
            self.state, self._waiting = self._advance(self._waiting, self.state), None
        return self.state

    def select(self, rows: Tensor) -> None:
        """Go on with some rows only: indices [R]."""
        self.state = select(self.state, rows)
        self._waiting = None if self._waiting is None else self._waiting[rows]

    def _read_again(self, tokens: Tensor, after: State, counts: list[int]) -> State:
        parts = []
        for n in sorted(set(counts)):
            rows = [row for row, count in enumerate(counts) if count == n]
            index = torch.tensor(rows, device=tokens.device)
            if n == tokens.shape[1]:
                parts.append((rows, select(after, index)))
            else:
                state = self.state if len(rows) == len(counts) else select(self.state, index)
                parts.append((rows, self._advance(tokens[index, :n], state) if n else state))
        return merge_rows(parts)

    def _advance(self, x: Tensor, state: State) -> State:
        self.calls, self.again = self.calls + 1, self.again + 1
        if x.shape[1] > 1 and isinstance(self.model, Advances):
            return self.model.advance(x, state)
        return (self.step if x.shape[1] == 1 else self.model)(x, state)[1]


def merge_rows(parts: Sequence[tuple[Sequence[int], State]]) -> State:
    """The rows of several states as one state. parts: the number of each of a state's rows, 0 to R − 1, and the state.

    Keys and values that no row has any more are left out. Cost: a copy of each state.
    """
    numbers = torch.tensor([row for rows, _ in parts for row in rows])
    if len(parts) == 1:
        state = parts[0][1]
        return state if bool((numbers.diff() > 0).all()) else select(state, numbers.argsort())
    return _shorten(select(join([state for _, state in parts]), numbers.argsort()))


def without_last(
    before: State, after: State, kept: Sequence[int], read: int, operators: Calls | None = None
) -> State | None:
    """The state after the first `kept[r]` of the `read` tokens between two states, or None if it cannot be had so.

    It can if the state is made of `KeyValues`, of counts [R] of the tokens read, and of states that `operators`, those
    of the call between the two, can go back to. Keys and values of tokens that are not kept may be overwritten: `after`
    must not be used again.
    """
    old, structure = pytree.tree_flatten(before, is_leaf=_are_keys)
    new, same = pytree.tree_flatten(after, is_leaf=_are_keys)
    if structure != same:
        return None
    rewound = [i for i, part in enumerate(new) if operators is not None and operators.knows(part, read)]
    others = sorted({*range(len(new))} - {*rewound})
    if not all(_cuttable(old[i], new[i], read) for i in others):
        return None
    found = {i: _cut(old[i], new[i], kept, read) for i in others}
    if operators is not None:
        found |= zip(rewound, operators.rewind([new[i] for i in rewound], kept), strict=True)
    return pytree.tree_unflatten([found[i] for i in range(len(new))], structure)


def holds_keys(state: State) -> bool:
    """Whether keys and values are a part of the state."""
    return any(map(_are_keys, pytree.tree_leaves(state, is_leaf=_are_keys)))


def _are_keys(part: object) -> bool:
    return isinstance(part, KeyValues)


def _cuttable(before: Any, after: Any, read: int) -> bool:
    if isinstance(before, KeyValues):
        return isinstance(after, KeyValues) and after.k.shape[1] >= read
    if not isinstance(before, Tensor):
        return bool(before == after)
    counts = before.dtype == torch.int64 and before.dim() == 1 and before.shape == after.shape
    return counts and bool((after - before == read).all())


def _cut(before: Any, after: Any, kept: Sequence[int], read: int) -> Any:
    if not isinstance(before, KeyValues):
        return before if before is None else before + torch.tensor(kept, device=before.device)
    n, whole = before.k.shape[1], after.k.shape[1]
    if len(set(kept)) == 1 and whole == n + read:
        return after.without_last(read - kept[0])
    counts = torch.tensor(kept, device=before.k.device)
    width = min(n + max(kept), whole)  # a window holds `whole` tokens
    place = (n + counts)[:, None] - width + torch.arange(width, device=counts.device)

    def align(x: Tensor, y: Tensor) -> Tensor:
        """The tokens of every row up to its last one, at the end of the axis."""
        joined, index = torch.cat([x, y[:, whole - read :]], 1), place.clamp(min=0)
        return joined.gather(1, index.view(*index.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))

    valid = align(before.valid, after.valid) & (place >= 0)
    return _shorten_keys(KeyValues(align(before.k, after.k), align(before.v, after.v), valid, before.seen + counts))


def _shorten(state: State) -> State:
    return pytree.tree_map(lambda x: _shorten_keys(x) if _are_keys(x) else x, state, is_leaf=_are_keys)


def _shorten_keys(part: KeyValues) -> KeyValues:
    """Without what is before the first token of every row."""
    return part.last(int(part.seen.max()))
