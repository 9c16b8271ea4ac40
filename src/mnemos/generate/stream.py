"""Streams of tokens: a model's state after a prompt, and decoding from it at the cost of one step per token.

From top to bottom: `Stream`; `Tokens`, the iterator that draws one token after the other; checks.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mnemos._compat import pytree
from mnemos.memory.key_values import KeyValues
from mnemos.state_file import WeightsMark, load_state, save_state
from mnemos.types import InputError, Recurrent, RecurrentModel, State, join, likelihood_of, select

from .fused import DecodeStep, fused_step
from .sampling import checked_settings, draw, is_whole

NO_TOKEN = -1  # after the end of a row that has no token for its end
Ids = Sequence[int] | Tensor


class Stream:
    """A model and its state after some tokens, for B streams. Immutable: every method returns a new Stream.

        stream = Stream(model).prefill(prompt)               # prompt [B, T] int64
        tokens, stream = stream.generate(100)                # tokens [B, 100]
        for token in (made := stream.tokens(100)): ...       # token [B]; made.stream goes on
        two = stream.select(torch.tensor([0, 0]))            # fork: the same stream twice
        batch = Stream.join([two, other])
        stream.save("stream.safetensors"); stream = Stream.restore(model, "stream.safetensors")

    state: the model's state after all tokens but the last. last [B, 1]: the last token, which the next step reads. Both
    are None before the first `prefill`. A state belongs to the weights that read it: after they change, a stream raises
    InputError instead of going on or being saved; `Stream(model, state=stream.state, last=stream.last)` goes on all the
    same. `predict`, and `prefill` of one token, look for the writes alone that PyTorch counts; the others for all, but
    may miss those to a few numbers of a tensor that it does not count (`.data`, NumPy). The model runs without gradient
    and must be in eval mode: a stream does not change the mode, because other threads may use the model. Single tokens
    go through `step`, by default `mnemos.fused_step(model)`. Cost per token: one step, constant if the state has a
    constant size. Streams can be copied and pickled, with their model.
    """

    __slots__ = ("_weights", "last", "model", "state", "step")

    def __init__(
        self, model: nn.Module, step: DecodeStep | None = None, state: State = None, last: Tensor | None = None
    ):
        self.model, self.step, self.state, self.last = model, step or fused_step(model), state, last
        self._weights = None if last is None else WeightsMark(model)  # with which the tokens were read

    def _after(self, state: State, last: Tensor | None) -> "Stream":
        """A stream whose tokens the same weights have read."""
        after = type(self).__new__(type(self))
        after.model, after.step, after.state, after.last = self.model, self.step, state, last
        after._weights = self._weights or WeightsMark(self.model)
        return after

    def __getstate__(self) -> tuple[Any, ...]:
        """The parts, and whether the weights are still those that read the tokens: a copy has others, just as good."""
        current = self._weights is None or self._weights.is_of(self.model)
        return self.model, self.step, self.state, self.last, current

    def __setstate__(self, parts: tuple[Any, ...]) -> None:
        *own, current = parts
        self.__init__(*own)  # type: ignore[misc]
        if not current and self._weights is not None:
            self._weights.numbers = self._weights.writes = ()

    @property
    def rows(self) -> int:
        """B, the number of streams; 0 before the first `prefill`."""
        return 0 if self.last is None else len(self.last)

    def prefill(self, tokens: Tensor, chunk: int = 1024) -> "Stream":
        """The stream after the tokens [B, T], which are read `chunk` at a time: memory O(B·chunk).

        Tokens may have any integer type. Cost: a forward of T tokens. Raises InputError for tokens that do not fit, and
        for a model without a state or in training mode.
        """
        if chunk < 1:
            raise InputError(f"prefill: expected a chunk of at least 1 token, found {chunk}")
        tokens, state = check_tokens(self, tokens), self.state
        if self.last is None:
            state = new_state(self.model, len(tokens))
        else:
            check_weights(self, "prefill", tokens.shape[1] == 1)
            tokens = torch.cat([self.last, tokens], 1)
        with torch.no_grad():
            for part in tokens[:, :-1].split(chunk, 1) if tokens.shape[1] > 1 else ():
                _, state = (self.step if part.shape[1] == 1 else self.model)(part, state)
        return self._after(state, tokens[:, -1:].clone())

    def generate(
        self,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = 0,
        top_p: float | None = 1.0,
        generator: torch.Generator | None = None,
        min_p: float | None = 0.0,
        eos: int | Ids | None = None,
        stop: Ids | Sequence[Ids] | None = None,
    ) -> tuple[Tensor, "Stream"]:
        """Draw `length` tokens one after the other: tokens [B, length] int64, and the stream after them.

        temperature 0: the most probable token. top_k > 0: draw from the k most probable; top_p < 1: draw from the
        fewest tokens that have this probability together; min_p > 0: draw from those that have at least this share of
        the greatest probability (Nguyen et al. 2024); 0, 1 and 0, or None: from all. The same state of `generator`
        draws the same tokens.

        eos: a token, or several, that end a row; stop: a sequence of tokens, or several, that end it when they are its
        last new tokens. Rows end separately; see `Tokens` for what follows in them. The tokens are then [B, T], where
        T ≤ length is that of the longest row, and the stream is that of each row after its own end.
        Cost: one step of the model per token of the rows that have not ended. Raises InputError before the first
        `prefill`, for settings out of range, and for a model in training mode.
        """
        made = self.tokens(length, temperature, top_k, top_p, generator, min_p, eos, stop)
        tokens = list(made)
        last = require_tokens(self, "generate")
        return torch.stack(tokens, 1) if tokens else last.new_empty(len(last), 0), made.stream

    def tokens(
        self,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = 0,
        top_p: float | None = 1.0,
        generator: torch.Generator | None = None,
        min_p: float | None = 0.0,
        eos: int | Ids | None = None,
        stop: Ids | Sequence[Ids] | None = None,
    ) -> "Tokens":
        """What `generate` draws, as an iterator over tokens [B] that are drawn when they are asked for.

            for token in (made := stream.tokens(100, eos=0)):
                print(token.tolist())
            stream = made.stream                             # after the tokens so far, also inside the loop

        Arguments, cost and errors are those of `generate`.
        """
        require_tokens(self, "generate")
        check_eval(self.model, "generate")
        check_weights(self, "generate")
        if not is_whole(length) or length < 0:
            raise InputError(f"generate: expected a length that is a whole number of at least 0, found {length!r:.60}")
        k, p, least = checked_settings(temperature, top_k, top_p, min_p)
        likelihood = likelihood_of(self.model)

        def draw_next(outputs: Tensor) -> Tensor:
            return draw(outputs, temperature, k, p, generator, likelihood, least)

        ends, fill = endings(eos, stop, getattr(getattr(self.model, "config", None), "vocab_size", None))
        return Tokens(self, length, draw_next, ends, fill)

    def predict(self) -> Tensor:
        """The model's outputs [B, V] for the next token."""
        last = require_tokens(self, "predict")
        check_eval(self.model, "predict")
        check_weights(self, "predict", one_token=True)
        with torch.no_grad():
            return self.step(last, self.state)[0][:, -1]

    def select(self, rows: Tensor) -> "Stream":
        """The streams of some rows: indices [R], where a repeated index forks a stream, or a mask [B]."""
        require_tokens(self, "select")
        return self._after(*select((self.state, self.last), rows))

    @staticmethod
    def join(streams: Sequence["Stream"]) -> "Stream":
        """Streams of one model as one batch, in order; they may have read different numbers of tokens."""
        if not streams:
            raise InputError("join: expected at least one stream, found none")
        for stream in streams:
            require_tokens(stream, "join")
        if len({(id(s.model), s._weights.numbers if s._weights else ()) for s in streams}) > 1:
            raise InputError("join: expected streams of one model, read with the same weights, found several")
        return streams[0]._after(*join([(s.state, s.last) for s in streams]))

    def save(self, file: str | Path, dtype: str | torch.dtype | None = None) -> None:
        """Write state and last token to a safetensors file, atomically; `restore` reads it, bit for bit without dtype.

        The file holds hashes of itself and of the model's weights, which must be those that read the tokens. dtype:
        "bfloat16" or "int8", for a smaller file (`mnemos.save_state`). Cost: reading all weights once.
        """
        last = require_tokens(self, "save")
        check_weights(self, "save")
        save_state((last, self.state), file, self.model, dtype, "stream")

    @classmethod
    def restore(cls, model: nn.Module, file: str | Path, step: DecodeStep | None = None) -> "Stream":
        """Read a stream that `save` wrote. Raises InputError for a missing or damaged file, or one of another model.

        Cost: reading the file, and all weights once.
        """
        state = new_state(model, 1)  # says what a stream's model is
        last = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        last, state = load_state(file, model, (last, state), "stream")
        return cls(model, step, state, last)

    def __repr__(self) -> str:
        return f"Stream({type(self.model).__name__}, {self.rows} rows)"


class Tokens(Iterator[Tensor]):
    """What `Stream.tokens` returns: an iterator over tokens [B] int64, each drawn when it is asked for.

    A row ends with a token of `eos`, or when its last new tokens are a sequence of `stop`; both belong to the row.
    Afterwards it has the first token of `eos`, or -1 without one, and the model reads it no further. The iterator ends
    after `length` tokens, or when all rows have ended. Every row draws in every step, also after its end, so what a
    row draws does not depend on the ends of the others.

    Attributes:
        ended: [B], which rows have ended.
    """

    def __init__(
        self, stream: "Stream", length: int, draw: Callable[[Tensor], Tensor], ends: list[list[int]], fill: int
    ) -> None:
        assert stream.last is not None
        self._source, self._left, self._draw, self._ends, self._fill = stream, length, draw, ends, fill
        self._state, self._last = stream.state, stream.last
        self._rows = list(range(stream.rows))  # that have not ended, in the order of `_state`
        self._finished: list[tuple[list[int], tuple[State, Tensor]]] = []  # rows that have, with state and last token
        self._longest = max(map(len, ends), default=0)
        self._newest: list[list[int]] = [[] for _ in self._rows]  # the last tokens of each row

    @property
    def ended(self) -> list[bool]:
        return [row not in self._rows for row in range(self._source.rows)]

    @property
    def stream(self) -> "Stream":
        """The stream after the tokens so far, each row after its own. Cost: a copy of the state if a row has ended."""
        running = [(self._rows, (self._state, self._last))] if self._rows else []
        parts = [*self._finished, *running]
        if not parts:  # a stream of no rows
            return self._source
        order = torch.tensor([row for rows, _ in parts for row in rows]).argsort()
        if len(parts) == 1:
            in_order = bool((order.diff() > 0).all())
            return self._source._after(*(parts[0][1] if in_order else select(parts[0][1], order)))

        def shorten(part: object) -> object:  # keys and values that no row has any more are left out
            return part.trimmed() if isinstance(part, KeyValues) else part

        merged = select(join([both for _, both in parts]), order)
        return self._source._after(*pytree.tree_map(shorten, merged, is_leaf=lambda part: isinstance(part, KeyValues)))

    def __next__(self) -> Tensor:
        if not self._left or not self._rows:
            raise StopIteration
        self._left -= 1
        with torch.no_grad():
            outputs, self._state = self._source.step(self._last, self._state)
            outputs, rows = outputs[:, -1], self._rows
            if self._finished:  # rows that have ended draw too, from any outputs
                index = dict(zip(rows, range(len(rows)), strict=True))
                outputs = outputs[[index.get(row, 0) for row in range(self._source.rows)]]
            drawn = self._draw(outputs)
            if not self._ends:
                self._last = drawn[:, None].clone()
                return drawn
            # --- the tokens, with those of ended rows filled in; rows that end here are set aside ---
            values = drawn.tolist()
            for row in rows:
                self._newest[row] = [*self._newest[row], values[row]][-self._longest :]
            ends = [any(self._newest[row][-len(end) :] == end for end in self._ends) for row in rows]
            running = torch.tensor(rows, device=drawn.device)
            tokens = torch.full_like(drawn, self._fill).index_copy(0, running, drawn[running])
            self._last = drawn[running, None]
            if any(ends):
                now, both = torch.tensor(ends, device=drawn.device), (self._state, self._last)
                self._finished.append(([row for row, end in zip(rows, ends, strict=True) if end], select(both, now)))
                self._rows = [row for row, end in zip(rows, ends, strict=True) if not end]
                if self._rows:
                    self._state, self._last = select(both, ~now)
            return tokens


def endings(eos: int | Ids | None, stop: Ids | Sequence[Ids] | None, size: int | None) -> tuple[list[list[int]], int]:
    """The sequences that end a row, and what follows in it. size: of the vocabulary, if it is known.

    Raises InputError unless eos is a token or several, and stop a sequence of tokens or several.
    """

    def ids(value: object, expected: str) -> list[int]:
        tokens = value.tolist() if isinstance(value, Tensor) else value
        if isinstance(tokens, str) or not isinstance(tokens, Sequence) or not tokens or not all(map(is_whole, tokens)):
            raise InputError(f"expected {expected}, found {value!r:.60}; encode the text with the model's vocabulary")
        if min(tokens) < 0 or (size is not None and max(tokens) >= size):
            known = f"from 0 to {size - 1}" if size is not None else "of at least 0"
            raise InputError(f"expected {expected}, each {known}, found {value!r:.60}; use the model's vocabulary")
        return [int(token) for token in tokens]

    first = [] if eos is None else ids([eos] if is_whole(eos) else eos, "eos as a token id or several")
    one = not isinstance(stop, list | tuple) or not stop or is_whole(stop[0])
    several: Sequence[Any] = () if stop is None else (stop,) if one else stop  # type: ignore[assignment]
    ends = [ids(one, "stop as a sequence of token ids, or several") for one in several]
    return [[token] for token in first] + ends, first[0] if first else NO_TOKEN


def require_tokens(stream: Stream, verb: str) -> Tensor:
    """The last token [B, 1]. Raises InputError if the stream has read none; the message starts with `verb`."""
    if stream.last is None:
        raise InputError(f"{verb}: expected a stream that has read tokens, found a new one; call prefill(prompt) first")
    return stream.last


def check_eval(model: nn.Module, verb: str) -> None:
    """Raise InputError if a part of the model is in training mode; the message starts with `verb`."""
    if any(part.training for part in model.modules()):
        raise InputError(f"{verb}: expected a model in eval mode, found training mode; call model.eval() first")


def check_weights(stream: Stream, verb: str, one_token: bool = False) -> None:
    """Raise InputError if the model's weights are not those that read the stream's tokens (`WeightsMark.is_of`)."""
    if stream._weights is None or not stream._weights.is_of(stream.model, one_token):
        raise InputError(
            f"{verb}: expected the weights that read the stream's tokens, found others; read the tokens again with "
            "Stream(model).prefill"
        )


def check_tokens(stream: Stream, tokens: Tensor) -> Tensor:
    """The tokens [B, T] as int64; InputError if the stream cannot read them.

    All are checked now: the model would refuse the last one only at the next step.
    """
    check_eval(stream.model, "prefill")
    fits = isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.numel() and tokens.dtype != torch.bool
    if not fits or tokens.is_floating_point() or tokens.is_complex() or len(tokens) != (stream.rows or len(tokens)):
        other = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"expected tokens [{stream.rows or 'B'}, T] of integers, T at least 1, found {other}")
    tokens = tokens.long()
    size = getattr(getattr(stream.model, "config", None), "vocab_size", None)
    if size is not None and tokens.device.type == "cpu":
        low, high = torch.aminmax(tokens)
        if low < 0 or high >= size:
            raise InputError(
                f"expected token ids 0 to {size - 1}, found {int(low)} to {int(high)}; use the model's vocabulary"
            )
    return tokens


def new_state(model: nn.Module, rows: int, verb: str = "Stream") -> State:
    """The state of new rows. A model of another package need not declare whether it is autoregressive.

    Raises InputError if the model is no causal language model with a state; the message starts with `verb`.
    """
    predicts = not isinstance(model, RecurrentModel) or model.autoregressive
    state = model.initial_state(rows) if isinstance(model, Recurrent) and predicts else None
    if state is None:
        more = ", mnemos.functional(model) of a model of Transformers, or a model of yours that has"
        theirs = f"{more} initial_state(batch_size, device, dtype) and forward(ids, state)" if verb == "Stream" else ""
        raise InputError(
            f"{verb}: expected a causal language model with a state, found {type(model).__name__} "
            f"{'without one' if predicts else 'that predicts no next token'}; use mnemos.Transformer or "
            f"mnemos.Memformer of tokens{theirs}"
        )
    return state
