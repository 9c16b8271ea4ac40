"""The cache that `generate` of Transformers carries for a model of this library: its state, and the way back."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mnemos import libraries
from mnemos.types import InputError, State, leaves, select

libraries.transformers()  # first: it repairs an installation whose torchvision was built for another PyTorch
from transformers.cache_utils import Cache  # noqa: E402

CACHE = libraries.cache_name()  # of the installed version: the argument of `generate`, and the field of outputs


class Read(NamedTuple):
    """One call: tokens [B, T] with their mask [B, T] (None: all are valid), and the state and length before it."""

    state: State
    length: int
    tokens: Tensor
    mask: Tensor | None


class StateCache(Cache):
    """A model's state as the cache of Transformers.

        cache = StateCache()
        model.generate(ids, cache=cache)                         # the cache now holds what the model has read
        model.generate(longer, cache=cache)                      # goes on: only the new tokens are read

    state: of the model after `length` tokens of each row, padding included; None before the first call. As in
    Transformers, a call changes the cache it is given; the state in it is a value and is never changed, so `fork` (and
    `copy.copy`, `copy.deepcopy`) make an independent cache at no cost.

    `crop(-n)` takes n tokens back, which `generate` needs to reject a draft, of those that were read since
    `activate_past_recording` (`generate` calls it): the cache then keeps the tokens and about log₂(length) earlier
    states, at distances that double. Tokens that remain after such a state are read once more, before those of the next
    call: at most as many as were taken back. The results are those of a sequence that never had the others.
    """

    def __init__(self, state: State = None, length: int = 0) -> None:
        super().__init__(layers=[])
        self.state, self.length = state, length
        self.recording = False
        self.reads: list[Read] = []  # the last one ends where `state` is
        self.unread: tuple[Tensor, Tensor | None] | None = None  # tokens before `length` that `state` has not read
        self._is_user_defined = False  # `generate` sets it
        self.step: Any = None  # the model's step for single tokens, made once per cache

    def with_unread(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What a call has to read for more tokens [B, T]: these, behind those before `length` that are unread."""
        return (tokens, mask) if self.unread is None else _joined(self.unread, (tokens, mask))

    def read(self, tokens: Tensor, mask: Tensor | None, state: State) -> None:
        """Go on to the state after more tokens [B, T], with those that were unread; mask [B, T]: theirs."""
        start = self.length - (0 if self.unread is None else self.unread[0].shape[1])
        if self.recording:
            self.reads.append(Read(self.state, start, tokens, mask))
            # Keep states at distances from the end that double: two calls become one if both are far from it.
            age, i = 0, len(self.reads) - 1
            while i > 0:
                older, newer = self.reads[i - 1], self.reads[i]
                if older.tokens.shape[1] + newer.tokens.shape[1] <= age:
                    both = _joined(older[2:], newer[2:])
                    self.reads[i - 1 : i + 1] = [Read(older.state, older.length, *both)]
                else:
                    age += newer.tokens.shape[1]
                i -= 1
        self.state, self.length, self.unread = state, start + tokens.shape[1], None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back −tokens_to_remove tokens of every row; 0 does nothing. Raises InputError for a positive number."""
        if tokens_to_remove > 0:
            raise InputError(f"crop: expected a negative number of tokens, found {tokens_to_remove}; change its sign")
        if not tokens_to_remove:
            return
        end = self.length + tokens_to_remove
        reads = self.reads.copy()
        if self.unread is not None:  # taken back twice, with no call in between
            reads.append(Read(self.state, self.length - self.unread[0].shape[1], *self.unread))
        first = reads[0].length if reads else self.length
        if end < first:
            raise InputError(
                f"crop: expected to keep at least the {first} tokens before those that were recorded, found {end}; "
                "call activate_past_recording() before the model reads what may be taken back"
            )
        while (last := reads.pop()).length > end:
            pass
        count, mask, self.reads = end - last.length, last.mask, reads
        self.unread = (last.tokens[:, :count], None if mask is None else mask[:, :count]) if count else None
        self.state, self.length = last.state, end

    def activate_past_recording(self) -> None:
        self.recording = True

    def reset(self) -> None:
        self.state, self.length, self.unread, self.reads = None, 0, None, []

    def fork(self) -> "StateCache":
        """Another cache with the same state. Cost: none, as states are values."""
        cache = StateCache(self.state, self.length)
        cache.recording, cache.reads, cache.unread = self.recording, list(self.reads), self.unread
        return cache

    __copy__ = fork

    def __deepcopy__(self, memo: dict[int, Any]) -> "StateCache":
        return self.fork()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows [R] of indices in place of the present ones, as a search for beams does."""

        def rows(x: Any) -> Any:
            return x if x is None or not leaves(x) else select(x, beam_idx.to(leaves(x)[0].device))

        self.state = rows(self.state)
        self.reads = [Read(rows(r.state), r.length, rows(r.tokens), rows(r.mask)) for r in self.reads]
        if self.unread is not None:
            self.unread = rows(self.unread[0]), rows(self.unread[1])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens of each row that were read, padding included."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

    @property
    def batch_size(self) -> int:
        """The number of rows; -1 before the first call."""
        tensors = leaves(self.state) or leaves(self.unread)  # the state before the first call is None
        return len(tensors[0]) if tensors else -1

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_linear(self) -> list[bool]:
        """[False]: `generate` then asks for the length, to pass the new tokens alone."""
        return [False]

    @property
    def is_initialized(self) -> bool:
        return self.length > 0

    @property
    def is_croppable(self) -> bool:
        return self.recording

    def update(self, *given: Any, **named: Any) -> Any:
        raise InputError(
            "expected a model of this library, found one that stores keys and values; give it a DynamicCache"
        )

    def __repr__(self) -> str:
        return f"StateCache(length={self.length}, rows={max(self.batch_size, 0)})"


def _joined(first: tuple[Tensor, Tensor | None], second: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """Tokens and their masks, one after the other."""
    parts, valid = (first, second), None
    if first[1] is not None or second[1] is not None:
        masks = [torch.ones_like(x, dtype=torch.bool) if mask is None else mask for x, mask in parts]
        valid = torch.cat(masks, 1)
    return torch.cat([x for x, _ in parts], 1), valid


def check_cache(cache: object, past_key_values: object) -> StateCache | None:
    """The `StateCache` that a call was given under either name, or None. Raises InputError for others, and for two."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise InputError("cache: expected one cache, found another as past_key_values=; pass one of them")
    passed = past_key_values if cache is None else cache
    if passed is None or isinstance(passed, StateCache):
        return passed
    raise InputError(
        f"cache: expected a StateCache, found {type(passed).__name__}; pass what this model returned, or nothing"
    )
