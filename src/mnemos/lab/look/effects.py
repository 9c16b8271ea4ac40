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
PREDICTIONS = 6  # words whose prediction is looked at, where the document asks no question
TRACED = 32  # boundaries before a prediction, at which memory is emptied
KNOWN = 0.5  # a probability that is never as great is no answer
LOST = 0.5  # of the probability as read: below it, the answer is lost
_LEAST = 40  # rows of a prediction
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
    """A change, and the probability of the answer after it, made before each of `boundaries`; NaN: not made."""

    change: Change
    probability: Array


@dataclass
class Prediction:
    """A predicted token, as read and with parts of the memory emptied."""

    token: int  # its number in the document (N: after the end)
    answer: int  # which token it is
    probability: float  # of the answer, as read
    guess: int  # the likeliest token
    certainty: float  # its probability
    answer_text: str = ""
    guess_text: str = ""
    boundaries: list[int] = field(default_factory=list)  # segments before which memory was emptied
    effects: list[Effect] = field(default_factory=list)


def choose_targets(targets: Sequence[int], helped: Array, length: int) -> list[int]:
    """The targets to look at, by position: all if they are few, else those that memory helped most, one a segment."""
    counted = [i for i, target in enumerate(targets) if target >= 0]
    if len(counted) <= PREDICTIONS:
        return counted
    chosen: dict[int, int] = {}  # by segment
    gains = np.nan_to_num(helped[1:], nan=-np.inf)
    for i in np.argsort(-gains, kind="stable").tolist():
        if len(chosen) == PREDICTIONS or not gains[i] > 0:
            break
        chosen.setdefault(i // length, i)
    return sorted(chosen.values())


def emptied_by_kind(readers: Sequence[Reader], state: State) -> dict[str, State]:
    """The state with all memories of one kind as in a new row, by kind; those with nothing to empty are left out."""
    states: dict[str, State] = {}
    for reader in readers:
        changed = reader.emptied(states.get(reader.plural, state), None)
        if changed is not None:
            states[reader.plural] = changed
    return states


def look_at_targets(
    model: nn.Module,
    readers: Sequence[Reader],
    every: Sequence[Reader],
    memories: Sequence[Memory],
    tokens: Tensor,
    targets: Tensor,
    wanted: Sequence[int],
    length: int,
    state: State,
    emptied: bool = True,
) -> list[Prediction]:
    """The predictions of some targets with their probabilities, as read and with parts of the memory emptied.

    memories: what the readers recorded; every: the readers of all layers. tokens [1, N], targets [N]; wanted: numbers
    of the tokens that predict. emptied: False: only as read. Cost: for each boundary before a target, up to `TRACED`, a
    row for each part that is emptied, read from there to the target.
    """
    # --- how much is emptied, by the work that it makes: targets, then units of memories, then boundaries ---
    parameters = sum(p.numel() for p in model.parameters())
    rows_most = int(WORK / (2 * parameters * length))  # segments of one row that may be read with an emptied part
    wanted = list(wanted)[: max(1, rows_most // _LEAST)]
    units_most = max(4, min(UNITS, (rows_most // max(1, len(wanted)) - 2 * len(readers)) // 2))
    by_segment: dict[int, list[int]] = {}
    for i in wanted:
        by_segment.setdefault(i // length, []).append(i)

    predictions: list[Prediction] = []
    running: list[tuple[int, list[Change], State]] = []  # boundary, what was emptied, and the state of these rows
    reach = TRACED  # segments that a row with an emptied part is read over
    for segment in range(max(by_segment, default=-1) + 1):
        x = tokens[:, segment * length : (segment + 1) * length]

        # --- rows that begin here, with a part emptied; those that no target waits for end ---
        near = [s for s in by_segment if segment <= s < segment + TRACED]
        if emptied and near and state is not None:
            # Units are emptied one by one: all of them, or those that the target's segment read most.
            read = {
                (m, u): float(one.readers[near[0], :, u].sum()) if one.readers.size else 0.0
                for m, one in enumerate(memories)
                for u in range(len(one.units))
            }
            chosen = set(sorted(read, key=lambda key: -read[key])[:units_most])
            states = _emptied_states(readers, every, state, chosen)
            most = BYTES // max(1, _bytes(state) * len(states))
            most = max(1, min(TRACED, most, rows_most // len(wanted) // len(states)))
            if near[0] - segment < most:
                running.append((segment, list(states), join(list(states.values()))))
                reach = most
        running = [one for one in running if any(segment <= s < one[0] + reach for s in by_segment)]

        # --- the segment as it is, and its predictions ---
        outputs, state = model(x, state)
        of_segment = []
        for i in by_segment.get(segment, ()):
            p = log_probabilities(model, outputs[0, i - segment * length]).exp()
            target, guess = int(targets[i]), int(p.argmax())
            of_segment.append(Prediction(i + 1, target, float(p[target]), guess, float(p[guess])))
        predictions += of_segment

        # --- the same from every row with a part emptied, in batches of at most `BYTES` of states ---
        effects: list[dict[Change, list[float]]] = [{} for _ in of_segment]
        for number, (boundary, changes, rows) in enumerate(running):
            size = max(1, BYTES // 4 // max(1, _bytes(rows) // len(changes)))
            batches = torch.arange(len(changes), device=x.device).split(size)
            answers = [model(x.expand(len(part), -1), select(rows, part)) for part in batches]
            after = [rows_after for _, rows_after in answers]
            running[number] = (boundary, changes, after[0] if len(after) == 1 else join(after))
            for one, of_one in zip(of_segment, effects, strict=True):
                at = one.token - 1 - segment * length
                p = torch.cat([log_probabilities(model, y[:, at])[:, one.answer].exp() for y, _ in answers])
                for change, value in zip(changes, p.tolist(), strict=True):
                    before = of_one.setdefault(change, [])
                    before += [np.nan] * (len(one.boundaries) - len(before)) + [value]
                one.boundaries.append(boundary)
        for one, of_one in zip(of_segment, effects, strict=True):
            one.effects = [Effect(change, np.array(values)) for change, values in of_one.items()]
            one.effects = telling(one, [memory.name for memory in memories])
    return predictions


def _emptied_states(
    readers: Sequence[Reader], every: Sequence[Reader], state: State, units: set[tuple[int, int]]
) -> dict[Change, State]:
    fresh = reset(state, torch.ones(1, dtype=torch.bool, device=leaves(state)[0].device))
    kinds = [reader.plural for reader in every]
    states: dict[Change, State | None] = {Change(WHOLE): fresh}
    for kind, changed in emptied_by_kind(every, state).items():
        if kinds.count(kind) > 1:
            states[Change(f"all {kind}")] = changed
    several = sum(bool(reader.units) for reader in readers) > 1
    for m, reader in enumerate(readers):
        states[Change(reader.name, m)] = reader.emptied(state, None)
        states |= {Change(name, m): group for name, group in reader.groups(state).items()}
        for u, unit in enumerate(reader.units):
            if (m, u) in units:
                name = f"{reader.name}: {unit}" if several else unit
                states[Change(name, m, u)] = reader.emptied(state, u)
                states[Change(name, m, u, True)] = reader.alone(state, u)
    return {change: changed for change, changed in states.items() if changed is not None}


def _bytes(state: State) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state))


def telling(prediction: Prediction, names: Sequence[str]) -> list[Effect]:
    """The effects without units kept alone of a memory that is not needed, since the others then have the answer."""
    least = LOST * prediction.probability
    wholes = [one for one in prediction.effects if one.change.memory is not None and one.change.unit is None]
    needed = {
        change.memory
        for change, p in wholes
        if change.name == names[change.memory or 0] and bool((p < least).any())  # all of it, and not one of its parts
    }
    return [one for one in prediction.effects if not one.change.alone or one.change.memory in needed]


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
