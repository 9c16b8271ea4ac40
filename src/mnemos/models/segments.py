"""Language models that read in segments, each with memory tokens in front, behind or both: what they share.

First the attention within a segment: who attends to whom, and what is cached. Then the model around it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable, pytree
from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.attention.softmax import attend, project_qkv
from mnemos.config import ModelConfig, check_fields
from mnemos.memory.grid import Stretch, stretches
from mnemos.memory.key_values import KeyValues, pad_front
from mnemos.modes import reads_without_waiting
from mnemos.ops.checks import check_dropout
from mnemos.ops.dropout import Dropout
from mnemos.ops.padding import Rows, count_seen
from mnemos.ops.rotary import Rotary
from mnemos.types import (
    Device,
    InputError,
    Likelihood,
    Splits,
    State,
    StateKind,
    check_heads,
    check_token_ids,
    leaves,
    map_state,
    select,
)

from .blocks import (
    Activation,
    Block,
    Norm,
    final_norm_of,
    init_weights,
    mlp_of,
    module_list,
    shrink_residuals,
    sinusoids,
)
from .fields import check_sizes
from .heads import language_head, likelihood_of_head, tie


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

    attend = staticmethod(attend)  # programs have another form of it

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

    def compute_heads(self, x: Tensor, state: Context | None, mask: Tensor | None) -> tuple[Tensor, Context | None]:
        """The heads before projection, [B, T, H, D/H], and the keys and values of x."""
        t = x.shape[1]
        q, k, v = project_qkv(self.qkv(x), self.num_heads, None if state is None else state.turn)
        state = Context(k[:, :0], v[:, :0]) if state is None else state
        p = self.dropout if self.training else 0.0
        keys, values = k, v
        if state.k.shape[1]:
            keys, values = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
        heads = self.attend(q, keys, values, state.visible, state.visible is None and t > 1, p)
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

    def with_pass(self, new: Context, layout: Layout, mask: Tensor | None = None) -> "SegmentCache":
        """With the keys and values of a pass's front, if it had one, and of its tokens; mask [B, tokens] bool."""
        f, end = layout.front, layout.front + layout.tokens
        cache = self._replace(front_k=new.k[:, :f], front_v=new.v[:, :f]) if f else self
        own = cache.own.append(new.k[:, f:end], new.v[:, f:end], mask)
        return cache._replace(own=own if mask is None else own.packed())

    def closed(self, place: list[int], done: list[bool]) -> "SegmentCache":
        """Without the tokens of the rows that are `done`, not all; `place`: how many tokens each row then has."""
        rows, own = torch.tensor(done, device=self.own.k.device), self.own.last(max(place))
        # Without the buffer, in which these tokens are valid.
        own = KeyValues(own.k, own.v, own.valid & ~rows[:, None], own.seen.masked_fill(rows, 0))
        return self._replace(own=own)

    def widened(self, front: int, length: int) -> "SegmentCache":
        """The same cache with space for `front` memory tokens and `length` tokens, which are not valid where new."""
        front_k, front_v = (pad_front(x, front) for x in (self.front_k, self.front_v))
        return SegmentCache(front_k, front_v, self.own.widened(length))


def visible(layout: Layout, causal: bool, kept: Tensor | None, valid: Tensor | None, device: Device) -> Tensor | None:
    """`Context.visible` of a pass after keys that are valid as `kept` [B, N] says (None: there are none).

    valid [B, tokens] bool: which of the pass's tokens are no padding; None: all. Every token attends to itself.
    """
    n = sum(layout)
    if kept is None and valid is None and layout.is_causal(causal):
        return None
    if n == 1 and kept is not None:
        # One token attends to every valid key. On the CPU, checking that all are valid does not wait for a device.
        if reads_without_waiting(kept) and bool(kept.all()):
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


@dataclass(frozen=True)
class SegmentConfig(ModelConfig):
    """The sizes that the models of memory tokens share. Their blocks are those of `mnemos.Transformer`."""

    classes: ClassVar[int] = 0  # it predicts the next token only
    vocab_size: int = 256
    dim: int = 128
    layers: int = 2
    num_heads: int = 4
    mlp: int = 352  # hidden width of the MLP; 0: blocks of attention alone
    segment: int = 64  # L, the number of tokens of a segment
    norm: Norm = "rms"
    position: Literal["sinusoidal", "learned", "rotary", "none"] = "rotary"  # within a segment
    activation: Activation = "swiglu"
    dropout: float = 0.0
    tied: bool = False  # the head shares the embedding's weights
    cutoffs: tuple[int, ...] = ()  # adaptive softmax with clusters from these tokens on; (): one softmax
    div_value: float = 1.0  # adaptive softmax, untied: cluster k is read through D/div_value^k channels


@exportable
class SegmentState(NamedTuple):
    """The place of each row in its sequence; a row of zeros is a new row.

    seen [B] int64: valid tokens since the row began. memory: what passes from segment to segment (see the model).
    layers: the blocks' keys and values within the segment, which are empty at its start; within a segment each layer
    has 2·D numbers for each memory token in front and each token so far.
    """

    seen: Tensor
    memory: State
    layers: tuple[SegmentCache, ...]


class SegmentModel(nn.Module):
    """A language model over segments with f memory tokens in front and b behind: the base of the three models.

    A subclass sets `front` and `back`, builds its memory in `_build_memory`, and defines `new_memory`, `front_tokens`,
    `back_tokens`, `recall` and `write_memory`. A segment is read as

        [front ; x_1 … x_L ; back]     positions 0 … f + L + b − 1

    in one pass if the call holds all of it; else the front is read with the first token, the back after the last one,
    and keys and values are cached in between, with the same results. Padding takes no place in a segment.
    """

    splits: Splits = "anywhere"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    autoregressive = True
    picks_positions = True
    config: SegmentConfig
    front = 0
    back = 0
    causal_memory = False

    def __init__(self, config: SegmentConfig) -> None:
        super().__init__()
        self.config = c = config
        _check(c)
        self._build_memory()
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        length = self.front + c.segment + self.back
        self.positions = nn.Embedding(length, c.dim) if c.position == "learned" else None
        self._table: Tensor | None = None  # of sinusoids or rotations, kept between calls
        self.dropout = Dropout(c.dropout)
        self.blocks = module_list(self._block() for _ in range(c.layers))
        self.final_norm = final_norm_of(c.norm, c.dim)
        self.head = language_head(self.embedding, c.tied, c.cutoffs, c.div_value)
        init_weights(self)
        if c.norm == "rms":
            shrink_residuals(self.blocks)
        if c.tied:
            tie(self.head, self.embedding)

    @property
    def likelihood(self) -> Likelihood | None:
        """Scores the hidden states [B, T, D], the outputs of an adaptive softmax; None if outputs are logits."""
        return likelihood_of_head(self.head)

    def _block(self) -> Block:
        c = self.config
        attention = SegmentAttention(c.dim, c.num_heads, c.dropout, c.position == "rotary")
        mlp = mlp_of(c.dim, c.mlp, c.activation, c.dropout) if c.mlp else None
        return Block(attention, mlp, c.dim, c.norm, c.dropout)

    def _build_memory(self) -> None:
        """Create the memory's modules, and set `front`, `back` and `causal_memory`."""
        raise NotImplementedError

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> State:
        """The memory of `batch_size` new rows; None: there is none."""
        raise NotImplementedError

    def front_tokens(self, memory: State, rows: int) -> Tensor:
        """The memory tokens in front of a segment, [rows, f, D]."""
        raise NotImplementedError

    def back_tokens(self, memory: State, rows: int) -> Tensor:
        """The memory tokens behind a segment, [rows, b, D]."""
        raise NotImplementedError

    def recall(self, memory: State, layer: int, x: Tensor) -> Tensor:
        """The inputs [B, n, D] of a layer with what the memory adds; by default as they are."""
        return x

    def write_memory(self, memory: State, outputs: list[Tensor], active: Tensor | None) -> State:
        """The memory after a segment, from each layer's outputs [B, b, D] behind it, in the rows that are `active`."""
        raise NotImplementedError

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> SegmentState:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        weight = self.embedding.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        seen = torch.zeros(batch_size, device=device, dtype=torch.int64)
        return SegmentState(
            seen, self.new_memory(batch_size, device, dtype), self.empty_caches(batch_size, device, dtype)
        )

    def empty_caches(self, batch_size: int, device: Device, dtype: torch.dtype) -> tuple[SegmentCache, ...]:
        """The caches of the blocks at the start of a segment."""
        heads = self.config.num_heads
        return tuple(
            SegmentCache.empty(batch_size, heads, self.config.dim // heads, device, dtype) for _ in self.blocks
        )

    def forward(
        self, x: Tensor, state: SegmentState | None = None, mask: Tensor | None = None, only: Tensor | None = None
    ) -> tuple[Tensor, SegmentState]:
        """x [B, T] int64 token ids, mask [B, T] bool, True = valid -> logits [B, T, V] and the new state.

        only [B, T] bool: the logits at these positions alone, [n, V].
        """
        y, state = self.read(x, state, mask)
        return self.head(self.final_norm(y if only is None else y[only])), state

    if TYPE_CHECKING:
        __call__ = forward

    def advance(self, x: Tensor, state: SegmentState | None = None, mask: Tensor | None = None) -> SegmentState:
        """The state that `forward` returns, without the logits: the last norm and the head do not run."""
        return self.read(x, state, mask)[1]

    def read(self, x: Tensor, state: SegmentState | None, mask: Tensor | None) -> tuple[Tensor, SegmentState]:
        """The last block's outputs [B, T, D] for the tokens, and the new state."""
        check_token_ids(x, self.config.vocab_size, mask)
        b, t = x.shape
        if state is None:
            state, seen = self.initial_state(b), [0] * b
        else:
            self._check_state(state, b)
            seen = state.seen.tolist()
        after = count_seen(x, state.seen, mask)
        rows = Rows.of(x, mask)  # segments count valid tokens
        length, memory, caches = self.config.segment, state.memory, state.layers
        place, whole, outputs = [n % length for n in seen], min(rows.counts) // length, []
        start = 0
        if not self.back and not any(place) and whole > 1:
            start, caches = whole * length, self.empty_caches(b, x.device, self.embedding.weight.dtype)
            outputs.append(self._side_by_side(rows.x[:, :start], memory))
        for stretch in stretches(place, [n - start for n in rows.counts], length):
            span = slice(start + stretch.start, start + stretch.stop)
            y, caches, memory = self._stretch(stretch, rows.x[:, span], rows.valid(span), caches, memory)
            outputs.append(y)
        if not outputs:  # padding alone
            return self.embedding(x) * 0, SegmentState(after, memory, caches)
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return rows.in_place(y, t), SegmentState(after, memory, caches)

    def widened(self, state: SegmentState) -> SegmentState:
        """The same state with its caches as long as they become, so that its size is constant; see `mnemos.export`."""
        length = self.config.segment - 1
        return state._replace(layers=tuple(cache.widened(self.front, length) for cache in state.layers))

    def _side_by_side(self, x: Tensor, memory: State) -> Tensor:
        """Whole segments [B, n·L] as rows of one batch, where no segment writes what the next one reads."""
        length, n = self.config.segment, x.shape[1] // self.config.segment
        rows = len(x) * n
        whole = Stretch(0, length, [0] * rows, [0] * rows, [True] * rows)
        memory = map_state(lambda leaf: leaf.repeat_interleave(n, 0), memory)
        caches = self.empty_caches(rows, x.device, self.embedding.weight.dtype)
        return self._stretch(whole, x.reshape(rows, length), None, caches, memory)[0].reshape(*x.shape, -1)

    def _stretch(
        self, stretch: Stretch, x: Tensor, mask: Tensor | None, caches: tuple[SegmentCache, ...], memory: State
    ) -> tuple[Tensor, tuple[SegmentCache, ...], State]:
        """Tokens [B, t] within one segment of each row: outputs, caches and memory after them."""
        rows, t = x.shape
        fresh, done = [place == 0 for place in stretch.place], stretch.done
        if all(fresh):
            caches = self.empty_caches(rows, x.device, self.embedding.weight.dtype)
        elif self.front and any(fresh):
            caches = self._read_front(caches, memory, _indices(fresh, x.device))
        layout = Layout(self.front if all(fresh) else 0, t, self.back if all(done) else 0)
        parts = [self.front_tokens(memory, rows)] if layout.front else []
        parts += [self.embedding(x), *([self.back_tokens(memory, rows)] if layout.back else [])]
        start = [self.front - layout.front + place for place in stretch.place]
        y, new, behind = self.run_blocks(
            torch.cat(parts, 1) if parts[1:] else parts[0], layout, start, mask, caches, memory
        )
        if all(done):
            memory = self.write_memory(memory, behind, None) if layout.back else memory
        else:
            caches = tuple(cache.with_pass(one, layout, mask) for cache, one in zip(caches, new, strict=True))
            if any(done) and self.back:
                memory = self._read_back(caches, memory, _indices(done, x.device))
        if not any(stretch.after):
            caches = self.empty_caches(rows, x.device, self.embedding.weight.dtype)
        elif any(done) or mask is not None:
            caches = tuple(cache.closed(stretch.after, done) for cache in caches)
        return y[:, layout.front : layout.front + t], caches, memory

    def _read_front(self, caches: tuple[SegmentCache, ...], memory: State, rows: Tensor) -> tuple[SegmentCache, ...]:
        """The caches with the memory tokens in front of the segment that some `rows` (indices) begin."""
        memory = map_state(lambda leaf: leaf[rows], memory)
        tokens = self.front_tokens(memory, len(rows))
        empty = self.empty_caches(len(rows), rows.device, caches[0].own.k.dtype)
        _, new, _ = self.run_blocks(tokens, Layout(self.front, 0, 0), [0] * len(rows), None, empty, memory)
        return tuple(cache.with_front(one.k, one.v, rows) for cache, one in zip(caches, new, strict=True))

    def _read_back(self, caches: tuple[SegmentCache, ...], memory: State, rows: Tensor) -> State:
        """The memory after the segment that some `rows` (indices) have completed."""
        some = map_state(lambda leaf: leaf[rows], memory)
        tokens, start = self.back_tokens(some, len(rows)), self.front + self.config.segment
        of_rows = tuple(select(cache, rows) for cache in caches)
        _, _, behind = self.run_blocks(tokens, Layout(0, 0, self.back), [start] * len(rows), None, of_rows, some)
        new = self.write_memory(some, behind, None)
        return map_state(lambda old, one: old.index_copy(0, rows, one.to(old.dtype)), memory, new)

    def run_blocks(
        self,
        y: Tensor,
        layout: Layout,
        start: list[int] | Tensor,
        mask: Tensor | None,
        caches: tuple[SegmentCache, ...],
        memory: State,
    ) -> tuple[Tensor, list[Context], list[Tensor]]:
        """All blocks over embeddings [B, n, D] at the positions from `start`, after what is in the caches.

        Returns the outputs [B, n, D], each block's new keys and values, and its outputs [B, b, D] behind the segment.
        """
        y, turn = self._placed(y, start)
        y = self.dropout(y)
        seen = visible(layout, self.causal_memory, caches[0].valid(), mask, y.device)
        new: list[Context] = []
        behind = []
        for i, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            y, context = block(self.recall(memory, i, y), Context(*cache.before(), seen, turn))
            new.append(context)
            behind.append(y[:, layout.front + layout.tokens :])
        return y, new, behind

    def _placed(self, y: Tensor, start: list[int] | Tensor) -> tuple[Tensor, Tensor | None]:
        """Embeddings [B, n, D] with their positions from `start` of each row, and their rotations."""
        if self.config.position == "none":
            return y, None
        table, n = self.table(y), y.shape[1]
        if isinstance(start, list) and len(set(start)) == 1:
            found = table[None, start[0] : start[0] + n]
        else:
            place = torch.as_tensor(start, device=y.device)[:, None] + torch.arange(n, device=y.device)
            found = table[place.clamp(max=len(table) - 1)]  # padding may be behind the last place
        return (y, found) if self.config.position == "rotary" else (y + found, None)

    def table(self, like: Tensor) -> Tensor:
        """What belongs to every position of a segment: a vector [n, D], or a row of `Rotary.turns`."""
        if self.positions is not None:
            return self.positions.weight
        table, c = self._table, self.config
        rotary, wide = c.position == "rotary", like.dtype == torch.float64
        dtype = like.dtype if not rotary else torch.complex128 if wide else torch.complex64
        if table is None or table.device != like.device or table.dtype != dtype:
            length = self.front + c.segment + self.back
            with torch.inference_mode(False):  # training must be able to use a table made during inference
                if rotary:
                    table = Rotary().turns(length, c.dim // c.num_heads, None, like.device)[0].to(dtype)
                else:
                    table = sinusoids(length, c.dim, None, like.device)[0].to(dtype)
            if not torch.compiler.is_compiling():
                self._table = table
        return table

    def _check_state(self, state: object, rows: int) -> None:
        if not isinstance(state, SegmentState):
            raise InputError(
                f"expected the state that this model returned, found {type(state).__name__}; start with state=None"
            )
        c, width = self.config, self.config.dim // self.config.num_heads
        wanted = self.new_memory(0, self.embedding.weight.device, self.embedding.weight.dtype)
        fits = len(state.layers) == c.layers
        fits = fits and all(cache.own.k.shape[2:] == (c.num_heads, width) for cache in state.layers)
        fits = fits and pytree.tree_structure(state.memory) == pytree.tree_structure(wanted)
        fits = fits and [x.shape[1:] for x in leaves(state.memory)] == [x.shape[1:] for x in leaves(wanted)]
        if not fits:
            raise InputError(
                "expected the state that this model returned, found one of a model of another configuration; start "
                "with state=None"
            )
        found = [leaf.shape[0] for leaf in leaves(state)]
        if any(count != rows for count in found):
            counts = " and ".join(map(str, sorted(set(found))))
            raise InputError(
                f"expected a state of {rows} rows, as the tokens have, found {counts}; use select or reset"
            )


def _indices(chosen: list[bool], device: Device) -> Tensor:
    return torch.tensor([i for i, one in enumerate(chosen) if one], device=device)


def _check(c: SegmentConfig) -> None:
    check_fields(c, "model")
    check_heads(c.dim, c.num_heads)
    check_sizes(c, vocab_size=1, layers=1, mlp=0, segment=1)
    check_dropout(c.dropout)
