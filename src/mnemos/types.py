"""The base of the library: states and what serves them, the protocols of layers and models, auxiliary losses, checks.

Axes, in the order they appear in shapes: B batch, T tokens, D width, H heads, M value width per head,
N sequence length, K memory slots, Tm and Dm length and width of a gated recurrent cache.

A memory is a *state*: a plain pytree of tensors that is passed in and returned, never mutated:

    y, state = layer(x, state)        # any length of x; state=None starts a new sequence

Two rules let one `select` and one `reset` serve every memory. The first axis of every leaf is the batch (what several
rows share is a `SharedRows`), and a row of zeros *is* a new row: a memory that starts elsewhere (a learned start, a
stored cache) keeps a count of the tokens seen and reads its start where that count is zero.

Two words of public names: a *cache* is a gated recurrent cache (the keys and values that Transformers calls a cache are
a state here); a *segment* is the run of tokens after which a memory is written, or which one step of a rollout reads.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

import torch
from torch import Tensor

from ._compat import pytree
from .errors import InputError as InputError
from .modes import reads_without_waiting

State: TypeAlias = Any  # a pytree (tuples, dicts, classes registered with torch) of [B, ...] tensors, or None
S = TypeVar("S")  # a state of any type: what goes in comes out
Output: TypeAlias = tuple[Tensor, State]
Device: TypeAlias = torch.device | str | int | None  # what torch takes as `device=`; None: torch's default
JSON: TypeAlias = Mapping[str, "JSON"] | Sequence["JSON"] | str | int | float | bool | None
JSONObject: TypeAlias = dict[str, Any]  # one read from a file: a value has no type until it is checked


# ---- states ----


class SharedRows:
    """Base of the parts of a state whose tensors hold one entry for several rows, such as the beams of a sentence.

    Their first axis is not the batch, so `select` calls `select_rows`, and `reset` and `join` first call `unshare`.
    The first tensor of a whole state must lead with the batch all the same: its length is the number of rows.
    """

    def select_rows(self, rows: "Rows") -> State:
        """The part for these rows. It copies nothing that the rows go on sharing."""
        raise NotImplementedError

    def unshare(self) -> State:
        """The same part as tensors that lead with the batch. Cost: a copy for each row."""
        raise NotImplementedError


class Rows:
    """The rows that `select` takes, as the tensor [R] of indices; `SharedRows` read them as a list, made once."""

    def __init__(self, index: Tensor) -> None:
        self.index = index
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by the tensor's id, with the tensor, which keeps its id

    def take(self, x: Tensor) -> Tensor:
        """The rows of x; the same tensor, which layers may share, is indexed once."""
        if id(x) not in self._copies:
            self._copies[id(x)] = x, x.index_select(0, self.index.to(x.device))
        return self._copies[id(x)][1]

    @cached_property
    def listed(self) -> list[int]:
        """The indices as numbers. A device has to wait for it."""
        numbers: list[int] = self.index.tolist()
        return numbers

    def groups(self, size: int) -> list[int] | None:
        """The group that each run of `size` rows comes from; None if a run mixes groups.

        Group g of the state is its rows g·size … (g + 1)·size − 1. A search, for one, takes the beams of a sentence
        from the beams of that sentence.
        """
        groups = [row // size for row in self.listed]
        first = groups[::size]
        whole = len(groups) % size == 0
        return first if whole and all(group == first[i // size] for i, group in enumerate(groups)) else None


def map_state(function: Callable[..., Tensor], state: S, *others: S) -> S:
    """Apply `function` to every tensor of a state (and to the same tensors of others of the same structure)."""

    def apply(leaf: Any, *rest: Any) -> Any:
        return function(leaf, *rest) if isinstance(leaf, Tensor) else leaf

    new: S = pytree.tree_map(apply, state, *others)
    return new


def leaves(state: object) -> list[Tensor]:
    """The tensors of a state, in a fixed order."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def select(state: S, rows: Tensor) -> S:
    """The state of the given batch rows: `rows` are indices [R] (a repeated index copies a row) or a mask [B].

    Cost: one copy of the selected rows. Raises InputError for rows that the state does not have.
    """
    batch = _batch(state, rows, "select")
    if rows.dtype == torch.bool:
        rows = rows.nonzero().squeeze(1)
    elif reads_without_waiting(rows) and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < batch:
        raise InputError(f"select: expected rows 0 to {batch - 1}, found {int(rows.min())} to {int(rows.max())}")
    return take_rows(state, Rows(rows))


def take_rows(state: S, rows: Rows) -> S:
    """`select` of rows that the state is known to have."""

    def take(part: Any) -> Any:
        if isinstance(part, SharedRows):
            return part.select_rows(rows)
        return rows.take(part) if isinstance(part, Tensor) else part

    taken: S = pytree.tree_map(take, state, is_leaf=_shares)
    return taken


def reset(state: S, rows: Tensor) -> S:
    """The state with the rows of the mask [B] (True) as new; the other rows keep their values and gradient.

    Raises InputError unless `rows` is a mask of the state's batch.
    """
    _batch(state, rows, "reset")
    if rows.dtype != torch.bool:
        raise InputError(f"reset: expected a mask [B] of booleans, found {rows.dtype}; build one with rows == value")

    def fresh(leaf: Tensor) -> Tensor:
        mask = rows.to(leaf.device).view(-1, *[1] * (leaf.dim() - 1))
        return torch.where(mask, torch.zeros((), dtype=leaf.dtype, device=leaf.device), leaf)

    cleared: S = map_state(fresh, unshare(state))
    # Keys and values that no row reads any more are dropped: else a state grows with every document.
    shorter: S = pytree.tree_map(lambda x: x.trimmed() if _can_trim(x) else x, cleared, is_leaf=_can_trim)
    return shorter


def join(states: Sequence[S]) -> S:
    """States of one structure as one batch: the rows of the first state, then those of the second, and so on.

    Where tensors hold different numbers of tokens (axis 1 of a key-value state), the shorter ones are padded with
    zeros in front, and the state's `valid` marks the padding as invalid. What is no tensor must be equal in all, and
    stays. Raises InputError for states of different structures or widths; it cannot tell tokens from other entries
    along axis 1, such as the layers of an `LSTMState`: join states of one model.
    """
    if not states:
        raise InputError("join: expected at least one state, found none")
    parts = [pytree.tree_flatten(unshare(state)) for state in states]
    structure = parts[0][1]
    if any(other != structure for _, other in parts):
        raise InputError("join: expected states of one structure, found different ones; join states of one model")

    def together(same: Sequence[Any]) -> Any:
        tensors = [x for x in same if isinstance(x, Tensor)]
        if not tensors and all(x == same[0] for x in same):
            return same[0]
        if len(tensors) != len(same):
            fix = "join states of one model"
            raise InputError(f"join: expected a tensor in every state, or in all the same value, found others; {fix}")
        if len({x.shape[1:] for x in tensors}) == 1:
            return torch.cat(tensors)
        if len({x.shape[2:] for x in tensors}) > 1 or min(x.dim() for x in tensors) < 2:
            shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
            raise InputError(f"join: expected tensors that differ only in rows and tokens, found {shapes}")
        longest = max(x.shape[1] for x in tensors)
        return torch.cat([torch.cat([x.new_zeros(len(x), longest - x.shape[1], *x.shape[2:]), x], 1) for x in tensors])

    columns = zip(*(tensors for tensors, _ in parts), strict=True)
    joined: S = pytree.tree_unflatten([together(same) for same in columns], structure)
    return joined


def read_by_count(counts: Tensor, read: Callable[[Tensor, int], S]) -> S:
    """What `read` returns of the rows (indices) that have each number of tokens, as one batch in the order of rows."""
    groups = [((counts == count).nonzero()[:, 0], count) for count in counts.unique().tolist()]
    back = torch.cat([rows for rows, _ in groups]).argsort()
    return select(join([read(rows, count) for rows, count in groups]), back)


def unshare(state: S) -> S:
    """The state with every tensor leading with the batch: what rows share is copied for each of them."""
    new: S = pytree.tree_map(lambda x: x.unshare() if isinstance(x, SharedRows) else x, state, is_leaf=_shares)
    return new


def detach(state: S) -> S:
    """The same values without the graph that computed them: this truncates back-propagation through time."""
    return map_state(Tensor.detach, state)


def _shares(part: object) -> bool:
    return isinstance(part, SharedRows)


def _can_trim(part: object) -> bool:
    return hasattr(part, "trimmed")


def _batch(state: object, rows: Tensor, verb: str) -> int:
    """The batch size B of a state, after a check that `rows` fit it."""
    if not isinstance(rows, Tensor) or rows.dim() != 1:
        raise InputError(f"{verb}: expected rows as a tensor of one dimension, found {rows!r}")
    tensors = leaves(state)
    batch = tensors[0].shape[0] if tensors else rows.shape[0]
    if rows.dtype == torch.bool and rows.shape[0] != batch:
        raise InputError(f"{verb}: expected a mask of {batch} rows, as the state has, found one of {rows.shape[0]}")
    return batch


# ---- what layers and models are and declare ----

# Where a sequence may be cut, so that the parts, resumed from the state, give what the whole gives: at any token; at no
# token, but the state goes on (the cuts are part of the computation); or there is no state to resume from.
Splits: TypeAlias = Literal["anywhere", "segments", "never"]
# Whether there is a state, and whether its size has a bound that no length of the sequence exceeds.
StateKind: TypeAlias = Literal["none", "constant", "growing"]


@runtime_checkable
class Recurrent(Protocol):
    """The least that carries a state: `y, state = layer(x, state, mask)` and the state of new rows."""

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> State:
        """The state of `batch_size` new rows; passing None to `forward` means the same. None: there is no state."""
        ...

    def forward(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output:
        """y for x [B, T, ...] and the new state. mask [B, T] bool, True = valid. The given state is not changed."""
        ...

    def __call__(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output: ...


@runtime_checkable
class Declared(Recurrent, Protocol):
    """What attentions and models declare of their state, so that no caller needs to know their class.

    The contracts test (tests/test_contracts.py) compares every declaration of a registered class with what it does.
    Some have more, each by a name that its caller asks for: `branch(state, copies)`, the state of `copies` rows for
    every row, next to each other, without a copy of the tokens they share; `pad_to_capacity(state)`, the state with
    what has a bound, such as the keys of a window, as long as it becomes, as exported programs need it;
    `draw_weights()`, a published start of the weights, which a model's initialisation leaves to the layer. A part
    of a state that is a memory by itself has a `memory_name`, by which reports call it; None where the rest of the
    state gives its meaning.
    """

    @property
    def splits(self) -> Splits: ...  # where a sequence may be cut and resumed

    @property
    def state_kind(self) -> StateKind: ...  # "constant": of bounded size; "growing" with every token

    @property
    def rows_independent(self) -> bool: ...  # a row's output in training depends on no other row of the batch

    @property
    def state_gradient(self) -> bool: ...  # gradient flows through the incoming and the outgoing state


@runtime_checkable
class Attention(Declared, Protocol):
    """An attention layer, x [B, T, dim] -> y [B, T, dim]: what `AttentionConfig.build` returns.

    It may declare more: `future_free = False` where later tokens, which it never reads, decide which earlier tokens it
    reads (`ReformerAttention`); `padding_free = False` where the length with its padding does (`BlockSparseAttention`).
    What the padding holds changes no valid output of any attention.
    """

    dim: int
    num_heads: int
    causal: bool  # whether a token attends only to itself and earlier tokens


@runtime_checkable
class HeadAttention(Attention, Protocol):
    """An attention that can carry a gated cache inside: its heads can be mixed before they are projected."""

    def heads(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> Output:
        """The heads before projection, [B, T, H, D/H], and the new state."""
        ...

    def project(self, heads: Tensor) -> Tensor:
        """[B, T, H, D/H] -> [B, T, D]: `forward` is this, applied to `heads`."""
        ...


@runtime_checkable
class RecurrentModel(Declared, Protocol):
    """A whole model, from tokens, images or frames to outputs: what `ModelConfig.build` returns.

    One with `picks_positions = True` computes the outputs of some positions alone: `forward(x, state, mask, only=)`,
    only [B, T] bool, gives outputs [N, ...], one for each position that `only` picks, in the order of rows.
    """

    @property
    def autoregressive(self) -> bool: ...  # outputs[:, i] predict the token after x[:, i]: what a Stream needs


@runtime_checkable
class Advances(Protocol):
    """A model that can compute its next state without its outputs, at less cost than `forward`.

    The state, and the random numbers drawn for it, are those of `forward`.
    """

    def advance(self, x: Tensor, state: State = None, mask: Tensor | None = None) -> State: ...


class Likelihood(Protocol):
    """How to score the outputs of a model where they are not logits.

    A Stream draws tokens by one of two more methods: `log_prob(outputs)`, log-probabilities [.., V] of outputs [.., D],
    or, without probabilities of every token, `draw(outputs, temperature, top_k, top_p, generator)`, tokens [B] int64 of
    outputs [B, V], which raises InputError for settings that do not apply.
    """

    def loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """The sum of −log p(target) over the counted targets, in nats: a scalar. mask [B, T]: that of the inputs."""
        ...

    def right(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(right predictions, counted targets), two scalars. What counts as right is the likelihood's to define."""
        ...


def likelihood_of(model: object) -> Any:
    """The `Likelihood` of a model, which may be a submodule; None if it has none: its outputs are logits."""
    # Not by a protocol: from Python 3.12 on, isinstance() finds no submodule.
    return getattr(model, "likelihood", None)


def is_padding_free(attention: Attention) -> bool:
    """Whether the outputs of valid tokens are independent of the number of padded tokens after them."""
    return bool(getattr(attention, "padding_free", True))


def combined_splits(parts: Iterable[Splits]) -> Splits:
    """Where a stack of layers may be cut: anywhere if every layer may; "segments" if not, but one has a state."""
    every = set(parts)
    return "anywhere" if every == {"anywhere"} else "segments" if every - {"never"} else "never"


def combined_state_kind(parts: Iterable[StateKind]) -> StateKind:
    """The state of a stack of layers: it grows where one grows, and there is none where there is none in any layer."""
    every = set(parts)
    return "growing" if "growing" in every else "constant" if "constant" in every else "none"


# ---- auxiliary losses ----

_Chain: TypeAlias = tuple[Tensor, "_Chain | None"]


class AuxiliaryLosses(Sequence[Tensor]):
    """The auxiliary losses added while a `collect_auxiliary_losses` context was the innermost: a read-only list."""

    # A chain of pairs and not a list: torch.compile guards on the length of a list that it appends to, and would
    # compile a layer again for each place that the layer has in a model.
    _chain: "_Chain | None" = None

    def __iter__(self) -> Iterator[Tensor]:
        losses, rest = [], self._chain
        while rest is not None:
            loss, rest = rest
            losses.append(loss)
        return reversed(losses)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return list(self)[index]


class _Innermost(threading.local):
    collector: AuxiliaryLosses | None = None


_innermost = _Innermost()


def add_auxiliary_loss(loss: Tensor) -> None:
    """Add a scalar `loss` to the training loss of the forward that is running.

    For a layer that trains a part of itself by a loss of its own (a reconstruction, a load balance): the layer calls
    this in `forward`, and its signature stays `y, state = layer(x, state)`. The innermost `collect_auxiliary_losses`
    of this thread receives the loss; without one it is dropped. The trainer and `mnemos.replay` collect. A layer
    should compute the loss only in training mode, and whether or not it is collected, because activation
    checkpointing must run the same operations twice. Its recomputation runs in the backward pass, outside the
    collector, so the loss counts once; use `use_reentrant=False`, as the other kind runs its counted forward without
    gradient. torch.compile traces this function without a graph break.

    Raises InputError unless `loss` is one number of a floating type.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = describe(loss)
        raise InputError(f"add_auxiliary_loss: expected a scalar tensor of floats, found {found}; add its mean or sum")
    collector = _innermost.collector
    if collector is not None:
        collector._chain = (loss.reshape(()), collector._chain)


@contextlib.contextmanager
def collect_auxiliary_losses() -> Iterator[AuxiliaryLosses]:
    """Collect the auxiliary losses that layers add inside the context, in the order in which they add them.

        with collect_auxiliary_losses() as auxiliary:
            y, state = model(x)
        (task_loss(y) + sum(auxiliary)).backward()

    The sequence can be read inside the context and after it. Contexts nest: the innermost one takes a loss, and outer
    ones do not see it. Each thread has its own. Call `backward` outside, so that activation checkpointing's
    recomputation is not collected again.
    """
    outer, collector = _innermost.collector, AuxiliaryLosses()
    _innermost.collector = collector
    try:
        yield collector
    finally:
        _innermost.collector = outer


# ---- checks of what a layer or model is given ----


def check_heads(dim: int, num_heads: int) -> None:
    """Raise InputError unless `num_heads` divides `dim`."""
    if num_heads < 1 or dim < 1 or dim % num_heads:
        near = [h for h in range(1, min(dim, 256) + 1) if dim % h == 0]  # more would be no hint, and take hours
        hint = f"; num_heads may be {', '.join(map(str, near))}" if near else ""
        raise InputError(f"dim must be divisible by num_heads, found dim {dim} and num_heads {num_heads}{hint}")


def check_input(x: Tensor, dim: int) -> None:
    """Raise InputError unless x is [B, T, dim] of floats; T may be 0."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != dim or not x.is_floating_point():
        raise InputError(f"expected x [B, T, {dim}] of floats, found {describe(x)}")


def check_stateful(state_kind: StateKind, state: object) -> None:
    """Raise InputError for a state that is given to a layer or model that has none and would not read it."""
    if state is not None and state_kind == "none":
        raise InputError(
            f"expected no state, because none is kept between calls here, found {type(state).__name__}; pass "
            "state=None, or build it with causal=True"
        )


def check_vectors(x: Tensor, width: int, mask: Tensor | None) -> None:
    """Raise InputError unless x is [B, T, width] of floats, T at least 1, and the mask, if any, bool [B, T]."""
    check_input(x, width)
    if not x.shape[1]:
        raise InputError(f"expected x [B, T, {width}] with T at least 1, found {tuple(x.shape)}")
    check_mask(mask, x.shape[:2])


def check_token_ids(x: Tensor, size: int, mask: Tensor | None, fix: str = "raise vocab_size") -> None:
    """Raise InputError unless x [B, T] holds token ids below size and the mask, if any, is bool of its shape.

    fix: what the error for an id that is too large or negative says to do.
    """
    if not isinstance(x, Tensor):
        raise InputError(f"expected a tensor of token ids [B, T], found {type(x).__name__}; use torch.as_tensor")
    if x.dim() != 2 or x.dtype not in (torch.int64, torch.int32) or not x.numel():  # those that an embedding takes
        raise InputError(
            f"expected token ids [B, T] of integers, int64 (.long()) or int32, B and T at least 1, found {describe(x)}"
        )
    check_mask(mask, x.shape)
    if reads_without_waiting(x):  # elsewhere the embedding's own check has to suffice
        low, high = torch.aminmax(x)
        if low < 0 or high >= size:
            raise InputError(f"token ids: expected 0 to {size - 1}, found {int(low)} to {int(high)}; {fix}")


def check_mask(mask: Tensor | None, shape: Sequence[int]) -> None:
    """Raise InputError for a mask that is not boolean or has another shape; None is no mask."""
    if mask is not None and (mask.shape != torch.Size(shape) or mask.dtype != torch.bool):
        found = f"{mask.dtype} {tuple(mask.shape)}{'' if mask.dtype == torch.bool else '; use .bool()'}"
        raise InputError(f"expected a mask of booleans {tuple(shape)}, True = valid; found {found}")


def describe(x: object) -> str:
    """A tensor by type and shape, for an error; anything else by its class."""
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
