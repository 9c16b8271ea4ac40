"""How a prediction changes when a part of the memory is emptied, at each boundary of segments before it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mnemos.types import InputError, State, join, leaves, likelihood_of, reset, select

from .memories import Array, Memory, Reader

WHOLE = "the whole state"
PLACES = 6  # words whose prediction is looked at, where the document asks no question
TRACED = 32  # boundaries before a place, at which memory is emptied
KNOWN = 0.5  # a probability that is never as great is no answer
LOST = 0.5  # of the probability as read: below it, the answer is lost
_LEAST = 40  # rows of a place
UNITS = 64  # that are emptied one by one; of more, those that were read most
BYTES = 256 << 20  # of states that are held at once
WORK = 3e12  # operations of all rows with an emptied part, about a minute of one core


class Change(NamedTuple):
    """What was emptied: a memory by number, and a unit of it; unit None: all of it; memory None: several memories.

    alone: all units of the memory but this one were emptied.
    """

    name: str
    memory: int | None = None
    unit: int | None = None
    alone: bool = False


class Effect(NamedTuple):
    """A change, and the probability of the answer after it, made before each of `Place.boundaries`; NaN: not made."""

    change: Change
    probability: Array


@dataclass
class Place:
    """A predicted token: its number in the document (N: after the end), which token it is, its probability as read.

    guess: the likeliest token, and its probability. boundaries: segments before which memory was emptied. The texts are
    those of the tokens.
    """

    token: int
    answer: int
    probability: float
    guess: int
    certainty: float
    answer_text: str = ""
    guess_text: str = ""
    boundaries: list[int] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


def choose_places(targets: Sequence[int], helped: Array, length: int) -> list[int]:
    """The targets to look at, by place: all if they are few, else those that memory helped most, one a segment."""
    counted = [i for i, target in enumerate(targets) if target >= 0]
    if len(counted) <= PLACES:
        return counted
    found: dict[int, int] = {}
    known = np.nan_to_num(helped[1:], nan=-np.inf)
    for i in np.argsort(-known, kind="stable").tolist():
        if len(found) == PLACES or not known[i] > 0:
            break
        found.setdefault(i // length, i)
    return sorted(found.values())


def emptied_by_kind(readers: Sequence[Reader], state: State) -> dict[str, State]:
    """The state with all memories of one kind as in a new row, by kind; other memories and the position stay.

    readers: of all layers. Kinds that have nothing to empty are left out.
    """
    found: dict[str, State] = {}
    for reader in readers:
        changed = reader.emptied(found.get(reader.all_of_kind, state), None)
        if changed is not None:
            found[reader.all_of_kind] = changed
    return found


class Effects:
    """Empties parts of one model's state. memories: what the readers recorded; every: the readers of all layers."""

    def __init__(
        self,
        model: nn.Module,
        readers: Sequence[Reader],
        every: Sequence[Reader],
        memories: Sequence[Memory],
        length: int,
    ) -> None:
        self.model, self.readers, self.every, self.memories, self.length = model, readers, every, memories, length
        own = sum(p.numel() for p in model.parameters())
        self.rows = int(WORK / (2 * own * length))  # segments of one row that may be read with an emptied part
        self.most = UNITS

    def bounded(self, places: Sequence[int]) -> list[int]:
        """The places that there is work for, each with `_LEAST` rows or more; sets how many units are emptied."""
        kept = list(places)[: max(1, self.rows // _LEAST)]
        self.most = max(4, min(UNITS, (self.rows // max(1, len(kept)) - 2 * len(self.readers)) // 2))
        return kept

    def units(self, segment: int) -> set[tuple[int, int]]:
        """The (memory, unit) that are emptied one by one: all, or those that the segment's tokens read most."""
        read = {
            (m, u): float(one.readers[segment, :, u].sum()) if one.readers.size else 0.0
            for m, one in enumerate(self.memories)
            for u in range(len(one.units))
        }
        return set(sorted(read, key=lambda key: -read[key])[: self.most])

    def variants(self, state: State, units: set[tuple[int, int]]) -> dict[Change, State]:
        """The state of one row with each change."""
        fresh = reset(state, torch.ones(1, dtype=torch.bool, device=leaves(state)[0].device))
        found = {Change(WHOLE): fresh}
        kinds = [reader.all_of_kind for reader in self.every]
        found |= {
            Change(f"all {kind}"): made
            for kind, made in emptied_by_kind(self.every, state).items()
            if kinds.count(kind) > 1
        }
        several = sum(bool(reader.units) for reader in self.readers) > 1
        for m, reader in enumerate(self.readers):
            changed = {Change(reader.name, m): reader.emptied(state, None)}
            changed |= {Change(name, m): group for name, group in reader.groups(state).items()}
            for u, unit in enumerate(reader.units):
                if (m, u) in units:
                    name = f"{reader.name}: {unit}" if several else unit
                    changed[Change(name, m, u)] = reader.emptied(state, u)
                    changed[Change(name, m, u, True)] = reader.alone(state, u)
            found |= {change: made for change, made in changed.items() if made is not None}
        return found


def find_effects(
    effects: Effects, tokens: Tensor, targets: Tensor, wanted: Sequence[int], state: State, emptied: bool = True
) -> list[Place]:
    """The places with their probabilities, as read and with parts of the memory emptied.

    tokens [1, N], targets [N]; wanted: numbers of the tokens that predict. emptied: False: only as read. Cost: for each
    boundary before a place, up to `TRACED`, a row for each part that is emptied, read from there to the place, in
    batches.
    """
    model, length, places = effects.model, effects.length, []
    wanted = effects.bounded(wanted)
    if not wanted:
        return []
    ends = {i // length: [j for j in wanted if j // length == i // length] for i in wanted}
    running: list[tuple[int, list[Change], State]] = []  # boundary, what, rows
    reach = TRACED  # segments that a row with an emptied part is read over
    for segment in range(max(ends) + 1):
        x = tokens[:, segment * length : (segment + 1) * length]
        near = [s for s in ends if segment <= s < segment + TRACED]
        if emptied and near and state is not None:
            units = effects.units(near[0])
            variants = effects.variants(state, units)
            size = sum(leaf.numel() * leaf.element_size() for leaf in leaves(state)) * len(variants)
            most = max(1, min(TRACED, BYTES // max(1, size), effects.rows // len(wanted) // len(variants)))
            if near[0] - segment < most:
                running.append((segment, list(variants), join(list(variants.values()))))
                reach = most
        running = [one for one in running if any(segment <= s < one[0] + reach for s in ends)]
        outputs, after = model(x, state)
        here = []
        for i in ends.get(segment, ()):
            p = log_probabilities(model, outputs[0, i - segment * length]).exp()
            target, guess = int(targets[i]), int(p.argmax())
            here.append(Place(i + 1, target, float(p[target]), guess, float(p[guess])))
        going = []
        for boundary, names, rows in running:
            made, ends_of = _run(model, x, rows)
            going.append((boundary, names, ends_of))
            for place in here:
                _add(place, boundary, names, model, made, place.token - 1 - segment * length)
        running, state = going, after
        places += here
    for place in places:
        place.effects = telling(place, [memory.name for memory in effects.memories])
    return places


def telling(place: Place, names: Sequence[str]) -> list[Effect]:
    """The effects without units kept alone of a memory that is not needed, since the others then have the answer.

    names: of the memories.
    """
    least = LOST * place.probability
    wholes = [one for one in place.effects if one.change.memory is not None and one.change.unit is None]
    needed = {
        change.memory
        for change, p in wholes
        if change.name == names[change.memory or 0] and bool((p < least).any())  # all of it, and not one of its parts
    }
    return [one for one in place.effects if not one.change.alone or one.change.memory in needed]


def _run(model: nn.Module, x: Tensor, rows: State) -> tuple[list[Tensor], State]:
    """The outputs of every row and the states after, in batches of at most `BYTES` of states."""
    count = leaves(rows)[0].shape[0]
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves(rows)) // count
    batch = max(1, BYTES // 4 // max(1, size))
    outputs, after = [], []
    for part in torch.arange(count, device=x.device).split(batch):
        y, state = model(x.expand(len(part), -1), select(rows, part))
        outputs.append(y)
        after.append(state)
    return outputs, after[0] if len(after) == 1 else join(after)


def _add(
    place: Place,
    boundary: int,
    names: Sequence[Change],
    model: nn.Module,
    outputs: Sequence[Tensor],
    column: int,
) -> None:
    """Note the place's probability in every emptied row."""
    found = torch.cat([log_probabilities(model, y[:, column])[:, place.answer].exp() for y in outputs]).cpu().numpy()
    place.boundaries.append(boundary)
    known = {one.change: one.probability for one in place.effects}
    width = len(place.boundaries) - 1
    for change, value in zip(names, found, strict=True):
        row = known.get(change, np.full(0, np.nan))
        known[change] = np.concatenate([row, np.full(width - len(row), np.nan), [value]])
    place.effects = [Effect(change, row) for change, row in known.items()]


def check_finite(outputs: Tensor) -> None:
    """Raises InputError for the outputs of a model whose training diverged."""
    if not bool(outputs.isfinite().all()):
        raise InputError(
            "look: expected a model with finite outputs, found NaN or infinity; its training diverged, look at another"
        )


def read_segments(model: nn.Module, tokens: Tensor, state: State, length: int) -> tuple[Tensor, State]:
    """Read tokens [B, T] in segments, as training does; returns the last segment's outputs, and the state."""
    for part in tokens.split(length, 1):
        outputs, state = model(part, state)
    return outputs, state


def log_probabilities(model: nn.Module, outputs: Tensor) -> Tensor:
    """ln p of every token, [.., V], from a model's outputs."""
    own = likelihood_of(model)
    return torch.log_softmax(outputs.float(), -1) if own is None else own.log_prob(outputs)
