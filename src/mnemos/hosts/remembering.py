"""remember(model): memory tokens around a causal decoder that is not ours (RMT); the decoder itself is not changed.

`Remembering` reads one segment in each call; `Segmented` has segments of a fixed length, wherever calls are cut.
"""

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mnemos import generators
from mnemos.errors import near_arguments
from mnemos.memory.tokens import TokenMemory, TokenState
from mnemos.modes import evaluating
from mnemos.ops.padding import PackedRows, take, valid_first
from mnemos.types import Device, InputError, Splits, StateKind, check_token_ids, describe, read_by_count, select

from .adapters import ROTARY

# Decoders of transformers whose logits are those of their head, but for `AfterHead`: class, and where its decoder is.
_KNOWN = {"GPT2LMHeadModel": "transformer", "GPTNeoXForCausalLM": "gpt_neox", "OPTForCausalLM": "model"}
_KNOWN |= {"FalconForCausalLM": "transformer"}
_KNOWN |= {f"{name}ForCausalLM": "model" for name in ROTARY.values()}
_PARTS = "remember(model, embedding=..., decoder=..., head=...)"
_TOKENIZER = "use the tokenizer of the decoder"  # what the error for a wrong token id says to do


@near_arguments
def remember(
    model: nn.Module,
    tokens: int = 16,
    embedding: str | None = None,
    decoder: str | None = None,
    head: str | None = None,
) -> "Remembering":
    """A Recurrent Memory Transformer around a causal decoder: memory tokens are read and written with every segment.

        remembering = mnemos.remember(model, tokens=16)         # a Hugging Face model: GPT-2, Llama, Qwen and others
        logits, memory = remembering(ids, memory)               # ids [B, T]: a segment; memory None: new rows

    The decoder is used as it is, without hooks or new modules: `remembering.model` is the given object. Both train:
    freeze what should not, as by `remembering.model.requires_grad_(False)`. tokens: m, the number of memory tokens.

    embedding, decoder, head: the names of these parts of a model whose layout is not known, all three: the embedding
    [B, T] -> [B, T, D]; a causal module that is called with `inputs_embeds=` [B, n, D] and returns hidden states
    [B, n, D] (a tensor, a tuple that starts with it, or an object with `last_hidden_state`); and the map from hidden
    states to logits. Raises InputError for a model of an unknown layout, parts that it does not have, a named decoder
    that is not causal, and named parts whose logits are not the model's; both are tested by a call.
    """
    # --- what is no decoder of another library ---
    cls = type(model).__name__
    if not isinstance(tokens, int) or tokens < 1:
        raise InputError(f"remember: expected tokens, a whole number of at least 1, found {tokens!r}; change tokens")
    if not isinstance(model, nn.Module):
        raise InputError(f"remember: expected a model, a torch.nn.Module, found {cls}; give the model itself")
    if type(model).__module__.startswith("mnemos."):
        raise InputError(
            f"remember: expected a decoder of another library, found {cls}; for memory tokens use mnemos.RMT"
        )

    # --- its parts, by name or of a known class ---
    names = {"embedding": embedding, "decoder": decoder, "head": head}
    if missing := [part for part, name in names.items() if name is None]:
        if len(missing) < len(names):
            raise InputError(f"remember: expected three names, found none for {', '.join(missing)}; use {_PARTS}")
        theirs = [c.__name__ for c in type(model).__mro__ if c.__module__.startswith("transformers.")]
        known = next((name for name in theirs if name in _KNOWN), None)
        if known is None:
            raise InputError(
                f"remember: expected a causal decoder with its head, whose layout is known "
                f"({', '.join(sorted(_KNOWN))}), found {cls}; name its parts: {_PARTS}"
            )
        of_library: Any = model
        inner = model.get_submodule(_KNOWN[known])
        return Remembering(model, tokens, of_library.get_input_embeddings(), inner, of_library.get_output_embeddings())
    parts = []
    for name in map(str, names.values()):
        try:
            parts.append(model.get_submodule(name))
        except AttributeError:
            known_parts = ", ".join(part for part, _ in model.named_children())
            raise InputError(
                f"remember: expected the name of a part of {cls}, found {name!r}; it has {known_parts}"
            ) from None
    remembering = Remembering(model, tokens, *parts)
    remembering.check_parts(str(decoder))
    return remembering


class AfterHead(NamedTuple):
    """What a model does with the logits of its head: times `scale` (Cohere, Granite), then a soft cap (Gemma)."""

    scale: float = 1.0
    cap: float | None = None

    @staticmethod
    def of(model: nn.Module) -> "AfterHead":
        """As the configuration of a model of transformers has it."""
        config = getattr(model, "config", None)
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        scale = float(scale) if isinstance(scale, int | float) else 1.0
        return AfterHead(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class Remembering(nn.Module):
    """`logits, memory = remembering(x, state=None, mask=None)`: what `remember` returns.

        [M_{t−1} ; s_t ; M_{t−1}]  →  decoder  →  [· ; hidden states ; M_t]

    x [B, T] int64 token ids: one segment, of any length; mask [B, T] bool, True = valid; logits [B, T, V] predict the
    token after x[:, i], of the next segment where i is the last. The state is a `TokenState`: m·D numbers per row, in
    new rows the learned start. The decoder's causal mask holds for all 2m + T tokens, so a memory token attends to
    those before it. Positions start again with each call: the read tokens at 0, and padding takes no position. A row
    that is all padding keeps its memory.

    It is a model as those of `mnemos.models`: `mnemos.replay` trains it over segments. Where a sequence is cut is part
    of the computation (splits = "segments"); `Segmented` has segments of a fixed length, for streams. Cost: the
    decoder's over 2m + T tokens, and the head's over T. Raises InputError for ids, mask and memory that do not fit, and
    for more tokens than the decoder's positions or its sliding window hold.
    """

    splits: Splits = "segments"
    state_kind: StateKind = "constant"
    rows_independent = True
    state_gradient = True
    autoregressive = True

    def __init__(self, model: nn.Module, tokens: int, embedding: Any, decoder: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.model = model
        # By name: they are parts of `model` already, and adapters (PEFT) put others in their places.
        names = list(model.named_modules(remove_duplicate=False))
        self._names = tuple(next(name for name, one in names if one is part) for part in (embedding, decoder, head))
        takes = inspect.signature(decoder.forward).parameters
        if "inputs_embeds" not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            raise InputError(
                f"remember: expected a decoder that takes inputs_embeds=, found {type(decoder).__name__}; name another"
            )
        self._options = {"use_cache": False} if "use_cache" in takes else {}
        self._takes_mask = "attention_mask" in takes
        self.after = AfterHead.of(model)
        weight = embedding.weight
        self.memory = TokenMemory(tokens, weight.shape[1]).to(weight.device, weight.dtype)
        with torch.no_grad():  # as large as the embeddings of tokens: some scale their weights (Gemma 3, Bart)
            some = torch.arange(min(256, len(weight)), device=weight.device)
            scale = embedding(some).float().norm() / weight[some].float().norm().clamp(min=1e-30)
            start = torch.randn_like(self.memory.start, dtype=torch.float32)
            self.memory.start.copy_(start * weight.float().std() * scale)

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> TokenState:
        """The memory of `batch_size` new rows; passing None to `forward` means the same."""
        return self.memory.initial_state(batch_size, device, dtype)

    def forward(
        self, x: Tensor, state: TokenState | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, TokenState]:
        hidden, state = self.hidden(x, state, mask)
        return self.logits(hidden), state

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [B, T, V] of last hidden states [B, T, D]: the head's, and what the model does with them."""
        return self.after(self.parts[2](hidden))

    if TYPE_CHECKING:
        __call__ = forward

    def advance(self, x: Tensor, state: TokenState | None = None, mask: Tensor | None = None) -> TokenState:
        """The memory that `forward` returns, without the head."""
        return self.hidden(x, state, mask)[1]

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """The decoder's embedding, the decoder itself and its head, which are modules of `model`."""
        embedding, decoder, head = map(self.model.get_submodule, self._names)
        return embedding, decoder, head

    def hidden(
        self, x: Tensor, state: TokenState | None = None, mask: Tensor | None = None, writes: bool = True
    ) -> tuple[Tensor, TokenState]:
        """The last hidden states [B, T, D] that the head reads, and the new memory.

        writes: False for tokens of a segment that is not whole yet, which read the memory and leave it as it is.
        """
        state = self._check(x, state, mask)
        memory, t = self._embed(state), x.shape[1]
        m, back = memory.shape[1], [memory] if writes else []
        valid = None
        if mask is not None:
            ends = mask.new_ones(len(x), m)
            valid = torch.cat([ends, mask, *([ends] if writes else [])], 1)
        hidden = self._call_decoder(torch.cat([memory, self.parts[0](x), *back], 1), valid)
        if not writes:
            return hidden[:, m:], state
        active = None if mask is None else mask.any(1)
        return hidden[:, m : m + t], TokenMemory.written(state, hidden[:, m + t :], active)

    def check_parts(self, decoder: str) -> None:
        """Raise InputError unless the named decoder is causal and its parts give the model's logits; finds `after`.

        Its outputs must not change with later embeddings; logits are compared on eight tokens. A model that is not
        called itself, without a forward, does nothing after its head.
        """
        model, (embedding, _, head) = self.model, self.parts
        with torch.no_grad(), generators.preserve(), evaluating(self):
            weight = self.memory.start
            x = torch.randn(1, 4, weight.shape[1], device=weight.device, dtype=torch.float32).to(weight.dtype)
            other = torch.cat([x[:, :3], x[:, 3:] + 1], 1)
            before, later = self._call_decoder(torch.cat([x, other]), None)[:, :3].float()
            if not torch.allclose(before, later, rtol=1e-3, atol=1e-4):
                raise InputError(
                    f"decoder={decoder!r}: expected a causal module, found outputs that change with later embeddings"
                )
            if type(model).forward is nn.Module.forward:
                self.after = AfterHead()
                return
            cls, rows = type(model).__name__, len(embedding.weight)
            ids = ((rows // 2 + torch.arange(8)) % rows).view(2, 4).to(embedding.weight.device)
            try:
                whole: Any = model(ids)
            except Exception as error:  # of any class: it is the model's own
                raise InputError(
                    "remember: expected a model that is called with token ids [B, T], found "
                    f"{type(error).__name__}: {' '.join(str(error).split())}; use another model"
                ) from error
            whole = whole[0] if isinstance(whole, tuple) else getattr(whole, "logits", whole)
            logits = head(self._call_decoder(embedding(ids), None))
        if not isinstance(whole, Tensor) or whole.shape != logits.shape:
            found = f"{tuple(logits.shape)} and {describe(whole)}"
            raise InputError(f"remember: expected parts whose logits are those of {cls}, found {found}")
        rounding = max(torch.finfo(x.dtype).eps for x in (logits, whole))
        self.after = AfterHead.of(model)
        difference = (self.after(logits).float() - whole.float()).abs().max()
        if difference > min(100 * rounding, 0.05) * whole.abs().max():
            raise InputError(
                f"remember: expected parts whose logits are those of {cls}, found that they differ by up to "
                f"{difference:.2g}; name parts that include all that it computes"
            )

    def _embed(self, state: TokenState) -> Tensor:
        """M [B, m, D] as the decoder's embeddings."""
        return self.memory.contents(state).to(self.parts[0].weight.dtype)

    def _call_decoder(self, embeds: Tensor, valid: Tensor | None) -> Tensor:
        """The decoder's last hidden states, [B, n, D]. Raises InputError for others than those of the embeddings.

        It reads the valid tokens of a row first and its padding last, where no valid token sees it and none has another
        position because of it, whatever the decoder makes of masks and positions.
        """
        order, options = None, dict[str, Any](self._options)
        if valid is not None:
            order = valid_first(valid)
            embeds = take(embeds, order)
            if self._takes_mask:
                options["attention_mask"] = valid.gather(1, order).long()
        out = self.parts[1](inputs_embeds=embeds, **options)
        hidden: Any = out[0] if isinstance(out, tuple) else getattr(out, "last_hidden_state", out)
        if not isinstance(hidden, Tensor) or hidden.shape != embeds.shape:
            found = f"{describe(hidden)}; name another decoder"
            raise InputError(f"remember: expected hidden states {tuple(embeds.shape)}, found {found}")
        return hidden if order is None else take(hidden, order.argsort(1))

    def _check(self, x: Tensor, state: TokenState | None, mask: Tensor | None) -> TokenState:
        """The state, of new rows if it is None, after a check of all three."""
        check_token_ids(x, len(self.parts[0].weight), mask, _TOKENIZER)
        m, width = self.memory.start.shape
        if state is None:
            state = self.initial_state(len(x))
        elif not isinstance(state, TokenState) or state.tokens.shape != (len(x), m, width):
            shape = tuple(state.tokens.shape) if isinstance(state, TokenState) else type(state).__name__
            raise InputError(
                f"expected the state that this wrapper returned, {(len(x), m, width)}, found {shape}; start with None"
            )
        n, config = x.shape[1] + 2 * m, getattr(self.model, "config", None)
        for field, what in (("max_position_embeddings", "positions"), ("sliding_window", "tokens of its window")):
            limit = getattr(config, field, None)
            if isinstance(limit, int) and 0 < limit < n:  # 0: a window that is not used
                raise InputError(
                    f"remember: expected at most the {limit} {what} of the decoder, found {n}: {x.shape[1]} tokens and "
                    f"{2 * m} of memory; give shorter segments"
                )
        return state


class SegmentedState(NamedTuple):
    """memory: after the last whole segment. tokens [B, L − 1] and begun [B] int64: the tokens since then."""

    memory: TokenState
    tokens: Tensor
    begun: Tensor


class Segmented(nn.Module):
    """`logits, state = segmented(x, state=None, mask=None)`: `mnemos.remember` over segments of L tokens.

    A row's tokens are divided into segments of L, wherever calls are cut: [M_{t−1} ; s_t ; M_{t−1}] → M_t is computed
    when a segment is whole, and tokens of an unfinished one read M_{t−1}. x [B, T] int64; logits [B, T, V] predict the
    token after x[:, i]. mask [B, T] bool, True = valid, in new rows only: padding anywhere, which changes nothing.
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
    picks_positions = True

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
        """The decoder's head; see `Remembering.logits`."""
        return self.remembering.parts[2]

    def initial_state(self, batch_size: int, device: Device = None, dtype: torch.dtype | None = None) -> SegmentedState:
        """The state of `batch_size` new rows; passing None to `forward` means the same."""
        memory = self.remembering.initial_state(batch_size, device, dtype)
        count = torch.zeros_like(memory.writes)
        return SegmentedState(memory, count.new_zeros(batch_size, self.segment - 1), count)

    def forward(
        self,
        x: Tensor,
        state: SegmentedState | None = None,
        mask: Tensor | None = None,
        only: Tensor | None = None,
    ) -> tuple[Tensor, SegmentedState]:
        """See the class. only [B, T] bool: the logits at these positions alone, [n, V]."""
        check_token_ids(x, len(self.remembering.parts[0].weight), mask, _TOKENIZER)
        fresh = state is None
        if state is None:
            state = self.initial_state(len(x))
        if not isinstance(state, SegmentedState) or state.tokens.shape != (len(x), self.segment - 1):
            shape = tuple(state.tokens.shape) if isinstance(state, SegmentedState) else type(state).__name__
            raise InputError(
                f"expected the state that this model returned, {(len(x), self.segment - 1)}, found {shape}; pass None"
            )
        if mask is not None and not fresh:
            raise InputError("mask: expected none where rows go on, found one; read rows without their padding")

        rows = PackedRows.of(x, mask)
        if rows.mask is not None:
            # --- new rows with padding: all of them in each call, and only whole segments are written ---
            memory, parts = state.memory, []
            for tokens, valid in zip(rows.x.split(self.segment, 1), rows.mask.split(self.segment, 1), strict=True):
                part, after = self.remembering.hidden(tokens, memory, valid)
                memory = TokenMemory.written(memory, after.tokens, valid.sum(1) == self.segment)
                parts.append(part)
            hidden = rows.in_place(torch.cat(parts, 1), x.shape[1])
            counts = rows.mask.sum(1)
            begun, position = counts % self.segment, torch.arange(self.segment - 1, device=x.device)
            kept = F.pad(rows.x, (0, self.segment)).gather(1, (counts - begun)[:, None] + position)
            kept = (kept * (position < begun[:, None])).to(state.tokens.dtype)
            state = SegmentedState(memory, kept, begun)
        elif len(counts := state.begun.unique().tolist()) == 1:
            hidden, state = self._read_segments(x, state, counts[0])
        else:  # rows that have begun segments of different lengths, those of one length together
            before = state
            hidden, state = read_by_count(
                state.begun, lambda rows, count: self._read_segments(x[rows], select(before, rows), count)
            )
        return self.remembering.logits(hidden if only is None else hidden[only]), state

    if TYPE_CHECKING:
        __call__ = forward

    def _read_segments(self, x: Tensor, state: SegmentedState, count: int) -> tuple[Tensor, SegmentedState]:
        """Hidden states [B, T, D] of rows that all have `count` tokens of an unfinished segment."""
        memory, unfinished, parts, i = state.memory, state.tokens[:, :count], [], 0
        while i < x.shape[1]:
            before = unfinished.shape[1]
            unfinished = torch.cat([unfinished, x[:, i : i + self.segment - before]], 1)
            i += unfinished.shape[1] - before
            whole = unfinished.shape[1] == self.segment
            hidden, memory = self.remembering.hidden(unfinished, memory, writes=whole)
            parts.append(hidden[:, before:])
            unfinished = unfinished[:, :0] if whole else unfinished
        n = unfinished.shape[1]
        kept = torch.zeros_like(state.tokens)
        kept[:, :n] = unfinished
        return torch.cat(parts, 1), SegmentedState(memory, kept, torch.full_like(state.begun, n))
