"""Drafts of speculative decoding: the next tokens as a smaller model, or the tokens so far, suggest them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mnemos.types import InputError, LogProbLikelihood, State, likelihood_of, select

from .rollback import together, without_last
from .sampling import probabilities, scores_of
from .stream import Step, Stream


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
        tokens = [
            drafted + [row.tokens[-1]] * (width - len(drafted)) for row, drafted in zip(self.rows, found, strict=True)
        ]
        table = torch.tensor(tokens, dtype=torch.int64, device=last.device).view(len(last), width)
        return Proposal(table, [len(drafted) for drafted in found], None)

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
        self.step: Step = stream.step
        self.likelihood = checked_likelihood(stream.model)
        self.states: list[State] = [stream.state]
        self.drafted: Tensor | None = None  # [R, k]

    def propose(self, last: Tensor, most: int, settings: Settings) -> Proposal:
        """See `Drafter`. Cost: `most` steps of the model."""
        tokens, chances = [last], []
        for _ in range(most):
            outputs, state = self.step(tokens[-1], self.states[-1])
            self.states.append(state)
            scores = scores_of(outputs[:, -1], self.likelihood)
            if settings.temperature == 0:
                tokens.append(scores.argmax(-1, keepdim=True))
            else:
                chances.append(settings.probabilities(scores))
                tokens.append(torch.multinomial(chances[-1], 1, generator=settings.generator))
        self.drafted = torch.cat(tokens, 1)
        return Proposal(self.drafted[:, 1:], [most] * len(last), torch.stack(chances, 1) if chances else None)

    def keep(self, accepted: Sequence[int], following: Sequence[Sequence[int]]) -> None:
        """See `Drafter`. Cost: a step if a row has accepted all tokens, the last of which was not read yet."""
        assert self.drafted is not None
        counts, read = [n + 1 for n in accepted], len(self.states) - 1  # of the tokens [last, drafted ..]
        state = None
        if max(counts) <= read:
            state = without_last(self.states[0], self.states[-1], counts, read) if read else None
        if state is None:
            state = self._state_after(counts, read)
        self.states, self.drafted = [state], None

    def _state_after(self, counts: list[int], read: int) -> State:
        assert self.drafted is not None
        parts = []
        for n in sorted(set(counts)):
            rows = [row for row, count in enumerate(counts) if count == n]
            index = torch.tensor(rows, device=self.drafted.device)
            some = len(rows) < len(counts)
            state = self.states[min(n, read)]
            state = select(state, index) if some else state
            if n > read:
                state = self.step(self.drafted[index, read:], state)[1]
            parts.append((rows, state))
        return together(parts)

    def select(self, rows: Tensor) -> "ModelDrafter":
        """See `Drafter`."""
        chosen = ModelDrafter.__new__(ModelDrafter)
        chosen.step, chosen.likelihood, chosen.drafted = self.step, self.likelihood, None
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
