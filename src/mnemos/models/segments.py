"""Language models that read in segments, each with memory tokens in front, behind or both.

From top to bottom: what every model of segments shares, with what its blocks keep within a segment; the attention with
memory tokens; `SegmentModel`, which reads segments with memory tokens around them; and the three models, which differ
in their memory alone: the Memory Transformer (Burtsev et al. 2020), the Recurrent Memory Transformer (RMT, Bulatov et
al. 2022), and the Associative Recurrent Memory Transformer (ARMT, Rodkin et al. 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mnemos._compat import exportable
from mnemos.attention.cross import KeysValues
from mnemos.attention.multi_head import MultiHeadAttention
from mnemos.attention.softmax import attend
from mnemos.config import ModelConfig
from mnemos.memory.associations import AssociationsConfig, AssociationState, AssociativeMemory
from mnemos.memory.grid import Stretch, stretches
from mnemos.memory.key_values import KeyValues, pad_front
from mnemos.memory.tokens import TokenMemory, TokensConfig, TokenState
from mnemos.modes import reads_without_waiting
from mnemos.ops.dense_layer import Linear
from mnemos.ops.padding import PackedRows
from mnemos.ops.positions import Rotary, count_seen, rotary_of, rotate, sinusoids
from mnemos.registry import register
from mnemos.types import Device, InputError, S, State, check_token_ids, leaves, map_state

from .shared import LanguageModel, check_state, checked_config, init_weights, language_head
from .transformer import Activation, Norm, blocks_of, dropout_of, final_norm_of, module_list

# --- What models of segments share ---


@exportable
class SegmentCache(NamedTuple):
    """A block's keys and values within an unfinished segment: of its tokens so far, and of what else they attend to.

    own: a `KeyValues` of at most L tokens. others: [B, N, H, D/H] each, of the memory tokens in front, or of sources.
    Rows may be anywhere in their segments; the tokens of a row are the last columns, and the other columns are not
    valid. If all rows are at the start of a segment, all tensors are empty: [B, 0, ..].
    """

    own: KeyValues
    others: tuple[KeysValues, ...]

    @property
    def memory_name(self) -> None:
        """None: the cache belongs to a position within the segment, which the state counts elsewhere."""
        return None


class SegmentedModel(LanguageModel):
    """Base of the models that read each row in segments of L tokens from its start, wherever calls end.

    Padding is no token of a segment. The state is a named tuple that counts the tokens of each row, `seen`, and whose
    last field, `layers`, is a `SegmentCache` for each block that caches.
    """

    config: Any
    embedding: nn.Embedding
    attends_to: tuple[int, ...]  # the lengths of what the tokens of each cached block attend to beside themselves
    cached_blocks: int

    def finish(self) -> None:
        """What a model does at the end of its construction: see `checked_state`."""
        new: Any = self.initial_state(0)
        self._state_class, self._shapes = type(new), _shapes(new)

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> State:
        """The state of `batch_size` new rows, by default like the weights; passing None to `forward` means the same."""
        raise NotImplementedError

    def empty_caches(
        self, rows: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> tuple[SegmentCache, ...]:
        """The caches at the start of a segment, by default like the weights."""
        c, like = self.config, self.embedding.weight
        device, dtype = like.device if device is None else device, dtype or like.dtype
        own = [
            [KeyValues.empty(rows, c.num_heads, c.dim // c.num_heads, device, dtype) for _ in range(1 + n)]
            for n in [len(self.attends_to)] * self.cached_blocks
        ]
        return tuple(SegmentCache(first, tuple((one.k, one.v) for one in others)) for first, *others in own)

    def checked_state(self, x: Tensor, state: Any, mask: Tensor | None) -> tuple[Any, list[int]]:
        """The state before tokens [B, T], a new one for None, and the number of tokens that each row has read.

        Raises InputError for tokens outside the vocabulary, and for a state of another model or batch.
        """
        check_token_ids(x, self.config.vocab_size, mask)
        if state is None:
            return self.initial_state(len(x)), [0] * len(x)
        check_state(state, self._state_class, self.cached_blocks, len(x), lambda state: _shapes(state) == self._shapes)
        return state, state.seen.tolist()

    def caches_after(
        self, stretch: Stretch, caches: tuple[SegmentCache, ...], mask: Tensor | None
    ) -> tuple[SegmentCache, ...]:
        """What later tokens of a segment read of the caches: nothing of padding, nor of rows whose segment ended."""
        if not any(stretch.after):
            return self.empty_caches(len(stretch.after))
        if mask is None and not any(stretch.done):
            return caches
        longest, done = max(stretch.after), torch.tensor(stretch.done, device=self.embedding.weight.device)

        def trimmed(own: KeyValues) -> KeyValues:  # and without the buffer, in which tokens of ended rows are valid
            own = (own if mask is None else own.packed()).last(longest)
            return KeyValues(own.k, own.v, own.valid & ~done[:, None], own.seen.masked_fill(done, 0))

        return tuple(cache._replace(own=trimmed(cache.own)) for cache in caches)

    def pad_to_capacity(self, state: Any) -> Any:
        """The same state with its caches as long as they become, so that its size is constant; see `mnemos.export`."""
        layers = tuple(
            SegmentCache(
                cache.own.pad_to(self.config.segment - 1),
                tuple(
                    (pad_front(k, n), pad_front(v, n)) for (k, v), n in zip(cache.others, self.attends_to, strict=True)
                ),
            )
            for cache in state.layers
        )
        return state._replace(layers=layers)


def _shapes(state: Any) -> list[torch.Size]:
    """What must be the same in all states of a model: all shapes but for rows and the numbers of cached tokens."""
    return [*(x.shape[1:] for x in leaves(state[:-1])), state.layers[0].own.k.shape[2:]]


def change_rows(rows: list[bool], change: Callable[..., S], state: S, *others: State) -> S:
    """`change(state, *others)` in some rows of a state, computed for those alone; `change` gets their parts."""
    if all(rows):
        return change(state, *others)
    if not any(rows):
        return state
    index = torch.tensor([i for i, one in enumerate(rows) if one], device=leaves(state)[0].device)
    new = change(*map_state(lambda x: x[index], (state, *others)))
    return map_state(lambda old, one: old.index_copy(0, index, one.to(old.dtype)), state, new)


# --- The attention with memory tokens around a segment ---


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
        rotary_of(rotary, dim // num_heads)  # raises for an odd width
        self.qkv, self.output = Linear(dim, 3 * dim), Linear(dim, dim)

    def empty(self, batch_size: int, device: Device, dtype: torch.dtype | None) -> Context:
        nothing = torch.zeros(batch_size, 0, self.num_heads, self.dim // self.num_heads, device=device, dtype=dtype)
        return Context(nothing, nothing)

    def check_state(self, state: Context, batch_size: int) -> None:
        """Nothing: the model checks its state."""

    def compute_heads(self, x: Tensor, state: Context | None, mask: Tensor | None) -> tuple[Tensor, Context | None]:
        t = x.shape[1]
        qk, v = self.qkv(x).unflatten(2, (3 * self.num_heads, -1)).split([2 * self.num_heads, self.num_heads], 2)
        turn = None if state is None else state.turn
        q, k = (qk if turn is None else rotate(qk, turn)).chunk(2, 2)
        state = Context(k[:, :0], v[:, :0]) if state is None else state
        keys, values = k, v
        if state.k.shape[1]:
            keys, values = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
        dropout = self.dropout if self.training else 0.0
        heads = self.attend(q, keys, values, state.visible, state.visible is None and t > 1, dropout)
        return heads, Context(k, v)


def with_pass(cache: SegmentCache, new: Context, layout: Layout, mask: Tensor | None = None) -> SegmentCache:
    """The cache with the keys and values of a pass's front, if it had one, and of its tokens; mask [B, tokens] bool."""
    f, end = layout.front, layout.front + layout.tokens
    others = ((new.k[:, :f], new.v[:, :f]),) if f else cache.others
    return SegmentCache(cache.own.append(new.k[:, f:end], new.v[:, f:end], mask), others)


def visible(layout: Layout, causal: bool, before: SegmentCache, mask: Tensor | None, device: Device) -> Tensor | None:
    """`Context.visible` of a pass after a cache. mask [B, tokens]: its tokens that are no padding; None: all.

    Front: the front only. A token: the front, and tokens not after it. Back: everything. Within the front and within
    the back: all, or with `causal` those not after. Every token attends to itself.
    """
    n, f, old = sum(layout), before.others[0][0].shape[1], before.own.valid
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
    cutoffs: tuple[int, ...] = ()  # tied: adaptive softmax with clusters from these tokens on; (): one softmax


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


class SegmentModel(SegmentedModel):
    """`logits, state = model(x, state=None, mask=None)`: a language model with memory tokens around every segment.

    x [B, T] int64 token ids, T at least 1 in any call; mask [B, T] bool, True = valid; logits [B, T, V], logits[:, i]
    predict the token after x[:, i]. The tokens of a row are cut into segments of length L from its start; padding takes
    no place in them. A segment, with f memory tokens in front and b behind, is read as

        [front ; x_1 … x_L ; back]     positions 0 … f + L + b − 1

    in one pass if the call holds all of it; else the front is read with the first token, the back after the last one,
    and keys and values are cached in between, with the same results: reading token by token gives the same outputs as
    whole segments. Rows may be anywhere in their segments; a call then runs more and shorter passes.

    The state is a `SegmentState`; gradient flows through it: `mnemos.replay` over segments trains with all of it, or
    with that of the last k segments (`truncate_every`), at the activations of one segment.

    A subclass is a memory, with its configuration as `settings`. It builds its modules and sets `front`, `back` and
    `causal_memory` in `build_memory`. It defines the memory of new rows; the memory tokens in front of a segment
    [B, f, D] and behind it [B, b, D]; `recall`, the inputs [B, n, D] of a layer with what the memory adds; and
    `write_memory`, the memory after a segment, from each layer's outputs [B, b, D] behind it, in the rows that are
    `active` [B] bool (None: all).
    Raises InputError for impossible shapes, tokens outside the vocabulary, and a state of another model or batch.
    """

    settings: type[SegmentConfig]
    config: SegmentConfig
    front = 0
    back = 0
    causal_memory = False

    def __init__(self, config: SegmentConfig | None = None, **fields: Any) -> None:
        super().__init__()
        least = {"vocab_size": 1, "layers": 1, "mlp": 0, "segment": 1}
        self.config = c = checked_config(self, config or self.settings(), fields, **least)
        self.build_memory()
        self.attends_to, self.cached_blocks = (self.front,), c.layers
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.length = self.front + c.segment + self.back  # of a segment with its memory tokens
        self.positions = nn.Embedding(self.length, c.dim) if c.position == "learned" else None
        self._table: Tensor | None = None  # of sinusoids or rotations, kept between calls
        self.dropout = dropout_of(c.dropout)
        rotary = c.position == "rotary"
        self.blocks = blocks_of(c, (SegmentAttention(c.dim, c.num_heads, c.dropout, rotary) for _ in range(c.layers)))
        self.final_norm = final_norm_of(c.norm, c.dim)
        self.head = language_head(self.embedding, c.tied, c.cutoffs)
        init_weights(self, [self.blocks] if c.norm == "rms" else [], c.tied)
        self.finish()

    # --- What a memory is: defined by each model ---

    def build_memory(self) -> None:
        raise NotImplementedError

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> State:
        raise NotImplementedError

    def front_tokens(self, memory: State, rows: int) -> Tensor:
        raise NotImplementedError

    def back_tokens(self, memory: State, rows: int) -> Tensor:
        raise NotImplementedError

    def recall(self, memory: State, layer: int, x: Tensor) -> Tensor:
        return x

    def write_memory(self, memory: State, outputs: list[Tensor], active: Tensor | None = None) -> State:
        raise NotImplementedError

    # --- From tokens to logits ---

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> SegmentState:
        weight = self.embedding.weight
        device, dtype = weight.device if device is None else device, dtype or weight.dtype
        seen = torch.zeros(batch_size, device=device, dtype=torch.int64)
        memory = self.new_memory(batch_size, device, dtype)
        return SegmentState(seen, memory, self.empty_caches(batch_size, device, dtype))

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
        before, seen = self.checked_state(x, state, mask)
        b, length = len(x), self.config.segment
        after = count_seen(x, before.seen, mask)
        rows = PackedRows.of(x, mask)  # segments count valid tokens
        memory, caches = before.memory, before.layers
        position, whole = [n % length for n in seen], min(rows.counts) // length
        start, outputs = 0, []
        # --- segments that are whole in the call, as rows of one batch, where none writes what the next one reads ---
        if not self.back and not any(position) and whole > 1:
            start, count = whole * length, whole * b
            all_whole = Stretch(0, length, [0] * count, [0] * count, [True] * count)
            copied = map_state(lambda leaf: leaf.repeat_interleave(whole, 0), memory)
            y, _, _ = self._stretch(all_whole, rows.x[:, :start].reshape(count, length), None, (), copied)
            outputs.append(y.reshape(b, start, -1))
            caches = self.empty_caches(b)
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
        begins, ends = [n == 0 for n in stretch.before], stretch.done
        # --- rows that begin a segment read the front: with their tokens if all begin, else alone ---
        if all(begins):
            caches = self.empty_caches(rows)
        elif self.front:
            fronts = change_rows(begins, self.read_front, tuple(cache.others for cache in caches), memory)
            caches = tuple(cache._replace(others=front) for cache, front in zip(caches, fronts, strict=True))
        # --- the tokens ---
        layout = Layout(self.front if all(begins) else 0, t, self.back if all(ends) else 0)
        parts = [self.front_tokens(memory, rows)] if layout.front else []
        parts += [self.embedding(x), *([self.back_tokens(memory, rows)] if layout.back else [])]
        start = [self.front - layout.front + n for n in stretch.before]
        tokens = torch.cat(parts, 1) if parts[1:] else parts[0]
        y, new, behind = self.run_blocks(tokens, layout, start, mask, caches, memory)
        # --- rows that end a segment write the memory: from the same pass if all end, else from one of their own ---
        if all(ends) and self.back:
            memory = self.write_memory(memory, behind)
        elif not all(ends):
            caches = tuple(with_pass(cache, one, layout, mask) for cache, one in zip(caches, new, strict=True))
            if self.back:
                memory = change_rows(ends, self.read_back, memory, caches)
        y = y[:, layout.front : layout.front + t]
        return y, self.caches_after(stretch, caches, mask), memory

    def read_front(self, fronts: tuple[tuple[KeysValues, ...], ...], memory: State) -> Any:
        """The keys and values of the memory tokens in front of new segments, in place of those in caches."""
        rows = fronts[0][0][0].shape[0]
        tokens, layout = self.front_tokens(memory, rows), Layout(self.front, 0, 0)
        _, new, _ = self.run_blocks(tokens, layout, [0], None, self.empty_caches(rows), memory)
        return tuple(((one.k, one.v),) for one in new)

    def read_back(self, memory: State, caches: tuple[SegmentCache, ...], active: Tensor | None = None) -> State:
        """The memory after segments that are in the caches, by a pass of the memory tokens behind them."""
        tokens, layout = self.back_tokens(memory, caches[0].own.k.shape[0]), Layout(0, 0, self.back)
        start = [self.front + self.config.segment]
        _, _, behind = self.run_blocks(tokens, layout, start, None, caches, memory)
        return self.write_memory(memory, behind, active)

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
            k, v, ((front_k, front_v),) = cache.own.k, cache.own.v, cache.others
            if front_k.shape[1]:
                k, v = torch.cat([front_k, k], 1), torch.cat([front_v, v], 1)
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

    settings = MemoryTransformerConfig
    config: MemoryTransformerConfig

    def build_memory(self) -> None:
        c = self.config
        if c.memory_tokens < 0:
            raise InputError(f"memory_tokens: expected at least 0, found {c.memory_tokens}; use 0 for none")
        self.memory = TokenMemory(c.memory_tokens, c.dim) if c.memory_tokens else None
        self.front, self.causal_memory = c.memory_tokens, c.causal_memory

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> None:
        return None

    def front_tokens(self, memory: State, rows: int) -> Tensor:
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

    settings = RMTConfig
    config: RMTConfig

    def build_memory(self) -> None:
        c = self.config
        self.memory = TokenMemory(c.memory.tokens, c.dim) if c.memory.tokens else None
        self.front, self.back = c.memory.tokens, c.memory.tokens * c.memory.write
        self.causal_memory = c.memory.causal

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> TokenState | None:
        return None if self.memory is None else self.memory.initial_state(batch_size, device, dtype)

    def front_tokens(self, memory: TokenState, rows: int) -> Tensor:
        assert self.memory is not None
        return self.memory.contents(memory)

    back_tokens = front_tokens

    def write_memory(self, memory: TokenState, outputs: list[Tensor], active: Tensor | None = None) -> TokenState:
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

    settings = ARMTConfig
    config: ARMTConfig

    def __init__(self, config: ARMTConfig | None = None, **fields: Any) -> None:
        super().__init__(config, **fields)
        for association in self.associations:
            association.reset_parameters()  # after the initialisation of all weights

    def build_memory(self) -> None:
        c = self.config
        self.back = c.memory.tokens * c.memory.write
        self.causal_memory = c.memory.causal
        self.memory_tokens = nn.Parameter(torch.randn(self.back, c.dim) * c.dim**-0.5) if self.back else None
        self.associations = module_list(AssociativeMemory(c.dim, c.memory) for _ in range(c.layers if self.back else 0))

    def new_memory(self, batch_size: int, device: Device, dtype: torch.dtype) -> Associations:
        return tuple(memory.initial_state(batch_size, device, dtype) for memory in self.associations)

    def back_tokens(self, memory: State, rows: int) -> Tensor:
        assert self.memory_tokens is not None
        return self.memory_tokens.expand(rows, -1, -1)

    def recall(self, memory: Associations, layer: int, x: Tensor) -> Tensor:
        return self.associations[layer].read(memory[layer], x) if memory else x

    def write_memory(self, memory: Associations, outputs: list[Tensor], active: Tensor | None = None) -> Associations:
        of_layers = zip(self.associations, memory, outputs, strict=True)
        return tuple(layer.write(state, tokens, active) for layer, state, tokens in of_layers)
