"""Language models that read in segments, each with memory tokens in front, behind or both.

From top to bottom: the attention within a segment, and what it keeps between calls; `SegmentModel`, which cuts the
tokens of every row into segments and reads them; and the three models, which differ in their memory alone: the Memory
Transformer (Burtsev et al. 2020), the Recurrent Memory Transformer (RMT, Bulatov et al. 2022), and the Associative
Recurrent Memory Transformer (ARMT, Rodkin et al. 2024).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable, pytree
from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.attention.softmax import attend, project_qkv
from mnemos.config import ModelConfig, check_fields, with_fields
from mnemos.memory.associations import AssociationsConfig, AssociationState, AssociativeMemory
from mnemos.memory.grid import Stretch, stretches
from mnemos.memory.key_values import KeyValues, pad_front
from mnemos.memory.tokens import TokenMemory, TokensConfig, TokenState
from mnemos.modes import reads_without_waiting
from mnemos.ops.checks import check_dropout
from mnemos.ops.padding import PackedRows, count_seen
from mnemos.ops.rotary import Rotary
from mnemos.ops.sinusoids import sinusoids
from mnemos.registry import register
from mnemos.types import (
    Device,
    InputError,
    S,
    State,
    check_heads,
    check_token_ids,
    leaves,
    map_state,
    select,
)

from .shared import LanguageModel, check_sizes, init_weights, language_head, shrink_residuals
from .transformer import Activation, Block, Norm, dropout_of, final_norm_of, mlp_of, module_list


class Layout(NamedTuple):
    """The tokens of a pass, in this order: memory tokens in front, the segment's tokens, memory tokens behind."""

    front: int
    tokens: int
    back: int


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
        nothing = torch.zeros(batch_size, 0, self.num_heads, self.dim // self.num_heads, device=device, dtype=dtype)
        return Context(nothing, nothing)

    def check_state(self, state: Context, batch_size: int) -> None:
        """Nothing: the model checks its state."""

    def compute_heads(self, x: Tensor, state: Context | None, mask: Tensor | None) -> tuple[Tensor, Context | None]:
        t = x.shape[1]
        q, k, v = project_qkv(self.qkv(x), self.num_heads, None if state is None else state.turn)
        state = Context(k[:, :0], v[:, :0]) if state is None else state
        keys, values = k, v
        if state.k.shape[1]:
            keys, values = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
        dropout = self.dropout if self.training else 0.0
        heads = self.attend(q, keys, values, state.visible, state.visible is None and t > 1, dropout)
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

    def with_pass(self, new: Context, layout: Layout, mask: Tensor | None = None) -> "SegmentCache":
        """With the keys and values of a pass's front, if it had one, and of its tokens; mask [B, tokens] bool."""
        f, end = layout.front, layout.front + layout.tokens
        cache = self._replace(front_k=new.k[:, :f], front_v=new.v[:, :f]) if f else self
        own = cache.own.append(new.k[:, f:end], new.v[:, f:end], mask)
        return cache._replace(own=own if mask is None else own.packed())


def visible(layout: Layout, causal: bool, before: SegmentCache, mask: Tensor | None, device: Device) -> Tensor | None:
    """`Context.visible` of a pass after a cache. mask [B, tokens]: its tokens that are no padding; None: all.

    Front: the front only. A token: the front, and tokens not after it. Back: everything. Within the front and within
    the back: all, or with `causal` those not after. Every token attends to itself.
    """
    n, f, old = sum(layout), before.front_k.shape[1], before.own.valid
    valid = torch.cat([old.new_ones(old.shape[0], f), old], 1) if f else old if old.shape[1] else None  # of the cache
    if valid is None and mask is None and (causal or max(layout.front, layout.back) < 2):
        return None  # the plain causal mask
    if n == 1 and valid is not None:
        # One token attends to every valid key. On the CPU, checking that all are valid does not wait for a device.
        if reads_without_waiting(valid) and bool(valid.all()):
            return None
        return torch.cat([valid, valid.new_ones(valid.shape[0], 1)], 1)[:, None, None]
    index = torch.arange(n, device=device)
    group = (index >= layout.front).int() + (index >= layout.front + layout.tokens).int()  # 0 front, 1 tokens, 2 back
    within = index <= index[:, None]
    within = within if causal else within | (group != 1)
    own = ((group < group[:, None]) | ((group == group[:, None]) & within))[None]
    if mask is not None:
        front, back = (mask.new_ones(mask.shape[0], count) for count in (layout.front, layout.back))
        own = own & torch.cat([front, mask, back], 1)[:, None] | torch.eye(n, dtype=torch.bool, device=device)
    if valid is not None:
        own = torch.cat([valid[:, None].expand(-1, n, -1), own.expand(valid.shape[0], -1, -1)], 2)
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
    """Where each row is in its sequence; a row of zeros is a new row.

    seen [B] int64: valid tokens since the row began. memory: what passes from segment to segment (see the model).
    layers: the blocks' keys and values within the segment, which are empty at its start; within a segment each layer
    has 2·D numbers for each memory token in front and each token so far.
    """

    seen: Tensor
    memory: State
    layers: tuple[SegmentCache, ...]


class SegmentModel(LanguageModel):
    """`logits, state = model(x, state=None, mask=None)`: a language model with memory tokens around every segment.

    x [B, T] int64 token ids, T at least 1 in any call; mask [B, T] bool, True = valid; logits [B, T, V], logits[:, i]
    predict the token after x[:, i]. The tokens of a row are cut into segments of length L from its start; padding takes
    no place in them. A segment, with f memory tokens in front and b behind, is read as

        [front ; x_1 … x_L ; back]     positions 0 … f + L + b − 1

    in one pass if the call holds all of it; else the front is read with the first token, the back after the last one,
    and keys and values are cached in between, with the same results: reading token by token gives the same outputs as
    whole segments. Rows may be at different places of their segments; a call then runs more and shorter passes.

    The state is a `SegmentState`; gradient flows through it: `mnemos.replay` over segments trains with all of it, or
    with that of the last k segments (`truncate_every`), at the activations of one segment.

    A subclass sets `front` and `back`, builds its memory in `_build_memory`, and defines `new_memory`, `front_tokens`,
    `back_tokens`, `recall` and `write_memory`. It is made of its configuration, or with its fields.
    Raises InputError for impossible shapes, tokens outside the vocabulary, and a state of another model or batch.
    """

    config: SegmentConfig
    front = 0
    back = 0
    causal_memory = False

    def __init__(self, config: SegmentConfig) -> None:
        super().__init__()
        self.config = c = config
        check_fields(c, "model")
        check_heads(c.dim, c.num_heads)
        check_sizes(c, vocab_size=1, layers=1, mlp=0, segment=1)
        check_dropout(c.dropout)
        self._build_memory()
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.length = self.front + c.segment + self.back  # of a segment with its memory tokens
        self.positions = nn.Embedding(self.length, c.dim) if c.position == "learned" else None
        self._table: Tensor | None = None  # of sinusoids or rotations, kept between calls
        self.dropout = dropout_of(c.dropout)
        blocks = []
        for _ in range(c.layers):
            attention = SegmentAttention(c.dim, c.num_heads, c.dropout, c.position == "rotary")
            mlp = mlp_of(c.dim, c.mlp, c.activation, c.dropout) if c.mlp else None
            blocks.append(Block(attention, mlp, c.dim, c.norm, c.dropout))
        self.blocks = module_list(blocks)
        self.final_norm = final_norm_of(c.norm, c.dim)
        self.head = language_head(self.embedding, c.tied, c.cutoffs, c.div_value)
        init_weights(self)
        if c.norm == "rms":
            shrink_residuals(self.blocks)
        if c.tied and isinstance(self.head, nn.Linear):  # an adaptive softmax shares them from the start
            self.head.weight = self.embedding.weight

    # --- What a memory is: defined by each model ---

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

    # --- From tokens to logits ---

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> SegmentState:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        weight = self.embedding.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        seen = torch.zeros(batch_size, device=device, dtype=torch.int64)
        memory = self.new_memory(batch_size, device, dtype)
        return SegmentState(seen, memory, self.empty_caches(batch_size, device, dtype))

    def empty_caches(self, batch_size: int, device: Device, dtype: torch.dtype) -> tuple[SegmentCache, ...]:
        """The caches of the blocks at the start of a segment."""
        heads, width = self.config.num_heads, self.config.dim // self.config.num_heads

        def empty() -> SegmentCache:
            own = KeyValues.empty(batch_size, heads, width, device, dtype)
            return SegmentCache(own.k, own.v.clone(), own)

        return tuple(empty() for _ in self.blocks)

    def forward(
        self, x: Tensor, state: SegmentState | None = None, mask: Tensor | None = None, only: Tensor | None = None
    ) -> tuple[Tensor, SegmentState]:
        """See the class. only [B, T] bool: the logits at these positions alone, [n, V]."""
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
        b, length, dtype = len(x), self.config.segment, self.embedding.weight.dtype
        if state is None:
            state, seen = self.initial_state(b), [0] * b
        else:
            self._check_state(state, b)
            seen = state.seen.tolist()
        after = count_seen(x, state.seen, mask)
        rows = PackedRows.of(x, mask)  # segments count valid tokens
        memory, caches = state.memory, state.layers
        position, whole = [n % length for n in seen], min(rows.counts) // length
        start, outputs = 0, []
        # --- segments that are whole in the call, as rows of one batch, where none writes what the next one reads ---
        if not self.back and not any(position) and whole > 1:
            start, count = whole * length, whole * b
            all_whole = Stretch(0, length, [0] * count, [0] * count, [True] * count)
            copied = map_state(lambda leaf: leaf.repeat_interleave(whole, 0), memory)
            tokens = rows.x[:, :start].reshape(count, length)
            y, _, _ = self._stretch(all_whole, tokens, None, self.empty_caches(count, x.device, dtype), copied)
            outputs.append(y.reshape(b, start, -1))
            caches = self.empty_caches(b, x.device, dtype)
        # --- the others one after the other, cut wherever a segment of some row ends ---
        for stretch in stretches(position, [n - start for n in rows.counts], length):
            span = slice(start + stretch.start, start + stretch.stop)
            y, caches, memory = self._stretch(stretch, rows.x[:, span], rows.valid(span), caches, memory)
            outputs.append(y)
        if not outputs:  # padding alone
            return self.embedding(x) * 0, SegmentState(after, memory, caches)
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        return rows.in_place(y, x.shape[1]), SegmentState(after, memory, caches)

    def _stretch(
        self, stretch: Stretch, x: Tensor, mask: Tensor | None, caches: tuple[SegmentCache, ...], memory: State
    ) -> tuple[Tensor, tuple[SegmentCache, ...], State]:
        """Tokens [B, t] within one segment of each row: outputs, caches and memory after them."""
        rows, t = x.shape
        begins, ends = [place == 0 for place in stretch.place], stretch.done
        like = self.embedding.weight
        # --- rows that begin a segment read the front: with their tokens if all begin, else alone ---
        if all(begins):
            caches = self.empty_caches(rows, x.device, like.dtype)
        elif self.front and any(begins):
            some = torch.tensor([i for i, one in enumerate(begins) if one], device=x.device)
            part = rows_of(memory, some)
            empty = self.empty_caches(len(some), x.device, caches[0].own.k.dtype)
            front = self.front_tokens(part, len(some))
            _, new, _ = self.run_blocks(front, Layout(self.front, 0, 0), [0] * len(some), None, empty, part)
            fronts = [
                with_rows((old.front_k, old.front_v), some, one[:2]) for old, one in zip(caches, new, strict=True)
            ]
            caches = tuple(cache._replace(front_k=k, front_v=v) for cache, (k, v) in zip(caches, fronts, strict=True))
        # --- the tokens ---
        layout = Layout(self.front if all(begins) else 0, t, self.back if all(ends) else 0)
        parts = [self.front_tokens(memory, rows)] if layout.front else []
        parts += [self.embedding(x), *([self.back_tokens(memory, rows)] if layout.back else [])]
        start = [self.front - layout.front + place for place in stretch.place]
        tokens = torch.cat(parts, 1) if parts[1:] else parts[0]
        y, new, behind = self.run_blocks(tokens, layout, start, mask, caches, memory)
        # --- rows that end a segment write the memory: from the same pass if all end, else from one of their own ---
        if all(ends):
            memory = self.write_memory(memory, behind, None) if layout.back else memory
        else:
            caches = tuple(cache.with_pass(one, layout, mask) for cache, one in zip(caches, new, strict=True))
            if any(ends) and self.back:
                some = torch.tensor([i for i, one in enumerate(ends) if one], device=x.device)
                part = rows_of(memory, some)
                back, start_of_back = self.back_tokens(part, len(some)), [self.front + self.config.segment] * len(some)
                own = tuple(select(cache, some) for cache in caches)
                _, _, behind = self.run_blocks(back, Layout(0, 0, self.back), start_of_back, None, own, part)
                memory = with_rows(memory, some, self.write_memory(part, behind, None))
        # --- what the next call reads of this segment ---
        if not any(stretch.after):
            caches = self.empty_caches(rows, x.device, like.dtype)
        elif any(ends) or mask is not None:
            done, longest = torch.tensor(ends, device=x.device), max(stretch.after)
            caches = tuple(cache._replace(own=without_rows(cache.own.last(longest), done)) for cache in caches)
        return y[:, layout.front : layout.front + t], caches, memory

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
        # --- positions: vectors that are added, or rotations of queries and keys ---
        turn = None
        if self.config.position != "none":
            table, n = self.table(y), y.shape[1]
            if isinstance(start, list) and len(set(start)) == 1:
                turn = table[None, start[0] : start[0] + n]
            else:
                index = torch.as_tensor(start, device=y.device)[:, None] + torch.arange(n, device=y.device)
                turn = table[index.clamp(max=len(table) - 1)]  # padding may be behind the last one
            if self.config.position != "rotary":
                y, turn = y + turn, None
        y = self.dropout(y)
        # --- blocks, which attend to the cache and to these tokens ---
        seen = visible(layout, self.causal_memory, caches[0], mask, y.device)
        new: list[Context] = []
        behind = []
        for i, (block, cache) in enumerate(zip(self.blocks, caches, strict=True)):
            k, v = cache.own.k, cache.own.v
            if cache.front_k.shape[1]:
                k, v = torch.cat([cache.front_k, k], 1), torch.cat([cache.front_v, v], 1)
            y, context = block(self.recall(memory, i, y), Context(k, v, seen, turn))
            new.append(context)
            behind.append(y[:, layout.front + layout.tokens :])
        return y, new, behind

    def table(self, like: Tensor) -> Tensor:
        """What belongs to every position of a segment: a vector [n, D], or a row of `Rotary.turns`."""
        if self.positions is not None:
            return self.positions.weight
        table, c = self._table, self.config
        rotary, wide = c.position == "rotary", like.dtype == torch.float64
        dtype = like.dtype if not rotary else torch.complex128 if wide else torch.complex64
        if table is None or table.device != like.device or table.dtype != dtype:
            with torch.inference_mode(False):  # training must be able to use a table made during inference
                if rotary:
                    table = Rotary().turns(self.length, c.dim // c.num_heads, None, like.device)[0].to(dtype)
                else:
                    table = sinusoids(torch.arange(self.length, device=like.device), c.dim).to(dtype)
            if not torch.compiler.is_compiling():
                self._table = table
        return table

    def pad_to_capacity(self, state: SegmentState) -> SegmentState:
        """The same state with its caches as long as they become, so that its size is constant; see `mnemos.export`."""
        layers = tuple(
            SegmentCache(
                pad_front(cache.front_k, self.front),
                pad_front(cache.front_v, self.front),
                cache.own.pad_to(self.config.segment - 1),
            )
            for cache in state.layers
        )
        return state._replace(layers=layers)

    def _check_state(self, state: object, rows: int) -> None:
        c, width = self.config, self.config.dim // self.config.num_heads
        fits = isinstance(state, SegmentState) and len(state.layers) == c.layers
        if isinstance(state, SegmentState) and fits:
            wanted = self.new_memory(0, self.embedding.weight.device, self.embedding.weight.dtype)
            fits = all(cache.own.k.shape[2:] == (c.num_heads, width) for cache in state.layers)
            fits = fits and pytree.tree_structure(state.memory) == pytree.tree_structure(wanted)
            fits = fits and [x.shape[1:] for x in leaves(state.memory)] == [x.shape[1:] for x in leaves(wanted)]
        check_state_fits(state, fits, rows)


def rows_of(state: S, rows: Tensor) -> S:
    """The state of some rows (indices); also where there is none."""
    return map_state(lambda leaf: leaf[rows], state)


def with_rows(state: S, rows: Tensor, new: S) -> S:
    """The state with a new one of some rows (indices)."""
    return map_state(lambda old, one: old.index_copy(0, rows, one.to(old.dtype)), state, new)


def without_rows(own: KeyValues, rows: Tensor) -> KeyValues:
    """Keys and values without the tokens of some rows [B] bool; and without the buffer, in which these are valid."""
    return KeyValues(own.k, own.v, own.valid & ~rows[:, None], own.seen.masked_fill(rows, 0))


def check_state_fits(state: object, fits: bool, rows: int) -> None:
    """Raise InputError for a state that does not fit a model, or has other rows than its tokens."""
    if not fits:
        raise InputError(
            f"expected the state that this model returned, found {type(state).__name__}, or one of a model of another "
            "configuration; start with state=None"
        )
    counts = {leaf.shape[0] for leaf in leaves(state)}
    if counts != {rows}:
        raise InputError(
            f"expected a state of {rows} rows, as the tokens have, found {' and '.join(map(str, sorted(counts)))}; use "
            "select or reset"
        )


@register
@dataclass(frozen=True)
class MemoryTransformerConfig(SegmentConfig):
    """Learned tokens beside those of each segment (Memory Transformer); nothing is carried."""

    name: ClassVar[str] = "memory-transformer"
    memory_tokens: int = 16  # m
    causal_memory: bool = False  # a memory token attends to itself and earlier ones only

    def build(self) -> "MemoryTransformer":
        return MemoryTransformer(self)


class MemoryTransformer(SegmentModel):
    """A `SegmentModel` with m learned [mem] tokens in front of every segment.

        [mem_1 … mem_m ; x_1 … x_L]

    The memory tokens attend to each other, and every token to all of them and to the tokens of its segment up to
    itself. In the paper's encoder memory tokens also read the sequence; here that would tell a token its future.

    Nothing passes from one segment to the next: there is no recurrence, and [mem] is a part of the weights. The state
    (memory None) is the place of each row and the keys and values within its segment, at most 2·(m + L)·D numbers per
    layer and row. So a sequence may be cut anywhere, and at the start of a segment the state is empty. Cost:
    O(T·(m + L)·D + T·D²) time. Segments that are whole in a call run side by side.
    """

    config: MemoryTransformerConfig

    def __init__(self, config: MemoryTransformerConfig | None = None, **fields: Any) -> None:
        super().__init__(with_fields(config or MemoryTransformerConfig(), fields, "MemoryTransformer"))

    def _build_memory(self) -> None:
        c = self.config
        if c.memory_tokens < 0:
            raise InputError(f"memory_tokens: expected at least 0, found {c.memory_tokens}; use 0 for none")
        self.memory = TokenMemory(c.memory_tokens, c.dim) if c.memory_tokens else None
        self.front, self.causal_memory = c.memory_tokens, c.causal_memory

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> None:
        """None: the memory tokens are weights."""
        return None

    def front_tokens(self, memory: State, rows: int) -> Tensor:
        """[mem], the same for every row and segment."""
        assert self.memory is not None
        return self.memory.start.expand(rows, -1, -1)


@register
@dataclass(frozen=True)
class RMTConfig(SegmentConfig):
    """Memory tokens that pass from segment to segment (Recurrent Memory Transformer)."""

    name: ClassVar[str] = "rmt"
    memory: TokensConfig = field(default_factory=TokensConfig)

    def build(self) -> "RMT":
        return RMT(self)


class RMT(SegmentModel):
    """A `SegmentModel` with memory tokens that every segment reads and rewrites.

        [M_{t−1} ; s_t ; M_{t−1}]  →  Transformer  →  [· ; outputs ; M_t]

    The m read tokens in front do not see the segment; a token sees the read tokens and its segment up to itself; the m
    write tokens behind see everything. Both are M_{t−1}, told apart by their positions, and the last layer's outputs at
    the write tokens, after the final norm, are M_t. M_0 is learned.

    The state is M, m·D numbers per row, its number of writes, and within a segment the keys and values so far, at most
    2·(m + L)·D per layer and row. Cost: O(T·(2m + L)·D) for attention and O(T·(1 + 2m/L)·D²) for the rest.
    """

    config: RMTConfig

    def __init__(self, config: RMTConfig | None = None, **fields: Any) -> None:
        super().__init__(with_fields(config or RMTConfig(), fields, "RMT"))

    def _build_memory(self) -> None:
        c = self.config
        self.memory = TokenMemory(c.memory.tokens, c.dim) if c.memory.tokens else None
        self.front, self.back = c.memory.tokens, c.memory.tokens * c.memory.write
        self.causal_memory = c.memory.causal

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> TokenState | None:
        """No writes; None without memory tokens."""
        return None if self.memory is None else self.memory.initial_state(batch_size, device, dtype)

    def front_tokens(self, memory: TokenState, rows: int) -> Tensor:
        """M_{t−1} [B, m, D]."""
        assert self.memory is not None
        return self.memory.contents(memory)

    back_tokens = front_tokens

    def write_memory(self, memory: TokenState, outputs: list[Tensor], active: Tensor | None) -> TokenState:
        """M_t: the last layer's outputs."""
        return TokenMemory.written(memory, self.final_norm(outputs[-1]), active)


Associations = tuple[AssociationState, ...]  # of each layer


@register
@dataclass(frozen=True)
class ARMTConfig(SegmentConfig):
    """Memory tokens whose vectors each layer keeps as associations (ARMT)."""

    name: ClassVar[str] = "armt"
    memory: AssociationsConfig = field(default_factory=AssociationsConfig)

    def build(self) -> "ARMT":
        return ARMT(self)


class ARMT(SegmentModel):
    """A `SegmentModel` with an associative memory in every layer, which memory tokens write once per segment.

        [X^l ; M^l] ← [X^l ; M^l] + what A^l holds for each of them        before layer l
        [X^{l+1} ; M^{l+1}] = Layer_l([X^l ; M^l])
        A^l ← A^l with keys, values and strengths of M^{l+1}, by the delta rule

    m memory tokens are behind each segment and see all of it. They are learned and the same in every segment: what
    passes on is in the matrices (`AssociativeMemory`, `mnemos.ops.associative`), and every token reads them.

    The state is A [F, D] and its normaliser [F] per layer and row, at least float32, with F = 2·ν·key_dim; and within a
    segment the keys and values so far, at most 2·L·D per layer and row. Cost: O(T·(m + L)·D) for attention, O(T·F·D)
    for the memory and O(T·(1 + m/L)·D²) for the rest.
    """

    config: ARMTConfig

    def __init__(self, config: ARMTConfig | None = None, **fields: Any) -> None:
        super().__init__(with_fields(config or ARMTConfig(), fields, "ARMT"))
        for association in self.associations:
            association.reset_parameters()  # after the initialisation of all weights

    def _build_memory(self) -> None:
        c = self.config
        self.back = c.memory.tokens * c.memory.write
        self.causal_memory = c.memory.causal
        self.memory_tokens = nn.Parameter(torch.randn(self.back, c.dim) * c.dim**-0.5) if self.back else None
        self.associations = module_list(AssociativeMemory(c.dim, c.memory) for _ in range(c.layers if self.back else 0))

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> Associations:
        """Empty matrices; none without memory tokens."""
        return tuple(memory.initial_state(batch_size, device, dtype) for memory in self.associations)

    def back_tokens(self, memory: State, rows: int) -> Tensor:
        """The learned memory tokens, the same for every row and segment."""
        assert self.memory_tokens is not None
        return self.memory_tokens.expand(rows, -1, -1)

    def recall(self, memory: Associations, layer: int, x: Tensor) -> Tensor:
        """x and what the layer's matrix holds for it."""
        return self.associations[layer].read(memory[layer], x) if memory else x

    def write_memory(self, memory: Associations, outputs: list[Tensor], active: Tensor | None) -> Associations:
        """Every layer's matrix after a write from its memory tokens."""
        of_layers = zip(self.associations, memory, outputs, strict=True)
        return tuple(layer.write(state, tokens, active) for layer, state, tokens in of_layers)
