"""Speculative decoding for every model with a state: several tokens for a call, with the model's own distribution.

A draft suggests the next tokens: a smaller model, or the tokens so far. One call of the model checks them all.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mnemos.types import Bounded, InputError, LogProbLikelihood, State, likelihood_of, select

from .decoder_step import DecodeStep, pack
from .rollback import Rollback, check_cuts, merge_rows, without_last
from .sampling import checked_settings, is_whole, most_probable, probabilities, scores_of
from .stream import Ids, Stream, check_eval, endings, require_tokens


@dataclass(frozen=True)
class Settings:
    """How tokens are drawn: those of `Stream.generate`, checked."""

    temperature: float
    top_k: int
    top_p: float
    generator: torch.Generator | None
    min_p: float = 0.0

    def probabilities(self, scores: Tensor) -> Tensor:
        """The distributions [.., V] of logits [.., V] under these settings, at a temperature above 0."""
        return probabilities(scores, self.temperature, self.top_k, self.top_p, self.min_p)


class Proposal(NamedTuple):
    """tokens [R, k] int64, of which row r has drafted the first counts[r]; the others are filled in.

    probabilities [R, k, V]: what each token was drawn from; None: the draft knows no other token.
    """

    tokens: Tensor
    counts: list[int]
    probabilities: Tensor | None


class Drafter(Protocol):
    """What drafts the tokens of R rows, while they are generated."""

    def propose(self, last: Tensor, most: int, settings: Settings) -> Proposal:
        """At most `most` tokens after those so far, of which last [R, 1] are the newest."""
        ...

    def keep(self, accepted: Sequence[int], following: Sequence[Sequence[int]]) -> None:
        """Go on after the first `accepted[r]` tokens of the proposal. following[r]: these, and what came after them."""
        ...

    def select(self, rows: Tensor) -> "Drafter":
        """A drafter of some rows: indices [R]."""
        ...


@dataclass(frozen=True, eq=False)
class Lookup:
    """Drafts from the tokens so far: what followed the last tokens where they occurred before ("prompt look-up").

    The last `longest` tokens are looked up first, then fewer, down to `shortest`; of several places the latest counts.
    A row without such a place drafts nothing. It helps where a text repeats what was given: code, summaries, tables.
    No model is called. Cost: a dictionary entry for each token and length, made in Python.

    Attributes:
        tokens: [B, T] int64, what the rows of the stream have read and generated.
        longest, shortest: the tokens that are looked up, at least 1.
    """

    tokens: Tensor
    longest: int = 4
    shortest: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor) or self.tokens.dim() != 2 or not self.tokens.numel():
            found = tuple(self.tokens.shape) if isinstance(self.tokens, Tensor) else type(self.tokens).__name__
            raise InputError(f"Lookup: expected tokens [B, T], those of the stream, found {found}; pass the prompt")
        if not 1 <= self.shortest <= self.longest:
            raise InputError(
                f"Lookup: expected 1 ≤ shortest ≤ longest, found {self.shortest} and {self.longest}; change one"
            )


class LookupDrafter:
    """The drafter of a `Lookup`."""

    def __init__(self, lookup: Lookup) -> None:
        lengths = range(lookup.longest, lookup.shortest - 1, -1)
        self.rows = [_Row(row, lengths) for row in lookup.tokens.tolist()]

    def propose(self, last: Tensor, most: int, settings: Settings) -> Proposal:
        """See `Drafter`."""
        found = [row.after(most) for row in self.rows]
        width = max(map(len, found), default=0)
        tokens = [draft + [row.tokens[-1]] * (width - len(draft)) for row, draft in zip(self.rows, found, strict=True)]
        table = torch.tensor(tokens, dtype=torch.int64, device=last.device).view(len(last), width)
        return Proposal(table, [len(draft) for draft in found], None)

    def keep(self, accepted: Sequence[int], following: Sequence[Sequence[int]]) -> None:
        """See `Drafter`."""
        for row, tokens in zip(self.rows, following, strict=True):
            for token in tokens:
                row.add(token)

    def select(self, rows: Tensor) -> "LookupDrafter":
        """See `Drafter`."""
        chosen = LookupDrafter.__new__(LookupDrafter)
        chosen.rows = [self.rows[row] for row in rows.tolist()]
        return chosen


class _Row:
    """The tokens of a row, and for each length where every run of so many tokens was followed last."""

    def __init__(self, tokens: Sequence[int], lengths: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in lengths}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        place = len(self.tokens)
        for n, places in self.places.items():
            if place >= n:
                places[tuple(self.tokens[-n:])] = place
        self.tokens.append(token)

    def after(self, most: int) -> list[int]:
        for n, places in self.places.items():
            place = places.get(tuple(self.tokens[-n:]))
            if place is not None:
                found = self.tokens[place : place + most]
                for i in range(most - len(found)):  # the copy goes on with what it has copied
                    found.append(found[i])
                return found
        return []


class ModelDrafter:
    """The drafter of a Stream of a smaller model. It keeps its states after each token, so going back is free."""

    def __init__(self, stream: Stream) -> None:
        self.step: DecodeStep = stream.step
        self.likelihood = checked_likelihood(stream.model)
        self.states: list[State] = [stream.state]
        self.tokens: Tensor | None = None  # [R, 1 + k]: the newest token and the draft after it

    def propose(self, last: Tensor, most: int, settings: Settings) -> Proposal:
        """See `Drafter`. Cost: `most` steps of the model."""
        tokens, chances = [last], []
        for _ in range(most):
            outputs, state = self.step(tokens[-1], self.states[-1])
            self.states.append(state)
            scores = scores_of(outputs[:, -1], self.likelihood)
            if settings.temperature == 0:
                tokens.append(most_probable(scores)[:, None])
            else:
                chances.append(settings.probabilities(scores))
                tokens.append(torch.multinomial(chances[-1], 1, generator=settings.generator))
        self.tokens = torch.cat(tokens, 1)
        return Proposal(self.tokens[:, 1:], [most] * len(last), torch.stack(chances, 1) if chances else None)

    def keep(self, accepted: Sequence[int], following: Sequence[Sequence[int]]) -> None:
        """See `Drafter`. Cost: a step if a row has accepted all tokens, the last of which was not read yet."""
        assert self.tokens is not None
        counts, read = [n + 1 for n in accepted], len(self.states) - 1  # of the tokens [last, drafted ..]
        state = None
        if max(counts) <= read:
            state = without_last(self.states[0], self.states[-1], counts, read) if read else None
        if state is None:
            state = self._state_after(counts, read)
        self.states, self.tokens = [state], None

    def _state_after(self, counts: list[int], read: int) -> State:
        assert self.tokens is not None
        parts = []
        for n in sorted(set(counts)):
            rows = [row for row, count in enumerate(counts) if count == n]
            index = torch.tensor(rows, device=self.tokens.device)
            some = len(rows) < len(counts)
            state = self.states[min(n, read)]
            state = select(state, index) if some else state
            if n > read:
                state = self.step(self.tokens[index, read:], state)[1]
            parts.append((rows, state))
        return merge_rows(parts)

    def select(self, rows: Tensor) -> "ModelDrafter":
        """See `Drafter`."""
        chosen = ModelDrafter.__new__(ModelDrafter)
        chosen.step, chosen.likelihood, chosen.tokens = self.step, self.likelihood, None
        chosen.states = [select(self.states[-1], rows)]
        return chosen


def checked_likelihood(model: object) -> LogProbLikelihood | None:
    """The model's likelihood, None if it returns logits. Raises InputError for one without probabilities of tokens."""
    likelihood = likelihood_of(model)
    if likelihood is None or isinstance(likelihood, LogProbLikelihood):
        return likelihood
    raise InputError(
        f"speculate: expected logits or a likelihood with `log_prob`, found {type(likelihood).__name__}; use "
        "Stream.generate, which draws"
    )


PACKED = 64  # tokens from which on packing the model's large matrices is worth its time


@dataclass(frozen=True)
class Statistics:
    """What speculative decoding has done, for all rows together.

    Attributes:
        tokens: generated tokens.
        drafted, accepted: drafted tokens, and those of them that were generated.
        calls: calls of the model, each for all rows that are not done; plain decoding has `tokens` / rows.
        again: those of the calls that only read accepted tokens again (`rollback.Rollback`).
        seconds: of the whole call of `speculate`.
    """

    tokens: int
    drafted: int
    accepted: int
    calls: int
    again: int
    seconds: float

    @property
    def acceptance(self) -> float:
        """The share of drafted tokens that was accepted; 0 if none was drafted."""
        return self.accepted / max(1, self.drafted)

    @property
    def tokens_per_call(self) -> float:
        """Generated tokens of all rows per call of the model."""
        return self.tokens / max(1, self.calls)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all rows per second."""
        return self.tokens / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        return (
            f"{self.accepted:,} of {self.drafted:,} drafted tokens accepted ({self.acceptance:.0%}), "
            f"{self.tokens_per_call:.2f} tokens per call, {self.tokens_per_second:,.0f} tokens/s"
        )


class Speculated(NamedTuple):
    """tokens [B, T] int64, T ≤ length; the stream after them, and the draft after them; and what it has cost."""

    tokens: Tensor
    stream: Stream
    draft: Stream | Lookup
    statistics: Statistics


def speculate(
    stream: Stream,
    draft: Stream | Lookup,
    length: int,
    drafted: int = 8,
    temperature: float = 1.0,
    top_k: int | None = 0,
    top_p: float | None = 1.0,
    generator: torch.Generator | None = None,
    min_p: float | None = 0.0,
    eos: int | Ids | None = None,
    stop: Ids | Sequence[Ids] | None = None,
) -> Speculated:
    """`stream.generate(length, ...)` in fewer calls of the model: a draft suggests tokens, one call checks them all.

        small = mnemos.Stream(small_model).prefill(prompt)
        tokens, stream, small, statistics = mnemos.speculate(mnemos.Stream(model).prefill(prompt), small, 200)
        found = mnemos.speculate(stream, mnemos.Lookup(prompt), 200, temperature=0)

    draft: a Stream of a smaller model with the same vocabulary, or a `Lookup`; it has read the same tokens. drafted:
    the most tokens of a draft. After a rejection the next draft is shorter, after an accepted one longer.

    temperature 0: the tokens are those of `Stream.generate`. Else they have its distribution, with the same settings
    (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", algorithm 1): a token drawn
    from q is accepted with probability min(1, p/q), and the first rejected one is replaced by a draw from
    max(0, p − q), normalised; after a draft that was accepted whole, one more token is drawn from p. p and q are the
    distributions after temperature, top_k, top_p and min_p. Both hold to rounding: a call of several tokens adds in
    another order than single steps, which may turn a tie.

    eos, stop: what ends a row, as in `Stream.generate`: T is then the length of the longest row, others are filled in,
    and stream and draft are those of each row after its own end.

    Every row accepts its own number of tokens. The state after them is exact for every memory, because states are
    values: `Rollback` says how it is made, and at what cost. Cost: a call of the model per round, of the last token,
    the draft, and up to `drafted` tokens that are read again; large matrices are packed once per call of `speculate`.
    It pays where such a call costs less than a step for each accepted token: see docs/streams.md.

    Raises InputError as `Stream.generate` does, for a draft of other rows, tokens or vocabulary, for models whose
    outputs depend on the cuts of a sequence (splits "segments"), and likelihoods without probabilities of tokens.
    """
    start = time.perf_counter()
    _check(stream, draft, length, drafted)
    top_k, top_p, min_p = checked_settings(temperature, top_k, top_p, min_p)
    settings = Settings(temperature, top_k, top_p, generator, min_p)
    with torch.no_grad():
        size = getattr(getattr(stream.model, "config", None), "vocab_size", None)
        run = _Run(stream, draft, length, drafted, settings, *endings(eos, stop, size))
        while run.places:
            run.round()
        found = run.finish()
    return found._replace(statistics=run.statistics(time.perf_counter() - start))


class _Run:
    """The rows that are not done yet, and what is finished."""

    def __init__(
        self,
        stream: Stream,
        draft: Stream | Lookup,
        length: int,
        drafted: int,
        settings: Settings,
        ends: Sequence[Sequence[int]],
        fill: int,
    ) -> None:
        self.stream, self.draft, self.length, self.most, self.settings = stream, draft, length, drafted, settings
        self.ends, self.fill = ends, fill
        self.likelihood = checked_likelihood(stream.model)
        self.drafter: Drafter = LookupDrafter(draft) if isinstance(draft, Lookup) else ModelDrafter(draft)
        model = pack(stream.model) if length >= PACKED else stream.model
        self.reading = Rollback(model, stream.step, stream.state, drafted)
        assert stream.last is not None
        self.last = stream.last
        self.written: list[list[int]] = [[] for _ in range(stream.rows)]
        self.places = list(range(stream.rows)) if length else []  # which row of the stream each running row is
        self.finished: list[tuple[list[int], State]] = [] if length else [(list(range(stream.rows)), stream.state)]
        self.drafts: list[tuple[list[int], Drafter]] = [] if length else [(list(range(stream.rows)), self.drafter)]
        self.size, self.draft_count, self.accept_count = drafted, 0, 0
        room = stream.model.room(stream.state) if isinstance(stream.model, Bounded) else None
        self.room = None if room is None else room.tolist()  # what each row of the stream may read, with its last token

    def round(self) -> None:
        """Draft, check, and go on after what was accepted."""
        room = [self.length - len(self.written[place]) for place in self.places]
        most = min(self.size, max(room) - 1, self._positions())
        proposal = self.drafter.propose(self.last, most, self.settings)
        outputs = self.reading.read(torch.cat([self.last, proposal.tokens.to(self.last)], 1))
        scores = scores_of(outputs, self.likelihood)
        accepted, following = check_draft(scores, proposal, self.settings)
        tokens = proposal.tokens.tolist()
        new, ended = [], []
        for place, row, n, token, left in zip(self.places, tokens, accepted, following.tolist(), room, strict=True):
            to = self._end(self.written[place], [*row[:n], token][:left])
            new.append([*row[:n], token][: to or left])
            ended.append(to > 0 or len(new[-1]) == left)
        kept = [len(row) - 1 for row in new]
        self.reading.keep([n + 1 for n in kept])
        self.drafter.keep(kept, new)
        self.last = torch.tensor([row[-1:] for row in new], device=self.last.device)
        self.draft_count += sum(proposal.counts)
        self.accept_count += sum(min(n, len(row)) for n, row in zip(accepted, new, strict=True))
        self.size = max(1, min(self.most, max(accepted) + 2))
        for place, row in zip(self.places, new, strict=True):
            self.written[place] += row
        self._leave(ended)

    def _end(self, before: Sequence[int], new: Sequence[int]) -> int:
        """How many of a row's new tokens there are up to its end; 0 if it goes on."""
        newest = list(before[-max(map(len, self.ends), default=0) :]) if self.ends else []
        for n, token in enumerate(new if self.ends else (), 1):
            newest.append(token)
            if any(newest[-len(end) :] == list(end) for end in self.ends):
                return n
        return 0

    def _positions(self) -> int:
        """The most tokens of a draft for which every row has a position; at least 0.

        A row that needs a few more tokens reads a whole draft beside others. Rows without a position for the next token
        do not count: rotary positions go on, and for others the model raises its error.
        """
        if self.room is None:
            return self.most
        left = [self.room[place] - len(self.written[place]) - 1 for place in self.places]
        return min((n for n in left if n >= 0), default=self.most)

    def _leave(self, done: list[bool]) -> None:
        """Set aside the rows that have all their tokens, or their end."""
        if not any(done):
            return
        gone = [i for i, is_done in enumerate(done) if is_done]
        stay = [i for i, is_done in enumerate(done) if not is_done]
        state, drafter = self.reading.finish(), self.drafter
        if stay:
            index, rest = (torch.tensor(rows, device=self.last.device) for rows in (gone, stay))
            state, drafter = select(state, index), self.drafter.select(index)
            self.reading.select(rest)
            self.drafter, self.last = self.drafter.select(rest), self.last[rest]
        self.finished.append(([self.places[i] for i in gone], state))
        self.drafts.append(([self.places[i] for i in gone], drafter))
        self.places = [self.places[i] for i in stay]

    def finish(self) -> Speculated:
        """The tokens, and stream and draft after them."""
        before = self.stream.last
        assert before is not None
        longest = max(map(len, self.written))
        rows = [[*row, *[self.fill] * (longest - len(row))] for row in self.written]
        tokens = torch.tensor(rows, dtype=torch.int64, device=before.device).view(len(before), longest)
        last = torch.tensor([row[-1:] for row in self.written], device=before.device) if longest else before
        stream = Stream(self.stream.model, self.stream.step, merge_rows(self.finished), last)
        if isinstance(self.draft, Lookup):
            text = [[*old, *row] for old, row in zip(self.draft.tokens.tolist(), self.written, strict=True)]
            most = max(map(len, text))
            text = [[row[0]] * (most - len(row)) + row for row in text]  # of one length; in front, it is found last
            after: Stream | Lookup = Lookup(torch.tensor(text).to(tokens), self.draft.longest, self.draft.shortest)
        else:
            states = [(rows, part.states[-1]) for rows, part in self.drafts if isinstance(part, ModelDrafter)]
            after = Stream(self.draft.model, self.draft.step, merge_rows(states), last)
        return Speculated(tokens, stream, after, self.statistics(0.0))

    def statistics(self, seconds: float) -> Statistics:
        """What was done so far, in so many seconds."""
        tokens = sum(map(len, self.written))
        return Statistics(tokens, self.draft_count, self.accept_count, self.reading.calls, self.reading.again, seconds)


def check_draft(scores: Tensor, proposal: Proposal, settings: Settings) -> tuple[list[int], Tensor]:
    """How many tokens of a draft are accepted, and the token after them [R].

    scores [R, k + 1, V]: the logits after the last token and after each drafted one.
    """
    tokens, counts = proposal.tokens, torch.tensor(proposal.counts, device=scores.device)
    k, rows = tokens.shape[1], torch.arange(len(tokens), device=scores.device)
    in_draft = torch.arange(k, device=scores.device) < counts[:, None]
    if settings.temperature == 0:
        best = most_probable(scores)
        accepted = ((best[:, :k] == tokens) & in_draft).cumprod(1).sum(1)
        return accepted.tolist(), best[rows, accepted]
    p = settings.probabilities(scores)
    q = proposal.probabilities
    if q is None:
        q = F.one_hot(tokens, p.shape[-1]).to(p.dtype)
    chance, drawn = (x.gather(-1, tokens[..., None])[..., 0] for x in (p[:, :k], q))
    # u < p/q, without a division: a token that is impossible for the model is never accepted
    u = torch.rand(chance.shape, generator=settings.generator, device=chance.device)
    accepted = ((u * drawn < chance) & in_draft).cumprod(1).sum(1)
    following = p[rows, accepted]
    if k:
        rest = (following - q[rows, accepted.clamp(max=k - 1)]).clamp(min=0)
        rejected = (accepted < counts) & (rest.sum(1) > 0)  # no rest: p and q differ by rounding only
        following = torch.where(rejected[:, None], rest, following)
    return accepted.tolist(), torch.multinomial(following, 1, generator=settings.generator)[:, 0]


def _check(stream: Stream, draft: Stream | Lookup, length: int, drafted: int) -> None:
    if not isinstance(stream, Stream):
        raise InputError(
            f"speculate: expected a Stream, found {type(stream).__name__}; give mnemos.Stream(model).prefill(prompt)"
        )
    last = require_tokens(stream, "speculate")
    check_eval(stream.model, "speculate")
    check_cuts(stream.model, "speculate")
    if not (is_whole(length) and is_whole(drafted) and length >= 0 and drafted >= 1):
        raise InputError(
            "speculate: expected a length of at least 0 and drafted of at least 1, both whole numbers, found "
            f"{length!r} and {drafted!r}"
        )
    if isinstance(draft, Lookup):
        newest = draft.tokens[:, -1:]
    elif isinstance(draft, Stream):
        newest = require_tokens(draft, "speculate: draft")
        check_eval(draft.model, "speculate: draft")
        sizes = [getattr(getattr(x.model, "config", None), "vocab_size", None) for x in (stream, draft)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise InputError(
                f"speculate: expected a draft with the model's vocabulary of {sizes[0]} tokens, found {sizes[1]}; use "
                "a model of the same vocabulary"
            )
    else:
        raise InputError(
            f"speculate: expected a Stream of a smaller model or a Lookup as draft, found {type(draft).__name__}; "
            "give mnemos.Stream(smaller).prefill(prompt) or mnemos.Lookup(prompt)"
        )
    if len(newest) != len(last) or not torch.equal(newest.to(last), last):
        raise InputError(
            f"speculate: expected a draft that has read the tokens of the stream's {len(last)} rows, found "
            f"{len(newest)} rows" + (" with another last token" if len(newest) == len(last) else "") + "; give it the "
            "same tokens"
        )
